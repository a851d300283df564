"""Tasks on optimizer state: save and load state dicts, in memory and on disk."""

import copy
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from keyedopt.benchmarks.tasks import dense, sparse, tables
from keyedopt.benchmarks.tasks.base import (
    ACCUMULATING,
    CLASSES,
    RATE,
    WINDOW,
    Task,
    need,
    numbers_of,
    options_of,
)
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import FLOAT, STATE, Dense, SparseGradients

#: Returns an optimizer after some steps: (surface, workload, device, steps).
Stepped = Callable[[Any, Any, str, int], Any]


def adagrad(surface: Any, work: Dense, device: str, steps: int) -> Any:
    """Return a keyed Adagrad; its state is a step and a sum per parameter."""
    (wrapper,) = need(surface, "KeyedOptimizerWrapper")
    return _stepped(
        lambda params: wrapper(params, lambda given: torch.optim.Adagrad(given, lr=RATE)), work, device, steps
    )


def around_adam(wrapper: str, surface: Any, work: Dense, device: str, steps: int) -> Any:
    """Return a wrapper around Adam."""
    return _stepped(partial(dense.WRAPPERS[wrapper], surface), work, device, steps)


def own(optimizer: str, surface: Any, work: Dense, device: str, steps: int) -> Any:
    """Return an implementation's own optimizer."""
    (kind,) = need(surface, CLASSES[optimizer])
    return _stepped(lambda params: kind(params.values(), **options_of(optimizer)), work, device, steps)


def dense_window(optimizer: str, surface: Any, work: Dense, device: str, steps: int) -> Any:
    """Return an accumulating optimizer in the middle of a window."""
    (kind,) = need(surface, ACCUMULATING[optimizer])
    options = {**options_of(optimizer), "use_accumulate": True, "accumulate_step": WINDOW}
    return _stepped(lambda params: kind(params.values(), **options), work, device, steps)


def sparse_adam(surface: Any, work: SparseGradients, device: str, steps: int) -> Any:
    """Return SparseAdam after steps on sparse gradients."""
    optimizer, prepare, _ = sparse.optimizer_of(surface, "adam", work, device)
    for _ in range(steps):
        prepare()
        optimizer.step()
    return optimizer


def _stepped(make: Callable[[Any], Any], work: Dense, device: str, steps: int) -> Any:
    params, restore = dense.parameters_of(work, device)
    optimizer = make(dense.named(params))
    for _ in range(steps):
        restore()
        optimizer.step()
    return optimizer


def emptied(optimizer: Any) -> Any:
    """Set the state of an optimizer to zero, so that it is equal in every implementation; return it."""
    zeros = copy.deepcopy(optimizer.state_dict())
    _zero(zeros["state"])
    optimizer.load_state_dict(zeros)
    return optimizer


def _zero(state: Any) -> None:
    if isinstance(state, Mapping):
        for value in state.values():
            _zero(value)
    elif isinstance(state, Tensor) and state.is_floating_point():  # integers are equal anyway
        state.zero_()


class Folder:
    """A temporary folder for a checkpoint, removed with this object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="keyedopt-bench-"))
        self._gone = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


# --- jobs -----------------------------------------------------------------------------------------


def read_out(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Return a job of ``state_dict``."""
    optimizer = make(surface, work, device, 2)
    seen: list[Any] = []

    def run() -> None:
        seen[:] = [optimizer.state_dict()]

    return Job(run=run, results=lambda: _found(seen, optimizer))


