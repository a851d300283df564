"""The class `Task`, and what the tasks share: public names, options, results for comparison."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import FLOAT, STATE, Dense, Lookups, SparseGradients

#: The public class of each optimizer.
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
#: The accumulating class of each optimizer, and the number of batches or steps in a window.
ACCUMULATING = {"sgd": "AccumulateSGD", "adagrad": "AccumulateAdagrad", "adam": "AccumulateAdam"}
WINDOW = 4
#: The learning rate, eps of Adagrad, and the norm bound of clipping.
RATE, EPS, BOUND = 1e-2, 1e-8, 1.0
#: eps of Adam: small, because SparseAdam adds eps before the bias correction and others after it.
ADAM_EPS = 1e-12


class NotOffered(Exception):  # noqa: N818 - read as "raises not offered"
    """An implementation cannot do a task; the message says what is missing."""


@dataclass(frozen=True)
class Task:
    """A task on workloads of one kind.

    Args:
        name: the name for ``keyedopt bench run --task``.
        about: one line that says what is timed.
        kind: the kind of workload.
        moved: returns the bytes that must move, for a workload.
        maker: returns the job, see `keyedopt.benchmarks.tasks.make`.
        optimizer: a key of `CLASSES`; empty if the task is not about one optimizer.
        part: the timed part of a training step with pooled tables: ``"train"`` for both passes, ``"forward"``
            or ``"backward"``; empty for other tasks.
        joined: whether all features are one `KeyedJaggedTensor` and one joined output, as in torchrec's
            models; otherwise each feature has its own input, output and gradient.
    """

    name: str
    about: str
    kind: str
    moved: Callable[[Any], int]
    maker: Callable[[Any, "Task", Any, str], Job]
    optimizer: str = ""
    part: str = ""
    joined: bool = False


def need(surface: Any, *names: str) -> list[Any]:
    """Return the objects with some public names.

    Raises:
        NotOffered: the implementation lacks a name.
    """
    missing = [name for name in names if not surface.has(name)]
    if missing:
        raise NotOffered(f"no {' and no '.join(missing)}")
    return [getattr(surface, name) for name in names]


def need_arguments(called: Any, names: Iterable[str]) -> None:
    """Raise NotOffered if a callable does not accept some arguments."""
    taken = inspect.signature(called).parameters
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        missing = [name for name in names if name not in taken]
        if missing:
            raise NotOffered(f"no {called.__name__}.{missing[0]}")


def options_of(optimizer: str) -> dict[str, float]:
    """Return the arguments of an optimizer: the learning rate, and eps if it has one."""
    if optimizer in ("sgd", "lars_sgd"):
        return {"lr": RATE}
    return {"lr": RATE, "eps": EPS if optimizer.endswith("adagrad") else ADAM_EPS}


def as_given(kind: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a class and its options for a module that makes the optimizer, under the class's own names."""
    return kind.unwrapped(options) if hasattr(kind, "unwrapped") else (kind, dict(options))


def fill(weight: Tensor) -> None:
    """Fill a table with the same numbers in every implementation: a repeated block of random numbers."""
    generator = torch.Generator(weight.device).manual_seed(weight.shape[0])
    numbers = weight.detach().view(-1)
    block = numbers[: 1 << 16].uniform_(-0.1, 0.1, generator=generator)
    whole = len(numbers) // len(block) * len(block)
    numbers[:whole].view(-1, len(block)).copy_(block.clone())
    numbers[whole:] = block[: len(numbers) - whole]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return all numbers of some tensors as one float32 copy."""
    return torch.cat([tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors])


class Rows:
    """The results of a job on tables: copies of the rows that the workload touches."""

    def __init__(self, work: Lookups | SparseGradients, weights: Sequence[Tensor], device: str) -> None:
        self._rows = [rows.to(device) for rows in work.unique()]
        self._weights = weights

    def __call__(self) -> dict[str, Tensor]:
        """Return the present values of the rows."""
        pairs = enumerate(zip(self._weights, self._rows, strict=True))
        return {f"table {number}": weight.detach()[rows] for number, (weight, rows) in pairs}


def dense_step_bytes(optimizer: str, work: Dense) -> int:
    """Return the bytes to read gradients once, and to read and write parameters and state once.

    >>> dense_step_bytes("adam", Dense("x", "", ((10, 4),)))  # 40 numbers: g, and w, m, v twice
    1120
    """
    factor, constant = STATE[optimizer]
    rows = work.repeat * sum(torch.Size(shape).numel() // shape[-1] for shape in work.shapes)
    return FLOAT * (work.numbers() * (1 + 2 * (1 + factor)) + 2 * constant * rows)


def numbers_of(state: Mapping[Any, Any], name: str = "") -> dict[str, Tensor]:
    """Return the tensors of a state dict by entry name, concatenated over all parameters.

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
