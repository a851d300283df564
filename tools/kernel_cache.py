"""Compile the Triton kernels of `first_light.sh` without a GPU, so that the GPU host only measures.

``python -m keyedopt.tools.kernel_cache make`` takes a step of every case of `compare_kernels`, of every
workload of `benchmarks.gpu.speed`, of `benchmarks.gpu.checks`, of the self-check, and of dense parameters by
Adam and AdamW with and without clipping. The driver launches nothing, and the compiled kernels are written to
an archive beside `first_light.sh`. ``check`` repeats the steps with the archive, and fails if a kernel is
compiled. ``use FOLDER`` unpacks the archive for TRITON_CACHE_DIR if it fits, and otherwise says why it does
not. An archive fits the build of Triton, the source of the kernels and the architectures that it was made
for.

Kernels that only the conformance suite launches are not among them.
"""

import argparse
import hashlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key

from keyedopt import fused, ptx
from keyedopt.benchmarks import tasks
from keyedopt.benchmarks.gpu import checks, model, speed
from keyedopt.benchmarks.workloads import WORKLOADS, Dense, Lookups, SparseGradients
from keyedopt.conformance.targets.find import find
from keyedopt.fused import backends
from keyedopt.fused.backends import self_check
from keyedopt.fused.backends.triton import TritonBackend, backend
from keyedopt.fused.dense import cpu_fast_path, triton_dense_steps
from keyedopt.tools import compare_kernels
from keyedopt.tools.compile_ahead import ARCHITECTURES

ARCHIVE = Path(checks.__file__).with_name("kernels.tar.gz")
MANIFEST = "manifest.json"
#: What a launch reads of a compiled kernel.
KEPT = (".json", ".cubin")

Step = Callable[[], object]
Steps = Iterable[tuple[str, Step]]


