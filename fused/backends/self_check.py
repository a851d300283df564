"""The self-check of a backend: what its kernels compute on a device, against the backend ``torch``.

`choose` compares the kernels on a small problem at their first use on a device, because nobody may have tried
them with its driver and compiler. A marker file in the cache folder of the user records that a check passed.
"""

import hashlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import (
    Backend,
    Lookup,
    RowGradients,
    Step,
    Table,
)
from keyedopt.fused.backends.streams import capturing

#: The environment variable that skips the self-check at first use, if it is "0".
SELF_CHECK = "KEYEDOPT_SELF_CHECK"
#: Relative errors that rounding explains: of weights in half precision, 8 roundings (2⁻¹¹ and 2⁻⁸ each); in
#: float32, a sum of 1,700 numbers, each with a rounding of 2⁻²⁴.
TOLERANCES = {torch.float16: 2**-8, torch.bfloat16: 2**-5, torch.float32: 1e-4, torch.float64: 1e-4}
#: Tables of the problem, if there are as many: the constants of kernels depend on the number.
MOST_TABLES = 64

_FOUND: dict[Any, str] = {}


class WrongKernelError(RuntimeError):
    """A kernel computes something else than the backend ``torch``."""


def check_at_first_use(backend: Backend, tables: Sequence[Table], step: Step) -> str:
    """Return which kernel of a backend is wrong on the device of the tables, and what to do; empty if none.

    Kernels are checked once for each device, dtype, widths and options, and not again by later processes with
    the same device, driver, versions and build. Synchronizes if something is checked.

    Args:
        backend: is checked on the device types that it asks for.
        tables: of one device and dtype.
        step: the algorithm with its options.
    """
    device = tables[0].weight.device
    if not asked(backend, device):
        return ""
    widths = [table.weight.shape[1] for table in tables]
    options = replace(step, lr=0.0, count=1, seed=None if step.seed is None else 0, first=False, counters=())
    numbers = isinstance(step.lr, Tensor), isinstance(step.count, Tensor)
    kinds = [(state.ndim, state.dtype) for state in tables[0].states], tables[0].row_counter is None
    many = min(len(tables), MOST_TABLES)
    kind = str(device), str(tables[0].weight.dtype), max(widths), min(widths), many, str(kinds)
    key = backend.name, kind, str(options), numbers
    return check_once(backend, device, key, lambda: wrong_kernel(backend, tables, step))


def asked(backend: Backend, device: torch.device) -> bool:
    """Return whether kernels of a backend are to be checked on a device at their first use."""
    checked = device.type in backend.checked_devices and os.environ.get(SELF_CHECK) != "0"
    return checked and not capturing(device)


def check_once(backend: Backend, device: torch.device, key: Hashable, check: Callable[[], str]) -> str:
    """Return the result of a check: which kernel is wrong, and what to do; empty if none.

    Args:
        backend: whose kernels are checked.
        device: on which they run.
        key: determines the kernels; a later call with the same key returns the same result.
        check: the check, which does not run if it passed in another process.
    """
    if key not in _FOUND:
        passed = _passed(backend, device, key)
        if passed is not None and passed.exists():
            _FOUND[key] = ""
        else:
            _FOUND[key] = check()
            if passed is not None and not _FOUND[key]:
                _remember(passed)
    return _FOUND[key]


