"""Kernels compiled ahead for a GPU host: a step with the archive compiles nothing, or it says why.

This needs triton without its interpreter, so all runs in a process of its own, which this file is the script
of.
"""

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton_process import hand_over, run_alone

pytestmark = pytest.mark.complete

# --- in the process without the interpreter -------------------------------------------------------


def packed_and_used() -> dict[str, Any]:
    """Compile a step and pack the kernels; take the step again with the archive; change what it fits."""
    from keyedopt.tools import kernel_cache

    torch.set_num_threads(1)
    steps = dict(kernel_cache.workload_steps())
    some = [("a step", steps["8x200k-zipf, train-sgd"])]
    dense = list(kernel_cache.dense_steps())
    found: dict[str, Any] = {"steps": list(steps), "checks": [name for name, _ in kernel_cache.check_steps()]}
    found["comparisons"] = [name for name, _ in kernel_cache.comparison_steps()]
    with tempfile.TemporaryDirectory() as name:
        folder, archive = Path(name), Path(name, "kernels.tar.gz")
        found["first"] = kernel_cache.compile_steps(some, folder / "made", (90,))
        kernel_cache.pack(folder / "made", archive, (90,))
        (folder / "made").rename(folder / "elsewhere")
        found["dense"] = kernel_cache.compile_steps(dense, folder / "dense", (90,))
        found["fits"] = kernel_cache.unpack(archive, folder / "used", 90)
        found["again"] = kernel_cache.compile_steps(some, folder / "used", (90,))
        found["other GPU"] = kernel_cache.unpack(archive, folder / "no", 100)
        with patch.object(kernel_cache, "triton_key", lambda: "another build"):
            found["other build"] = kernel_cache.unpack(archive, folder / "no", 90)
        with patch.dict("os.environ", {"DISABLE_PTXAS_OPT": "1"}):
            found["other environment"] = kernel_cache.unpack(archive, folder / "no", 90)
        found["unpacked"] = (folder / "no").exists()
    return found


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(tmp_path_factory, __file__, interpret=False)


def test_a_step_with_the_archive_compiles_nothing(found: dict[str, Any]) -> None:
    (compiled,) = found["first"].values()
    assert {"pool", "write_keys", "radix_pass", "find_runs", "sum_chunks", "update"} <= set(compiled)
    assert found["fits"] == []
    assert found["again"] == {"sm_90, a step": []}


def test_dense_steps_have_four_kernels(found: dict[str, Any]) -> None:
    assert list(found["dense"].values()) == [["update_dense"]] * 4


def test_an_archive_that_does_not_fit_says_why(found: dict[str, Any]) -> None:
    assert found["other GPU"] == ["the kernels are for sm_90, not for sm_100"]
    (build,) = found["other build"]
    assert build.startswith("Triton: ")
    (environment,) = found["other environment"]
    assert environment.startswith("environment variables of Triton: ")
    assert not found["unpacked"]


def test_every_workload_of_the_script_is_compiled(found: dict[str, Any]) -> None:
    names = {name.partition(",")[0] for name in found["steps"]}
    assert names == {
        *("8x200k-zipf", "8x200k-uniform", "one-huge-table", "wide-rows", "dlrm-dcnv2-100th"),
        *("32x8192x20x64", "small-step", "500-tiny-tables", "all-the-same-row", "all-distinct"),
        *("sparse-zipf", "sparse-uniform", "8 tables", "26 tables", "500 tables"),
    }
    assert len(found["comparisons"]) == len(set(found["comparisons"])) >= 15
    assert len(found["checks"]) == 3 * 7 + 3


if __name__ == "__main__":
    hand_over(json.loads(json.dumps(packed_and_used())))