def manifest(architectures: Sequence[int]) -> dict[str, str]:
    """Return what determines whether compiled kernels are found, by what it is called in messages."""
    digest = hashlib.sha256()
    for path in sorted(Path(backend.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    compilers = [make_backend(GPUTarget("cuda", one, 32)).hash() for one in architectures]
    return {
        "Triton": f"{triton.__version__} {hashlib.sha256(triton_key().encode()).hexdigest()[:16]}",
        "the source of keyedopt's kernels": digest.hexdigest()[:16],
        "environment variables of Triton": str(sorted(get_cache_invalidating_env_vars().items())),
        **{f"ptxas for sm_{one}": text for one, text in zip(architectures, compilers, strict=True)},
    }


# --- what is compiled -----------------------------------------------------------------------------


def workload_steps() -> Iterator[tuple[str, Step]]:
    """Name the steps of the workloads of `speed` that launch Triton kernels.

    All lookups are of one row, because kernels do not depend on the rows.
    """
    surface, seen = find("fused").surface(), set()
    for work, task in speed.pairs():
        key = work.name, task.kind, task.optimizer, task.part
        if isinstance(work, Dense) or key in seen:
            continue
        seen.add(key)
        yield f"{work.name}, {task.name}", partial(take, surface, work, task)
    for who in speed.SORTS:
        yield f"{model.LARGE.name}, sorted by {who}", partial(take_sorted, surface, who)
    for count in speed.COUNTS:
        small = WORKLOADS["small-step"]
        assert isinstance(small, Lookups)
        some = replace(small, name=f"{count} tables", tables=count)
        yield f"{some.name}, host time", partial(take, surface, some, tasks.TASKS[speed.TABLES[0]])


def comparison_steps() -> Iterator[tuple[str, Step]]:
    """Name the cases of `compare_kernels`; what they find means nothing, as nothing runs."""
    for case in compare_kernels.CASES:
        name = f"comparison, {case.algorithm}, {case.dtype}, {case.width}, {case.options}"
        yield name, partial(compare_case, case)


def compare_case(case: compare_kernels.Case) -> None:
    """Launch the kernels of a case.

    Raises:
        RuntimeError: a stage raised, so that its kernels are not compiled.
    """
    for wrong in compare_kernels.compare(case, "cpu"):
        if wrong.message and not wrong.shape:
            raise RuntimeError(f"{wrong.stage}: {wrong.message}")


def take(surface: Any, work: Lookups | SparseGradients, task: tasks.Task) -> None:
    """Take a step of a task, after a forward pass without gradients if there is one."""
    job = tasks.make(surface, task, replace(work, indices="same"), "cpu")
    if task.part == "backward":
        with torch.no_grad():
            job.prepare()
    job.prepare()
    job.run()


def take_sorted(surface: Any, who: str) -> None:
    """Take a step of many lookups that one of `speed.SORTS` sorts."""
    with speed.sorting_by(who):
        take(surface, model.LARGE, tasks.TASKS[speed.TABLES[0]])


def check_steps() -> Iterator[tuple[str, Step]]:
    """Name the steps of `checks`, with each number of bags."""
    for name in checks.ALGORITHMS:
        for bags in (checks.BAGS, 64 * checks.BAGS, 256 * checks.BAGS):
            yield f"checks, {name}, {bags} bags", partial(check_step, name, bags)
    for name in ("SGD", "Adagrad", "Adam"):
        yield f"checks, tables and dense, {name}", partial(check_whole_step, name)


def check_step(algorithm: str, bags: int) -> None:
    """Take a step of the tables of `checks`."""
    checks.step(checks.tables(fused, algorithm, "cpu"), checks.features("cpu", 0, bags))


def check_whole_step(algorithm: str) -> None:
    """Take a step of tables and a dense layer."""
    checks.Whole(fused, algorithm, "cpu").step(checks.features("cpu"))


def dense_steps() -> Iterator[tuple[str, Step]]:
    """Name steps of dense parameters; the kernel is the same for 1 to 64 parameters."""
    for name in ("Adam", "AdamW"):
        for scaled in (False, True):
            yield f"dense, {name}{', clipped' * scaled}", partial(dense_step, name, scaled)


def dense_step(algorithm: str, scaled: bool) -> None:
    """Take a step of a parameter, whose gradient is divided by a scale as clipping does."""
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = getattr(fused, algorithm)([param], lr=0.1)
    if scaled:
        optimizer.grad_scale = torch.tensor(2.0)
    param.grad = torch.ones_like(param)
    optimizer.step()


@contextmanager
def as_on_cuda(architecture: int) -> Iterator[list[str]]:
    """Launch nothing; the Triton backend treats tensors on the CPU as on CUDA. Return what is compiled."""
    compiled: list[str] = []

    def listen(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        compiled.extend([] if cache_hit else [metadata["name"]])

    def checked(chosen: Any, tables: Any, step: Any) -> str:
        wrong = self_check.wrong_kernel(chosen, tables, step) if chosen.name == "triton" else ""
        assert "raised" not in wrong, wrong  # results are wrong, as nothing runs
        return ""

    sort = TritonBackend.wrong_sort
    with ExitStack() as stack, triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        for where, name, value in (
            (backend, "interpreted", lambda: True),
            (triton_dense_steps, "DEVICES", ("cpu", "cuda")),
            (cpu_fast_path, "try_step", lambda optimizer: "steps are as on CUDA"),
            (TritonBackend, "counts_steps", lambda self, device: True),
            (TritonBackend, "wrong_sort", lambda *given: sort(*given) and ""),
            (self_check, "near", lambda *given: True),
            (self_check, "_same_sums", lambda *given: True),
            (backends, "check_at_first_use", checked),
            (tasks.tables, "fill", lambda weight: None),
            (tasks.sparse, "fill", lambda weight: None),
        ):
            stack.enter_context(patch.object(where, name, value))
        stack.enter_context(patch.dict(os.environ, {"KEYEDOPT_BACKEND": "triton"}))
        stack.enter_context(ptx.idle(architecture))
        yield compiled


def compile_steps(
    steps: Steps, folder: Path, architectures: Sequence[int] = ARCHITECTURES
) -> dict[str, list[str]]:
    """Take steps with a cache of compiled kernels; return by step the kernels that were not in it."""
    found = {}
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        for architecture in architectures:
            for name, step in steps:
                with as_on_cuda(architecture) as compiled:
                    step()
                found[f"sm_{architecture}, {name}"] = compiled
                print(f"sm_{architecture}, {name}: {len(compiled)} compiled", flush=True)
    return found


# --- the archive ----------------------------------------------------------------------------------


def pack(folder: Path, archive: Path, architectures: Sequence[int] = ARCHITECTURES) -> None:
    """Write the kernels of a cache, and what they fit, to an archive."""
    with tarfile.open(archive, "w:gz") as tar:
        text = json.dumps(manifest(architectures)).encode()
        entry = tarfile.TarInfo(MANIFEST)
        entry.size = len(text)
        tar.addfile(entry, BytesIO(text))
        for path in sorted(folder.rglob("*")):
            if path.suffix in KEPT:
                tar.add(path, str(path.relative_to(folder)))


def unpack(archive: Path, folder: Path, architecture: int | None = None) -> list[str]:
    """Unpack an archive into a folder for TRITON_CACHE_DIR, if it fits; return what does not fit.

    Args:
        archive: see `pack`.
        folder: is made.
        architecture: of the GPU; by default any of those that the archive was made for.
    """
    with tarfile.open(archive) as tar:
        known = json.load(tar.extractfile(MANIFEST) or BytesIO())
        made = [int(name.rpartition("_")[2]) for name in known if name.startswith("ptxas for ")]
        here = manifest([one for one in made if architecture in (None, one)])
        wrong = [
            f"{name}: {known[name]} in the archive, {text} here"
            for name, text in here.items()
            if known[name] != text
        ]
        if architecture not in (None, *made):
            wrong.append(
                f"the kernels are for {' and '.join(f'sm_{one}' for one in made)}, not for sm_{architecture}"
            )
        if wrong:
            return wrong
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer
        tar.extractall(folder)
    for path in folder.rglob("__grp__*"):  # Triton finds files by their absolute paths
        files = json.loads(path.read_text(encoding="utf-8"))["child_paths"]
        kept = {name: str(path.with_name(name)) for name in files if path.with_name(name).exists()}
        path.write_text(json.dumps({"child_paths": kept}), encoding="utf-8")
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("make", "check", "use"))
    parser.add_argument("folder", nargs="?", type=Path, help="where `use` unpacks")
    parser.add_argument("--archive", type=Path, default=ARCHIVE)
    parser.add_argument("--architecture", type=int, action="append", help="such as 90; default: all known")
    given = parser.parse_args(arguments)
    architectures = tuple(given.architecture or ARCHITECTURES)
    if given.what == "use":
        major, minor = torch.cuda.get_device_capability()
        wrong = unpack(given.archive, given.folder, 10 * major + minor)
        fits = "does not fit, so kernels are compiled here" if wrong else "fits"
        print("\n".join([*wrong, f"{given.archive.name} {fits}"]))
        return 1 if wrong else 0
    steps = [*comparison_steps(), *check_steps(), *dense_steps(), *workload_steps()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.what == "make":
            compile_steps(steps, folder, architectures)
            pack(folder, given.archive, architectures)
            print(f"{given.archive}: {given.archive.stat().st_size / 1e6:.1f} MB")
            return 0
        wrong = unpack(given.archive, folder)
        compiled = {} if wrong else compile_steps(steps, folder, architectures)
    wrong += [f"{step}: {', '.join(kernels)}" for step, kernels in compiled.items() if kernels]
    print("\n".join(wrong) or "nothing was compiled")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
