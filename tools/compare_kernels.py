"""Stage 2 of a first run on a GPU: each Triton kernel on a small problem, against two others.

The problem is that of `self_check`. The sort, the lookup, the sums and the update are compared with the
backend ``torch`` on the device; a step of a module is compared with `keyedopt.reference` in float64 on
the CPU, and so is a step of dense parameters by Adam. Each case has a process of its own, and all cores
compile: ``python -m keyedopt.tools.compare_kernels CASE DEVICE`` runs one case and prints it as JSON.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyedopt import fused, reference
from keyedopt.benchmarks.gpu import checks
from keyedopt.benchmarks.gpu.stage import Context, finish
from keyedopt.conformance.results.untrusted import error_text
from keyedopt.fused.backends import get, self_check
from keyedopt.fused.backends.interface import ALGORITHMS, ROW_STATE, Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.triton import launcher
from keyedopt.fused.backends.triton.backend import interpreted


@dataclass(frozen=True)
class Case:
    """What one process compares.

    Args:
        algorithm, dtype, width: of the tables.
        options: of the step.
    """

    algorithm: str
    dtype: str = "float32"
    width: int = 64
    options: dict[str, Any] = field(default_factory=dict)


#: One case for each algorithm of the Triton kernels; then dtypes, widths and options with code of their own.
CASES = (
    *(Case(name, options={"eps": 1e-8}) for name in ALGORITHMS if name not in ("sparse_adam", "ftrl")),
    Case("sgd", options={"momentum": 0.9}),
    Case("rowwise_adagrad", "float16", options={"eps": 1e-8, "seed": 1}),
    Case("adam", "bfloat16", options={"eps": 1e-8}),
    Case("rowwise_adagrad", width=512, options={"eps": 1e-8}),
    Case("adam", width=7, options={"eps": 1e-8}),
    Case("rowwise_adagrad", width=4, options={"eps": 1e-8, "max_norm": 1.0}),
    Case("adagrad", width=128, options={"eps": 1e-8, "weight_decay": 0.01, "decay": "decoupled"}),
)
#: The public class of each algorithm, and the largest relative error of a step against float64.
CLASSES = {
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rowwise_adagrad": "RowWiseAdagrad",
    "adam": "Adam",
    "partial_rowwise_adam": "PartialRowWiseAdam",
    "lamb": "LAMB",
    "lars_sgd": "LarsSGD",
}
TOLERANCE = 1e-4
#: The largest relative error of a dense step: torch's fused kernel on CUDA has 1.3e-5.
DENSE_TOLERANCE = 1e-6


@dataclass
class Wrong:
    """A wrong result.

    Args:
        stage: sort, look_up, coalesce, update, reference, or dense.
        kernel: the kernel, or kernels, that the stage is about.
        shape, row: of the tensor; the first row that differs.
        seen, right: the first numbers of that row.
        message: why there is no comparison.
    """

    stage: str
    kernel: str
    shape: list[int] = field(default_factory=list)
    row: int = -1
    seen: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    message: str = ""


def first_difference(seen: Tensor, right: Tensor, tolerance: float) -> Wrong | None:
    """Return the first row in which two tensors differ by more than rounding; None if they do not.

    >>> first_difference(torch.zeros(3, 2), torch.tensor([[0.0, 0], [0, 1], [0, 0]]), 1e-4).row
    1
    """
    if seen.shape != right.shape:
        return Wrong("", "", list(seen.shape), message=f"the right shape is {list(right.shape)}")
    if not seen.numel():
        return None
    ours, theirs = (one.detach().cpu().double().reshape(len(one), -1) for one in (seen, right))
    close = torch.isclose(ours, theirs, tolerance, tolerance, equal_nan=True).all(1)
    if bool(close.all()):
        return None
    row = int((~close).nonzero()[0])
    return Wrong("", "", list(seen.shape), row, ours[row, :8].tolist(), theirs[row, :8].tolist())


def compare(case: Case, device: str, name: str = "triton") -> list[Wrong]:
    """Compare the stages of a step of a backend; return what is wrong, the first stage first."""
    backend, other = get(name), get("torch")
    tables, step = problem(case, device)
    ours, lookups = self_check._problem(tables, backend.long_run)
    theirs = [self_check._copied(one) for one in ours]
    step = self_check._numbers(step)
    dtype = getattr(torch, case.dtype)

    def sort() -> list[tuple[Tensor, Tensor]]:
        kernel = backend.wrong_sort(ours, lookups)
        if kernel:
            raise ArithmeticError(f"{kernel} differs from torch's sort")
        return []

    def look_up() -> list[tuple[Tensor, Tensor]]:
        exact = self_check.exact_outputs(ours, lookups)
        return list(zip(backend.look_up(ours, lookups), exact, strict=True))

    def coalesce() -> list[tuple[Tensor, Tensor]]:
        return sums(backend.coalesce(ours, lookups), other.coalesce(ours, lookups))

    def update() -> list[tuple[Tensor, Tensor]]:
        return updates(backend, other, ours, theirs, lookups, step)

    found = []
    for stage in (sort, look_up, coalesce, update):
        kernel = backend.kernel_names.get(stage.__name__, stage.__name__)
        exact = torch.float32 if stage is not update else dtype
        wrong = difference(stage, self_check.TOLERANCES[exact])
        if wrong is not None:
            wrong.stage, wrong.kernel = stage.__name__, kernel
            found.append(wrong)
            if wrong.message and not wrong.shape:  # after an error of CUDA nothing more can be launched
                break
    return found


def difference(stage: Callable[[], Sequence[tuple[Tensor, Tensor]]], tolerance: float) -> Wrong | None:
    """Return the first difference of the pairs of a stage, or the error that it raised."""
    try:
        for seen, right in stage():
            wrong = first_difference(seen, right, tolerance)
            if wrong is not None:
                return wrong
    except Exception as error:  # any error is the result of this stage
        return Wrong("", "", message=error_text(error))
    return None


def problem(case: Case, device: str) -> tuple[list[Table], Step]:
    """Return tables of a case, from which `self_check` makes its problem, and the step."""
    states = len(ALGORITHMS[case.algorithm]) or int("momentum" in case.options)
    weight = torch.zeros(4, case.width, dtype=getattr(torch, case.dtype), device=device)
    row = ROW_STATE.get(case.algorithm)
    shapes = [(4,) if row == index else (4, case.width) for index in range(states)]
    return [Table(weight, tuple(torch.zeros(shape, device=device) for shape in shapes))], Step(
        case.algorithm, lr=0.1, **case.options
    )


def sums(ours: Sequence[RowGradients], theirs: Sequence[RowGradients]) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of row numbers and sums of each table."""
    found = []
    both = (sorted(one, key=lambda each: each.table) for one in (ours, theirs))
    for seen, right in zip(*both, strict=True):
        found += [(seen.rows, right.rows), (seen.grads, right.grads)]
    return found