def put_in(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Return a job of ``load_state_dict``."""
    source, target = make(surface, work, device, 2), emptied(make(surface, work, device, 1))
    saved = source.state_dict()
    return Job(run=lambda: target.load_state_dict(saved), results=lambda: numbers_of(_entries(target)))


def move(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Return a job of ``state_dict``, then ``load_state_dict`` of another optimizer."""
    source, target = make(surface, work, device, 2), emptied(make(surface, work, device, 1))
    return Job(
        run=lambda: target.load_state_dict(source.state_dict()), results=lambda: numbers_of(_entries(target))
    )


def save(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Return a job of ``torch.save``."""
    optimizer, folder = make(surface, work, device, 2), Folder()

    def run() -> None:
        torch.save(optimizer.state_dict(), folder.path / "state.pt")

    def results() -> dict[str, Tensor]:
        file = folder.path / "state.pt"
        return _found([torch.load(file, weights_only=False)] if file.exists() else [], optimizer)

    return Job(run=run, results=results)


def restore(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Return a job of ``torch.load``."""
    folder, target = Folder(), emptied(make(surface, work, device, 1))
    file = folder.path / "state.pt"
    torch.save(make(surface, work, device, 2).state_dict(), file)

    def run(_: Folder = folder) -> None:
        target.load_state_dict(torch.load(file, weights_only=False))

    return Job(run=run, results=lambda: numbers_of(_entries(target)))


def save_distributed(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Return a job of ``torch.distributed.checkpoint.save`` in a single process."""
    optimizer, folder = make(surface, work, device, 2), Folder()

    def results() -> dict[str, Tensor]:
        if not any(folder.path.iterdir()):
            return _found([], optimizer)
        read = make(surface, work, device, 1).state_dict()
        _load(read, folder)
        return numbers_of(read["state"])

    return Job(run=lambda: _save(optimizer.state_dict(), folder), results=results)


def restore_distributed(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Return a job of ``torch.distributed.checkpoint.load`` in a single process."""
    folder, target = Folder(), emptied(make(surface, work, device, 1))
    _save(make(surface, work, device, 2).state_dict(), folder)

    def run() -> None:
        state = target.state_dict()
        _load(state, folder)
        target.load_state_dict(state)

    return Job(run=run, results=lambda: numbers_of(_entries(target)))


def _save(state: Any, folder: Folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is a single process
        state_dict_saver.save({"optimizer": state}, checkpoint_id=folder.path, no_dist=True)


def _load(state: Any, folder: Folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load({"optimizer": state}, checkpoint_id=folder.path, no_dist=True)


def _entries(optimizer: Any) -> Any:
    return optimizer.state_dict()["state"]


def _found(seen: list[Any], optimizer: Any) -> dict[str, Tensor]:
    """Return the numbers of the state dict in `seen`, or zeros of the same shape if it is empty."""
    if seen:
        return numbers_of(seen[0]["state"])
    return {name: torch.zeros_like(numbers) for name, numbers in numbers_of(_entries(optimizer)).items()}


# --- tasks ----------------------------------------------------------------------------------------

#: The operations on state, by name, each with a description.
WAYS: dict[str, tuple[Callable[[Stepped, Any, Any, str], Job], str]] = {
    "state_dict": (read_out, "state_dict"),
    "load_state_dict": (put_in, "load_state_dict"),
    "save": (save, "state_dict to a file, with torch.save"),
    "load": (restore, "load_state_dict from a file, with torch.load"),
    "save_distributed": (save_distributed, "state_dict, saved with torch.distributed.checkpoint"),
    "load_distributed": (
        restore_distributed,
        "load_state_dict, read with torch.distributed.checkpoint",
    ),
}


def _task(way: str, what: str, kind: str, make: Stepped, moved: Callable[[Any], int]) -> Task:
    job, about = WAYS[way]
    return Task(
        name=f"{way}-{what}",
        about=f"{about}, of {what}",
        kind=kind,
        moved=moved,
        maker=lambda surface, task, work, device: job(make, surface, work, device),
    )


def dense_bytes(optimizer: str, work: Dense) -> int:
    """Return the bytes to read and write the state: that of each number, and a step per tensor."""
    factor, constant = STATE[optimizer]
    rows = work.repeat * sum(torch.Size(shape).numel() // shape[-1] for shape in work.shapes)
    numbers = factor * work.numbers() + constant * rows + work.repeat * len(work.shapes)
    return 2 * FLOAT * numbers


def dense_window_bytes(optimizer: str, work: Dense) -> int:
    """Return `dense_bytes`, and those of the sum of gradients of a window."""
    return dense_bytes(optimizer, work) + 2 * FLOAT * work.numbers()


def sparse_bytes(work: SparseGradients) -> int:
    """Return the bytes to read and write two moments of each number of the tables."""
    return 2 * FLOAT * 2 * work.tables * work.rows * work.dim


#: Optimizers with state.
WITH_STATE = tuple(optimizer for optimizer, kept in STATE.items() if kept != (0, 0))
#: Wrappers whose state is measured; one mode of clipping stands for all, because none has state.
KEEPING = ("keyed", "combined", "wrapper", "clip_value", "warmup", "fault_tolerant", "semi_sync")
#: Optimizers with state, by name: the kind of workload, a `Stepped`, and the bytes of the state.
KEPT: dict[str, tuple[str, Stepped, Callable[[Any], int]]] = {
    **{name: ("dense", partial(around_adam, name), partial(dense_bytes, "adam")) for name in KEEPING},
    **{name: ("dense", partial(own, name), partial(dense_bytes, name)) for name in WITH_STATE},
    **{
        f"accumulate_{name}": ("dense", partial(dense_window, name), partial(dense_window_bytes, name))
        for name in ACCUMULATING
    },
    "sparse_adam": ("sparse", sparse_adam, sparse_bytes),
    **{
        f"tables_{name}": ("lookups", partial(tables.trained, name), partial(tables.state_bytes, name))
        for name in WITH_STATE
    },
    **{
        f"window_{name}": ("lookups", partial(tables.in_a_window, name), partial(tables.window_bytes, name))
        for name in ACCUMULATING
    },
}
#: Those whose state is also saved with torch.distributed.checkpoint.
DISTRIBUTED = ("keyed", "tables_rowwise_adagrad")

TASKS = (
    Task(
        name="state",
        about="state_dict, then load_state_dict of another optimizer",
        kind="dense",
        moved=Dense.state_bytes,
        maker=lambda surface, task, work, device: move(adagrad, surface, work, device),
    ),
    *(
        _task(way, name, *kept)
        for name, kept in KEPT.items()
        for way in WAYS
        if name in DISTRIBUTED or not way.endswith("distributed")
    ),
)
