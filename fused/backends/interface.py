"""What an optimizer asks of a backend: look rows up, sum their gradients, update them in place.

A backend is one folder beside this file. It gets whole groups of tables, so that it may do all of them in
one launch, and the lookups of a backward pass as they came, so that it may sort, sum and update in one go.
Whatever came is already checked (`keyedopt.fused.embedding.inputs`): indices are in range, offsets increase.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor

#: What `Step.algorithm` can be, with the state tensors of each, in the order of `Table.states`.
ALGORITHMS = {
    "sgd": (),  # or ("momentum_buffer",), with momentum
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),  # (R,)
    "adam": ("exp_avg", "exp_avg_sq"),
    "sparse_adam": ("exp_avg", "exp_avg_sq"),
    "partial_rowwise_adam": ("exp_avg", "exp_avg_sq"),  # (R, D) and (R,)
    "lamb": ("exp_avg", "exp_avg_sq"),
    "partial_rowwise_lamb": ("exp_avg", "exp_avg_sq"),  # (R, D) and (R,)
    "lars_sgd": ("momentum_buffer",),
}


@dataclass(frozen=True)
class Table:
    """A table, in float16, bfloat16, float32 or float64, and its state, in float32 at least.

    Args:
        weight: (R, D), contiguous.
        states: as `ALGORITHMS` lists them; contiguous.
        row_counter: (R,) int64, of a bias correction by row; the backend counts in it.
    """

    weight: Tensor
    states: tuple[Tensor, ...] = ()
    row_counter: Tensor | None = None


def misfit(table: Table) -> str:
    """Return what of a table does not go with its weight, by shape, device or dtype; empty where all does."""
    weight, counter = table.weight, table.row_counter
    shape, device = weight.shape, weight.device
    if len(shape) != 2:
        return f"weights must be a matrix, not {tuple(shape)}"
    for state in table.states:
        if state.device != device or (state.shape != shape and state.shape != shape[:1]):
            return (
                f"a state of {tuple(state.shape)} on {state.device} does not go with weights of "
                f"{tuple(shape)} on {device}"
            )
    if counter is not None and (counter.dtype, counter.device, counter.shape) != (
        torch.int64,
        device,
        shape[:1],
    ):
        return f"a row counter is int64, one a row, not {counter.dtype} of {tuple(counter.shape)}"
    return ""


@dataclass(frozen=True)
class Lookup:
    """What one forward looked up for one feature in one table.

    Args:
        table: which of the group's tables.
        values: row numbers, (N,) int64.
        offsets: where each bag begins, (B + 1,) int64; None without pooling.
        weights: of each value, (N,) float; None for 1.
        mean: whether a bag is divided by its number of values.
        grad: of the output, (B, D), or (N, D) without pooling; None in the forward.
        prepared: what `Backend.prepare` returned for it, in the backward.
        holes: whether a value of −1 is none, see `RowGradients`; what users look up has none of these.
    """

    table: int
    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    mean: bool = False
    grad: Tensor | None = None
    prepared: Any = None
    holes: bool = False


class Tables(list[Table]):
    """A list of tables that stays as it is, so that a backend may keep what it knows of them, in `kept`."""

    __slots__ = ("kept",)

    def __init__(self, tables: Iterable[Table]) -> None:
        super().__init__(tables)
        self.kept: dict[str, Any] = {}


class Columns(Sequence[Lookup]):
    """Lookups, column by column: a small step has no time for an object for each of them.

    A backend that does not look at the columns makes a `Lookup` of each as it goes through them.

    Args:
        tables, means: as in `Lookup`, one for each.
        values, offsets, weights, grads: likewise; None where no lookup has any.
    """

    __slots__ = ("grads", "means", "offsets", "tables", "values", "weights")

    def __init__(
        self,
        tables: Sequence[int],
        values: list[Tensor],
        offsets: list[Tensor] | None,
        weights: list[Tensor | None] | None,
        means: Sequence[bool],
        grads: Sequence[Tensor] | None = None,
    ) -> None:
        self.tables, self.values, self.offsets = tables, values, offsets
        self.weights, self.means, self.grads = weights, means, grads

    def with_grads(self, grads: Sequence[Tensor]) -> "Columns":
        """Return the same lookups with the gradients of their outputs."""
        return Columns(self.tables, self.values, self.offsets, self.weights, self.means, grads)

    def __len__(self) -> int:
        """Return how many they are."""
        return len(self.values)

    @overload
    def __getitem__(self, place: int) -> Lookup: ...
    @overload
    def __getitem__(self, place: slice) -> list[Lookup]: ...
    def __getitem__(self, place: int | slice) -> Lookup | list[Lookup]:
        """Return one of them, or some."""
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        return Lookup(
            self.tables[place],
            self.values[place],
            None if self.offsets is None else self.offsets[place],
            None if self.weights is None else self.weights[place],
            self.means[place],
            None if self.grads is None else self.grads[place],
        )


@dataclass(frozen=True)
class Step:
    """The formula, and the numbers, of one step; the formulas are those of `keyedopt.reference.rules`.

    ``lr`` and ``count`` may be tensors on the device of the tables: then a backend does not synchronize to
    read them.

    Args:
        algorithm: a key of `ALGORITHMS`.
        lr: the rate.
        count: t, from 1, of this step; not used where a table has a `row_counter`.
        eps, betas, weight_decay, momentum, dampening, nesterov, eta, lr_decay, max_norm: those of the rules.
        decay: ``"none"``, ``"l2"`` or ``"decoupled"``.
        eps_placement: ``"inside_denominator"`` or ``"before_bias_correction"``.
        maximize: ascend.
        first: whether the state is at its start (momentum then begins with the gradient undamped).
        seed: of stochastic rounding of float16 and bfloat16 weights; None rounds to nearest.
        counters: counts of steps on the device, (1,) int64 each, which the update counts up before it reads
            `count`; only a backend of `COUNTING_ITSELF` is given any.
    """

    algorithm: str
    lr: float | Tensor
    count: int | Tensor = 1
    eps: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decay: str = "none"
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    first: bool = False
    eta: float = 0.0
    lr_decay: float = 0.0
    max_norm: float | None = None
    eps_placement: str = "inside_denominator"
    maximize: bool = False
    seed: int | None = None
    counters: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class RowGradients:
    """The summed gradients of a table: distinct rows (U,) int64, ascending, and (U, D), float32 at least.

    Where nobody may wait for a device to learn how many rows there are, there is room for as many as there
    can be: then the last rows are −1, which is none, and their gradients are zero.
    """

    table: int
    rows: Tensor
    grads: Tensor


class Backend(Protocol):
    """One way to do it; every method leaves its arguments alone but for the tables of an update."""

    name: str

    def missing(self) -> str:
        """Return why it cannot run on this machine, and what to install; empty where it can."""

    def refuses(self, tables: Sequence[Table], step: Step) -> str:
        """Return why it cannot do this (device, dtype, algorithm, option); empty where it can."""

    def look_up(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the output of each lookup: (B, D) pooled, (N, D) not; float32 at least."""

    def prepare(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Any]:
        """Do in the forward what the backward can use, such as the sort; None for each lookup if nothing."""

    def coalesce(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Sum the gradients of every row, for each table that was looked up: no two of a table."""

    def update(self, tables: Sequence[Table], lookups: Sequence[Lookup], step: Step) -> None:
        """Sum the gradients of every row and update it, once; nothing else is written."""

    def update_rows(self, tables: Sequence[Table], gradients: Sequence[RowGradients], step: Step) -> None:
        """Update rows by gradients that are summed already."""
