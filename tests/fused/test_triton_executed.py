"""The compiled Triton kernels on the CPU: the cases of the interpreter tests, in the PTX executor.

Here a sample runs, and a few planted faults. ``python tests/fused/test_triton_executed.py --schedules 200``,
with tests/support in PYTHONPATH, runs every case with other schedules each time until each kernel ran under
200, then all planted faults, and prints what happened.
Triton must not interpret kernels, so this file is the script of a process of its own.
"""

import argparse
import importlib.util
import sys
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch
from sampling import Sample, chosen
from test_triton_interpreter import cases
from triton_executor import OWN, outcome, planted, run_rounds
from triton_faults import FAULTS
from triton_packed import idle_launches
from triton_process import hand_over, run_alone

SAMPLE = (
    *(
        "step-rowwise-float32",
        "step-partial_adam-float32",
        "step-adam-bfloat16",
        "width-8",
        "pooling-weighted_mean",
    ),
    *(
        "sort-packed",
        "sort-all_the_same",
        "runs-chunks",
        "runs-hot_between",
        "coalesce",
        "random-float16",
        *OWN,
    ),
)
SAMPLE_FAULTS = (
    "no barrier before the sorted tile is read",
    "the count of a tile is published by a store",
    "tiles are taken in the order of programs",
    "an atomic exchange becomes a store",
    "a mask of a load is dropped",
    "a shuffle is of half a warp",
)
KERNELS = {
    "write_keys",
    "radix_pass",
    "find_runs",
    "check_offsets",
    "pool",
    "sum_chunks",
    "fold_chunks",
    "update",
}


def small_backend() -> Any:
    from keyedopt.fused.backends.triton import TritonBackend
    from keyedopt.fused.backends.triton.shapes import Tuning

    torch.set_num_threads(1)
    return TritonBackend(Tuning(block=16, chunk=8, fold=2, values=16, probes=4, tile=128))


def every_case() -> dict[str, Any]:
    return dict(cases()) | OWN


# --- in the process without the interpreter -------------------------------------------------------


def run_sample(names: Collection[str]) -> dict[str, Any]:
    """Run the cases and plant the faults with these names."""
    every, backend = every_case(), small_backend()
    wrong, seen = run_rounds([(name, every[name]) for name in SAMPLE if name in names], backend, (90,), 1)
    faults = [fault for fault in FAULTS if fault.name in SAMPLE_FAULTS and fault.name in names]
    for fault in FAULTS:
        if not fault.ptx:
            with planted(fault):  # the kernel contains what the fault replaces
                pass
    return {
        "wrong": wrong,
        "kernels": list(seen),
        "launches": idle_launches(backend),
        "faults": {fault.name: outcome(fault, every, backend) for fault in faults},
    }


def run_everything(rounds: int, architecture: int, schedules: int, names: list[str]) -> None:
    """Print the outcome of every case, more rounds of cases whose kernels ran too rarely, and every fault."""
    every, backend = every_case(), small_backend()
    seen: Counter[str] = Counter()
    launches: dict[str, Counter[str]] = {}

    def run(name: str, seed: int) -> None:
        wrong, launches[name] = run_rounds([(name, every[name])], backend, (architecture,), rounds, seed)
        seen.update(launches[name])
        print(f"{name}: {wrong[name] or 'right'}", flush=True)

    for name in every:
        if not names or name in names:
            run(name, 0)
    while launches and min(seen.values()) < schedules:
        rarest = min(seen, key=seen.__getitem__)
        run(max(launches, key=lambda name: launches[name][rarest] / launches[name].total()), seen.total())
    print(f"sm_{architecture}, schedules of each kernel: {dict(sorted(seen.items()))}", flush=True)
    for fault in FAULTS:
        if not names or fault.name in names:
            print(f"{fault.name}: {outcome(fault, every, backend) or 'not seen ' + fault.hidden}", flush=True)


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sample: Sample) -> Any:
    if importlib.util.find_spec("keyedopt.ptx._machine") is None:
        pytest.fail("the PTX executor was not built: pip install -e . with g++ 10 or later")
    names = [*SAMPLE, *SAMPLE_FAULTS] if sample.complete else chosen(request, "name")
    return run_alone(tmp_path_factory, __file__, *names, interpret=False)


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("name", SAMPLE)
def test_compiled_kernels_are_right_under_any_schedule(found: dict[str, Any], name: str) -> None:
    assert not found["wrong"][name], found["wrong"][name]


@pytest.mark.complete
def test_the_sample_runs_every_kernel(found: dict[str, Any]) -> None:
    assert set(found["kernels"]) >= KERNELS | {"count_runs", "collect"}


def test_a_step_with_a_packed_input_takes_few_launches_and_compiles_nothing(found: dict[str, Any]) -> None:
    assert [name for name in found["launches"] if name != "radix_pass"] == [
        *("unpack", "write_keys", "find_runs", "pool", "sum_chunks", "update"),
    ]
    assert len(found["launches"]) <= 10


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("name", SAMPLE_FAULTS)
def test_a_planted_fault_is_found(found: dict[str, Any], name: str) -> None:
    assert found["faults"][name]


def test_faults_have_a_reason_if_they_are_hidden() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
    assert set(SAMPLE_FAULTS) <= {fault.name for fault in FAULTS if not fault.hidden}


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--rounds", type=int, default=1)
        parser.add_argument("--architecture", type=int, default=90)
        parser.add_argument("--schedules", type=int, default=0, help="at least so many of each kernel")
        parser.add_argument("names", nargs="*")
        given = parser.parse_args()
        run_everything(given.rounds, given.architecture, given.schedules, given.names)
    else:
        hand_over(run_sample(sys.argv[1:-1]))
