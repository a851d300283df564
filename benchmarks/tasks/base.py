"""What a task is, and what the tasks share: public names, options, numbers for comparison."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import FLOAT, STATE, Dense, Lookups, SparseGradients

#: The class of each optimizer, by its name in the surface.
CLASSES = {
    "sgd": "SGD",
    "rowwise_adagrad": "RowWiseAdagrad",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "partial_rowwise_adam": "PartialRowWiseAdam",
    "lamb": "LAMB",
    "partial_rowwise_lamb": "PartialRowWiseLAMB",
    "lars_sgd": "LarsSGD",
}
#: What accumulates gradients, and of which optimizer it is; batches or steps in a window.
ACCUMULATING = {"sgd": "AccumulateSGD", "adagrad": "AccumulateAdagrad", "adam": "AccumulateAdam"}
WINDOW = 4
RATE, EPS, BOUND = 1e-2, 1e-8, 1.0
#: So small that it does not matter on which side of Adam's bias correction it stands: SparseAdam differs.
ADAM_EPS = 1e-12


class NotOffered(Exception):  # noqa: N818 - read as "raises not offered"
    """An implementation has no way to do a task; the message says what it lacks."""


@dataclass(frozen=True)
class Task:
    """What is done with a workload.

    Args:
        name: what ``keyedopt bench --task`` calls it.
        about: what is timed.
        kind: the kind of workload that it takes.
        moved: the bytes that must move, of a workload.
        maker: makes the job of an implementation's public names, see `keyedopt.benchmarks.tasks.make`.
        optimizer: by its name in `CLASSES`, where it is about one.
        part: for pooled tables, what is timed of a forward and a backward pass: ``"train"`` both, or
            ``"forward"`` or ``"backward"`` alone; empty for other tasks.
    """

    name: str
    about: str
    kind: str
    moved: Callable[[Any], int]
    maker: Callable[[Any, "Task", Any, str], Job]
    optimizer: str = ""
    part: str = ""


def need(surface: Any, *names: str) -> list[Any]:
    """Return public names of an implementation.

    Raises:
        NotOffered: it lacks some.
    """
    missing = [name for name in names if not surface.has(name)]
    if missing:
        raise NotOffered(f"no {' and no '.join(missing)}")
    return [getattr(surface, name) for name in names]


def need_arguments(called: Any, names: Iterable[str]) -> None:
    """Refuse a task for which something would have to take arguments that it does not take.

    Raises:
        NotOffered: it does not take them.
    """
    taken = inspect.signature(called).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        missing = [name for name in names if name not in taken]
        if missing:
            raise NotOffered(f"no {called.__name__}.{missing[0]}")


def options_of(optimizer: str) -> dict[str, float]:
    """Return the arguments of an optimizer: the rate, and eps where it has one."""
    if optimizer in ("sgd", "lars_sgd"):
        return {"lr": RATE}
    return {"lr": RATE, "eps": EPS if optimizer.endswith("adagrad") else ADAM_EPS}


def fill(weight: Tensor) -> None:
    """Give a table the numbers that it has in every implementation: a block of random ones, over and over."""
    generator = torch.Generator(weight.device).manual_seed(weight.shape[0])
    numbers = weight.detach().view(-1)
    block = numbers[: 1 << 16].uniform_(-0.1, 0.1, generator=generator)
    whole = len(numbers) // len(block) * len(block)
    numbers[:whole].view(-1, len(block)).copy_(block.clone())
    numbers[whole:] = block[: len(numbers) - whole]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return a copy of all numbers of some tensors."""
    return torch.cat([tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors])


class Rows:
    """The rows of tables that a workload touches, as copies, for comparison."""

    def __init__(self, work: Lookups | SparseGradients, weights: Sequence[Tensor], device: str) -> None:
        self._rows = [rows.to(device) for rows in work.unique()]
        self._weights = weights

    def __call__(self) -> dict[str, Tensor]:
        """Return them as they are now."""
        pairs = enumerate(zip(self._weights, self._rows, strict=True))
        return {f"table {number}": weight.detach()[rows] for number, (weight, rows) in pairs}


def dense_step_bytes(optimizer: str, work: Dense) -> int:
    """Each gradient read once; each parameter and its state read and written once.

    >>> dense_step_bytes("adam", Dense("x", "", ((10, 4),)))  # 40 numbers: g, and w, m, v twice
    1120
    """
    factor, constant = STATE[optimizer]
    rows = work.repeat * sum(torch.Size(shape).numel() // shape[-1] for shape in work.shapes)
    return FLOAT * (work.numbers() * (1 + 2 * (1 + factor)) + 2 * constant * rows)


def numbers_of(state: Mapping[Any, Any], name: str = "") -> dict[str, Tensor]:
    """Return the numbers of a state dict by the names of the entries, those of all parameters together.

    >>> numbers_of({"a": {"sum": torch.ones(2)}, "b": {"sum": torch.zeros(1)}})
    {'sum': tensor([1., 1., 0.])}
    """
    found: dict[str, list[Tensor]] = {}
    _collect(state, name, found)
    return {key: flat(tensors) for key, tensors in found.items()}


def is_window(state: Any) -> bool:
    """Whether a mapping is what waits in a window: row numbers, which may repeat, and their gradients."""
    return isinstance(state, Mapping) and state.keys() >= {"rows", "gradients"}


def _collect(state: Any, name: str, found: dict[str, list[Tensor]]) -> None:
    if is_window(state):  # summed by row: implementations do that sooner or later
        rows, places = torch.unique(state["rows"], return_inverse=True)
        gradients = state["gradients"].double()
        sums = gradients.new_zeros(len(rows), *gradients.shape[1:]).index_add_(0, places, gradients)
        state = {**state, "rows": rows, "gradients": sums}
    if isinstance(state, Mapping):
        for key in sorted(state, key=str):
            entry = str(key).rpartition(".")[2]
            # torchrec has two ways to name the same, by the module that holds the table
            _collect(state[key], entry.replace("momentum_", "momentum"), found)
    elif isinstance(state, Tensor | int | float):
        found.setdefault(name, []).append(torch.as_tensor(state))