def wrong_kernel(backend: Backend, tables: Sequence[Table], step: Step) -> str:
    """Compare the kernels of a backend with the backend ``torch`` on a small problem, on the same device.

    The problem has long and short runs, several tables, duplicates, empty bags, weights and means.

    Returns:
        Which kernel is wrong, where, and what to do; empty if all are right.

    Raises:
        ValueError: the error of lookups before the check.
    """
    from keyedopt.fused.backends import get  # which imports this module

    device = tables[0].weight.device
    backend.check(device)  # an error flag that is set already would stop updates
    torch_backend = get("torch")
    ours, lookups = _problem(tables, backend.long_run)
    theirs = [_copied(table) for table in ours]
    step = _numbers(step)
    stages: dict[str, Callable[[], bool]] = {
        "look_up": lambda: near(backend.look_up(ours, lookups), exact_outputs(ours, lookups)),
        "coalesce": lambda: _same_sums(
            backend.coalesce(ours, lookups), torch_backend.coalesce(ours, lookups)
        ),
        "update": lambda: _same_updates(backend, torch_backend, ours, theirs, lookups, step),
    }
    try:
        stage = "sort"
        kernel, right = backend.wrong_sort(ours, lookups), True
        for stage, compare in stages.items():
            right = right and not kernel and compare()
            if not right and not kernel:
                kernel = backend.kernel_names.get(stage, stage)
        backend.check(device)
        why = "computes wrong results"
    except Exception as error:
        kernel, why = backend.kernel_names.get(stage, stage), f"raised {type(error).__name__}: {error}"
    kind = f"{step.algorithm} in {ours[0].weight.dtype}"
    return report(backend, kernel, why, device, kind, "backend='torch' or ") if kernel else ""


def report(
    backend: Backend, kernel: str, why: str, device: torch.device, kind: str, setting: str = ""
) -> str:
    """Return a sentence about a wrong kernel.

    Args:
        backend: of the kernel.
        kernel: which kernel is wrong.
        why: a verb with its object.
        device: on which it ran.
        kind: the algorithm and the dtype.
        setting: another way to choose a backend than the environment variable.
    """
    return (
        f"backend {backend.name!r}: the kernel {kernel} {why} on {describe(device)}, for {kind}; choose "
        f"another backend, such as {setting}KEYEDOPT_BACKEND=torch; `keyedopt doctor` shows more, and "
        f"{SELF_CHECK}=0 skips this check"
    )


def describe(device: torch.device) -> str:
    """Return a device with its name and the version of its driver."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, driver {driver_version()})"


@cache
def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "unknown"."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


@cache
def versions() -> dict[str, str]:
    """Return the versions of torch, CUDA, the driver and the packages; "missing" if one is not installed."""
    found = {"torch": torch.__version__, "CUDA": torch.version.cuda or "none", "driver": driver_version()}
    for name in ("keyedopt", "triton", "fbgemm_gpu", "fbgemm_gpu_cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


# --- marker files ---------------------------------------------------------------------------------


@cache
def _build(kind: type[Backend]) -> str:
    """Return a hash of the files of a backend and of those that all backends share."""
    digest = hashlib.sha256()
    for folder in {Path(inspect.getfile(kind)).parent: 0, Path(__file__).parent: 0}:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".py", ".so"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _passed(backend: Backend, device: torch.device, key: Any) -> Path | None:
    """Return the marker file of a check that passed, or None if there is no cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = (key, name, sorted(versions().items()), _build(type(backend)))
    digest = hashlib.sha256(repr(known).encode()).hexdigest()
    return Path(root) / "keyedopt" / "self_check" / digest if Path(root).is_absolute() else None


def _remember(passed: Path) -> None:
    """Create the marker file. If it cannot be written, the next process checks again."""
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError:
        return


# --- the problem ----------------------------------------------------------------------------------