def updates(
    backend: Any, other: Any, ours: list[Table], theirs: list[Table], lookups: list[Lookup], step: Step
) -> list[tuple[Tensor, Tensor]]:
    """Update both; return the pairs of weights and states."""
    backend.update(ours, lookups, step)
    other.update(theirs, lookups, step)
    pairs = zip(ours, theirs, strict=True)
    return [
        pair
        for one, two in pairs
        for pair in zip((one.weight, *one.states), (two.weight, *two.states), strict=True)
    ]


def against_reference(case: Case, device: str, name: str = "triton") -> list[Wrong]:
    """Compare two steps of a module with the reference in float64 on the CPU."""
    if case.algorithm not in CLASSES or case.dtype != "float32" or case.width != 64:
        return []
    options = {key: value for key, value in case.options.items() if key != "seed"}
    if case.algorithm in ("sgd", "lars_sgd"):
        options.pop("eps", None)
    kind = CLASSES[case.algorithm]

    def contents() -> list[tuple[Tensor, Tensor]]:
        module = checks.tables(fused, kind, device, options=options, backend=name)
        exact = checks.tables(reference, kind, "cpu", torch.float64, options)
        for seed in range(2):
            checks.step(module, checks.features(device, seed))
            checks.step(exact, checks.features("cpu", seed))
        return list(zip(checks.contents(module), checks.contents(exact), strict=True))

    wrong = difference(contents, TOLERANCE)
    if wrong is None:
        return []
    wrong.stage, wrong.kernel = "reference", "a step of the module"
    return [wrong]


