"""Tasks of state: read out, put in, and moved to and from a disk."""

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from keyedopt.benchmarks.tasks import dense, tables
from keyedopt.benchmarks.tasks.base import RATE, Task, need, numbers_of
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import Dense

#: Makes an optimizer with state: of a surface and a workload, on a device, after some steps.
Stepped = Callable[[Any, Any, str, int], Any]


def adagrad(surface: Any, work: Dense, device: str, steps: int) -> Any:
    """Return a keyed Adagrad, whose state is a step and a sum for each parameter."""
    (wrapper,) = need(surface, "KeyedOptimizerWrapper")
    return _stepped(
        lambda params: wrapper(params, lambda given: torch.optim.Adagrad(given, lr=RATE)), work, device, steps
    )


def around_adam(wrapper: str, surface: Any, work: Dense, device: str, steps: int) -> Any:
    """Return a wrapper around Adam."""
    return _stepped(partial(dense.WRAPPERS[wrapper], surface), work, device, steps)


def _stepped(make: Callable[[Any], Any], work: Dense, device: str, steps: int) -> Any:
    params, restore = dense.parameters_of(work, device)
    optimizer = make(dense.named(params))
    for _ in range(steps):
        restore()
        optimizer.step()
    return optimizer


class Folder:
    """A folder for a checkpoint, which goes when nobody has it any more."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="keyedopt-bench-"))
        self._gone = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


# --- jobs -----------------------------------------------------------------------------------------


def read_out(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Make a job of ``state_dict``."""
    optimizer = make(surface, work, device, 2)
    seen: list[Any] = []

    def run() -> None:
        seen[:] = [optimizer.state_dict()]

    return Job(run=run, results=lambda: _found(seen, optimizer))


def put_in(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Make a job of ``load_state_dict``."""
    source, target = make(surface, work, device, 2), make(surface, work, device, 1)
    saved = source.state_dict()
    return Job(run=lambda: target.load_state_dict(saved), results=lambda: numbers_of(_entries(target)))


def move(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Make a job of both, from one optimizer to another."""
    source, target = make(surface, work, device, 2), make(surface, work, device, 1)
    return Job(
        run=lambda: target.load_state_dict(source.state_dict()), results=lambda: numbers_of(_entries(target))
    )


def save(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Make a job of ``torch.save``."""
    optimizer, folder = make(surface, work, device, 2), Folder()

    def run() -> None:
        torch.save(optimizer.state_dict(), folder.path / "state.pt")

    def results() -> dict[str, Tensor]:
        file = folder.path / "state.pt"
        return _found([torch.load(file, weights_only=False)] if file.exists() else [], optimizer)

    return Job(run=run, results=results)


def restore(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Make a job of ``torch.load``."""
    folder, target = Folder(), make(surface, work, device, 1)
    file = folder.path / "state.pt"
    torch.save(make(surface, work, device, 2).state_dict(), file)

    def run(_: Folder = folder) -> None:
        target.load_state_dict(torch.load(file, weights_only=False))

    return Job(run=run, results=lambda: numbers_of(_entries(target)))


def save_distributed(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Make a job of ``torch.distributed.checkpoint.save``, by a single process."""
    optimizer, folder = make(surface, work, device, 2), Folder()

    def results() -> dict[str, Tensor]:
        if not any(folder.path.iterdir()):
            return _found([], optimizer)
        read = make(surface, work, device, 1).state_dict()
        _load(read, folder)
        return numbers_of(read["state"])

    return Job(run=lambda: _save(optimizer.state_dict(), folder), results=results)


def restore_distributed(make: Stepped, surface: Any, work: Any, device: str) -> Job:
    """Make a job of ``torch.distributed.checkpoint.load``, by a single process."""
    folder, target = Folder(), make(surface, work, device, 1)
    _save(make(surface, work, device, 2).state_dict(), folder)

    def run() -> None:
        state = target.state_dict()
        _load(state, folder)
        target.load_state_dict(state)

    return Job(run=run, results=lambda: numbers_of(_entries(target)))


def _save(state: Any, folder: Folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process alone
        state_dict_saver.save({"optimizer": state}, checkpoint_id=folder.path, no_dist=True)


def _load(state: Any, folder: Folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load({"optimizer": state}, checkpoint_id=folder.path, no_dist=True)


def _entries(optimizer: Any) -> Any:
    return optimizer.state_dict()["state"]


def _found(seen: list[Any], optimizer: Any) -> dict[str, Tensor]:
    """Return what was read out or written, or zeros of the same shape as long as nothing was."""
    if seen:
        return numbers_of(seen[0]["state"])
    return {name: torch.zeros_like(numbers) for name, numbers in numbers_of(_entries(optimizer)).items()}


# --- tasks ----------------------------------------------------------------------------------------

#: What is done with the state, by name.
WAYS: dict[str, tuple[Callable[[Stepped, Any, Any, str], Job], str]] = {
    "state_dict": (read_out, "state_dict"),
    "load_state_dict": (put_in, "load_state_dict"),
    "save": (save, "state_dict to a file, with torch.save"),
    "load": (restore, "load_state_dict from a file, with torch.load"),
    "save_distributed": (save_distributed, "state_dict to a folder, with torch.distributed.checkpoint"),
    "load_distributed": (restore_distributed, "the same folder back"),
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


def adam_bytes(work: Dense) -> int:
    """Two moments of each number, and a step of each tensor, read once and written once."""
    return 2 * 4 * (2 * work.numbers() + work.repeat * len(work.shapes))


TASKS = (
    Task(
        name="state",
        about="state_dict, then load_state_dict of another optimizer",
        kind="dense",
        moved=Dense.state_bytes,
        maker=lambda surface, task, work, device: move(adagrad, surface, work, device),
    ),
    *(
        _task(way, wrapper, "dense", partial(around_adam, wrapper), adam_bytes)
        for wrapper in dense.WRAPPERS
        for way in WAYS
        if wrapper == "keyed" or (way.endswith("state_dict") and not wrapper.startswith("clip_n"))
    ),
    *(_task(way, "tables", "lookups", tables.trained, tables.state_bytes) for way in WAYS),
)