def _problem(like: Sequence[Table], long: int) -> tuple[list[Table], list[Lookup]]:
    """Return tables of the dtype, kinds of state and widths of others, and lookups of them."""
    generator = torch.Generator().manual_seed(0)  # torch's global generator does not change
    device, dtype = like[0].weight.device, like[0].weight.dtype
    widths = [table.weight.shape[1] for table in like]
    tables, lookups = [], []
    for number in range(max(3, min(len(like), MOST_TABLES))):
        rows, width = (300, 7, 40)[number % 3], min(widths) if number % 3 == 1 else max(widths)
        shapes = [(rows, width) if state.ndim == 2 else (rows,) for state in like[0].states]
        states = [torch.rand(shape, generator=generator) for shape in shapes]
        counter = None
        if like[0].row_counter is not None:
            counter = torch.randint(0, 5, (rows,), generator=generator).to(device)
        kept = zip(states, like[0].states, strict=True)
        tables.append(
            Table(
                torch.randn(rows, width, generator=generator).to(device, dtype),
                tuple(state.to(device, old.dtype) for state, old in kept),
                counter,
            )
        )
    for number, table in enumerate((*tables, tables[0])):
        lengths = torch.tensor([0, 17, 1, long if number == 0 else 90, 0, 5, 2])
        count, bags = int(lengths.sum()), len(lengths)
        values = torch.randint(0, len(table.weight), (count,), generator=generator)
        values[: 9 * count // 10 if number == 0 else 40] = 3
        pooled = number % 3 != 2
        outputs = bags if pooled else count
        factors = torch.rand(count, generator=generator) + 0.5 if number % 3 == 1 else None
        lookups.append(
            Lookup(
                number % len(tables),
                values.to(device),
                torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
                if pooled
                else None,
                None if factors is None else factors.to(device),
                mean=number % 3 == 1,
                grad=torch.randn(outputs, table.weight.shape[1], generator=generator).to(device),
            )
        )
    return tables, lookups


def exact_outputs(tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
    """Return the outputs of the backend ``torch`` in float64.

    On CUDA torch adds up a bag in its own dtype, one row after another: the sum of thousands of equal rows in
    float32 has an error of more than `TOLERANCES`, that of the kernels has not.
    """
    from keyedopt.fused.backends import get  # which imports this module

    wide = [replace(table, weight=table.weight.double()) for table in tables]
    return get("torch").look_up(wide, lookups)


def _copied(table: Table) -> Table:
    counter = None if table.row_counter is None else table.row_counter.clone()
    return Table(table.weight.clone(), tuple(state.clone() for state in table.states), counter)


def _numbers(step: Step) -> Step:
    """Return the step with numbers of the kind that it has, on the host or on the device."""
    lr = torch.full_like(step.lr, 0.1) if isinstance(step.lr, Tensor) else 0.1
    count = torch.full_like(step.count, 2) if isinstance(step.count, Tensor) else 2
    return replace(step, lr=lr, count=count, counters=())


# --- comparisons ----------------------------------------------------------------------------------


def near(seen: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Return whether numbers differ only by rounding."""
    if len(seen) != len(right):
        return False
    pairs = zip(seen, right, strict=True)
    return all(
        ours.shape == theirs.shape
        and torch.allclose(
            ours.double(), theirs.double(), TOLERANCES[ours.dtype], TOLERANCES[ours.dtype], equal_nan=True
        )
        for ours, theirs in pairs
    )


def _same_sums(seen: Sequence[RowGradients], right: Sequence[RowGradients]) -> bool:
    ours, theirs = (sorted(found, key=lambda one: one.table) for found in (seen, right))
    rows = [[one.rows for one in found] for found in (ours, theirs)]
    same = len(ours) == len(theirs) and all(map(torch.equal, *rows))
    return same and near([one.grads for one in ours], [one.grads for one in theirs])


def _same_updates(
    backend: Backend,
    other: Backend,
    ours: list[Table],
    theirs: list[Table],
    lookups: list[Lookup],
    step: Step,
) -> bool:
    """Update both; rows that were not looked up keep their bits."""
    other.update(theirs, lookups, step)
    before = [_copied(table) for table in ours]
    backend.update(ours, lookups, step)
    for number, (mine, right, old) in enumerate(zip(ours, theirs, before, strict=True)):
        used = torch.cat([lookup.values for lookup in lookups if lookup.table == number])
        rest = torch.ones(len(mine.weight), dtype=torch.bool, device=used.device)
        rest[used] = False
        tensors = [(one.weight, *one.states) for one in (mine, right, old)]
        if not near(tensors[0], tensors[1]):
            return False
        if not all(torch.equal(a[rest], b[rest]) for a, b in zip(tensors[0], tensors[2], strict=True)):
            return False
        counts = (mine.row_counter, right.row_counter)
        if counts[0] is not None and counts[1] is not None and not torch.equal(counts[0], counts[1]):
            return False
    return True