def dense(case: Case, device: str) -> list[Wrong]:
    """Compare a step of dense parameters by Adam with the reference in float64 on the CPU."""
    if (case.algorithm, case.dtype, case.width) != ("adam", "float32", 64):
        return []

    def contents() -> list[tuple[Tensor, Tensor]]:
        numbers = torch.Generator().manual_seed(0)
        starts = [torch.randn(size, generator=numbers) for size in (1, 1000, 3, 5000)]
        ours = [torch.nn.Parameter(start.to(device)) for start in starts]
        theirs = [torch.nn.Parameter(start.double()) for start in starts]
        optimizers = fused.Adam(ours, lr=0.1), reference.Adam(theirs, lr=0.1)
        for one, other in zip(ours, theirs, strict=True):
            grad = 1000 * torch.randn(one.shape, generator=numbers)  # so that both moments are large
            one.grad, other.grad = grad.to(device), grad.double()
        for optimizer in optimizers:
            optimizer.step()
        names = ("exp_avg", "exp_avg_sq")
        states = [
            (optimizers[0].state[one][name], optimizers[1].state[other][name])
            for one, other in zip(ours, theirs, strict=True)
            for name in names
        ]
        return [*states, *zip(ours, theirs, strict=True)]

    wrong = difference(contents, DENSE_TOLERANCE)
    if wrong is None:
        return []
    wrong.stage, wrong.kernel = "dense", "update_dense"
    return [wrong]


def compiled() -> dict[str, str]:
    """Return by kernel a hash of its PTX, or of its code if it was compiled ahead without PTX."""
    found = {}
    for kernel, *_ in launcher._COMPILED.values():
        form = "ptx" if "ptx" in kernel.asm else "cubin"
        text = kernel.asm[form]
        data = text.encode() if isinstance(text, str) else bytes(text)
        found[kernel.metadata.name] = f"{form} {hashlib.sha256(data).hexdigest()[:16]}"
    return found


def one(number: int, device: str) -> dict[str, Any]:
    """Return the result of a case."""
    case = CASES[number]
    os.environ[self_check.SELF_CHECK] = "0"  # the same problem, but without the details
    name = "triton" if device.startswith("cuda") or interpreted() else "native"
    wrong = compare(case, device, name) + against_reference(case, device, name) + dense(case, device)
    return {**asdict(case), "wrong": [asdict(each) for each in wrong], "hashes": compiled()}


def run(context: Context) -> None:
    """Run all cases in processes of their own, as many at a time as there are cores; save each as it ends."""
    numbers = [0] if context.small else list(range(len(CASES)))
    found: dict[int, dict[str, Any]] = {}
    waiting, running = list(numbers), dict[int, "subprocess.Popen[bytes]"]()
    while (waiting or running) and context.left() > 0:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            number = waiting.pop(0)
            command = [sys.executable, "-m", "keyedopt.tools.compare_kernels", str(number), context.device]
            output = context.work / f"{number}.txt"
            running[number] = context.start(command, output, OMP_NUM_THREADS="1")
        for number, process in list(running.items()):
            try:
                code = process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            del running[number]
            found[number] = read(context, number, f"exit code {code}")
            context.save(summary(found, len(numbers)))
    for number, process in running.items():
        finish(process, 0.1)
        found[number] = read(context, number, "no time was left")
    context.save(summary(found, len(numbers)))


def read(context: Context, number: int, end: str) -> dict[str, Any]:
    """Return the result that the process of a case printed; if it printed none, how it ended."""
    text = (context.work / f"{number}.txt").read_text(encoding="utf-8", errors="replace")
    last = (text.strip().splitlines() or [""])[-1]
    if last.startswith("{"):
        return dict(json.loads(last))
    wrong = Wrong("process", "unknown", message=f"{end}: {text.strip()[-800:]}")
    return {**asdict(CASES[number]), "wrong": [asdict(wrong)], "hashes": {}}


def summary(found: dict[int, dict[str, Any]], of: int) -> dict[str, Any]:
    """Return the result of the stage: the cases so far, and the first wrong kernel in a sentence."""
    cases = [found[number] for number in sorted(found)]
    first = next((case for case in cases if case["wrong"]), None)
    text = ""
    if first is not None:
        wrong = first["wrong"][0]
        names = [name.strip() for name in wrong["kernel"].replace(" or ", ", ").split(",")]
        hashes = {name: first["hashes"][name] for name in names if name in first["hashes"]}
        text = (
            f"{wrong['kernel']} ({wrong['stage']}) for {first['algorithm']} in {first['dtype']}, width "
            f"{first['width']}, shape {wrong['shape']}, row {wrong['row']}: {wrong['seen']} instead of "
            f"{wrong['right']} {wrong['message']} {hashes}"
        )
    return {"of": of, "cases": cases, "first_wrong": text}


if __name__ == "__main__":
    print(json.dumps(one(int(sys.argv[1]), sys.argv[2])), flush=True)
