"""The interface of a backend: look rows up, sum their gradients, update them in place.

A backend is one folder beside this file. A call has a whole group of tables, so that one launch can do all of
them, and the lookups of a backward pass as they came, so that the backend can sort, sum and update in one go.
Types, dtypes and shapes of lookups are checked by callers; who checks the contents, `Backend.checks_lookups`
says.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
from torch import Tensor

#: The values of `Step.algorithm`, with the state tensors of each, in the order of `Table.states`.
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
    "ftrl": ("accumulator", "linear"),
}
#: The index of the state tensor with one number for each row, for the algorithms that have such a state.
ROW_STATE = {"rowwise_adagrad": 0, "partial_rowwise_adam": 1, "partial_rowwise_lamb": 1}


@dataclass(frozen=True)
class Table:
    """A table in float16, bfloat16, float32 or float64, and its state in float32 at least.

    Args:
        weight: (R, D), contiguous.
        states: in the order of `ALGORITHMS`; contiguous.
        row_counter: (R,) int64, the steps of each row, for bias correction by row; the update adds 1.
    """

    weight: Tensor
    states: tuple[Tensor, ...] = ()
    row_counter: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The weight, the states, and the row counter if there is one."""
        return [self.weight, *self.states, *([] if self.row_counter is None else [self.row_counter])]


def misfit(table: Table, algorithm: str = "") -> str:
    """Return which tensor of a table does not fit its weight in shape, device or dtype; empty if all fit.

    Args:
        table: the table.
        algorithm: that of the next step; without it a state may have one number for each row or element.
    """
    weight, counter = table.weight, table.row_counter
    shape, device = weight.shape, weight.device
    if len(shape) != 2:
        return f"weights must be a matrix, not {tuple(shape)}"
    for index, state in enumerate(table.states):
        wanted = [shape, shape[:1]]
        if algorithm:
            wanted = [shape[:1]] if index == ROW_STATE.get(algorithm) else [shape]
        if state.device != device or state.shape not in wanted:
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
    """The lookup of one feature in one table, in one forward pass.

    Args:
        table: the index of the table.
        values: row numbers, (N,) int64.
        offsets: the begin of each bag, and the end of the last, (B + 1,) int64; None without pooling.
        weights: of each value, (N,) float; None for 1.
        mean: whether a bag is divided by its number of values.
        grad: of the output, (B, D), or (N, D) without pooling; None in the forward.
        prepared: the result of `Backend.prepare`, in the backward pass.
        padding: whether values may have padding (−1), see `RowGradients`; input of users never has.
    """

    table: int
    values: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    mean: bool = False
    grad: Tensor | None = None
    prepared: Any = None
    padding: bool = False


class Tables(list[Table]):
    """A list of tables that never changes; a backend may store what it computes from them in `cache`."""

    __slots__ = ("cache",)

    def __init__(self, tables: Iterable[Table]) -> None:
        super().__init__(tables)
        self.cache: dict[Hashable, Any] = {}


class Columns(Sequence[Lookup]):
    """Lookups as columns, which saves a small step the time to make an object for each lookup.

    A backend that does not read the columns iterates, and gets a `Lookup` each time.

    Args:
        tables, means: of each lookup, as in `Lookup`.
        values, offsets, weights, grads: of each lookup; None if no lookup has any.
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
        """Return the number of lookups."""
        return len(self.values)

    @overload
    def __getitem__(self, place: int) -> Lookup: ...
    @overload
    def __getitem__(self, place: slice) -> list[Lookup]: ...
    def __getitem__(self, place: int | slice) -> Lookup | list[Lookup]:
        """Return one lookup, or a list of lookups."""
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
    """The formula and the numbers of one step; `keyedopt.reference.rules` has the formulas.

    ``lr`` and ``count`` may be tensors on the device of the tables, so that no one synchronizes to read them.

    Args:
        algorithm: a key of `ALGORITHMS`.
        lr: the learning rate.
        count: t, from 1, of this step; not used if a table has a `row_counter`.
        eps, betas, weight_decay, momentum, dampening, nesterov, eta, lr_decay, max_norm, lr_power, l1, l2,
            l2_shrinkage, beta: those of the rules.
        decay: ``"none"``, ``"l2"`` or ``"decoupled"``.
        eps_placement: ``"inside_denominator"`` or ``"before_bias_correction"``.
        maximize: whether to ascend.
        first: whether the state is at its start (momentum then begins with the undamped gradient).
        seed: of stochastic rounding of float16 and bfloat16 weights; None rounds to nearest.
        counters: step counts on the device, (1,) int64 each, to which the update adds 1 before it reads
            `count`; empty unless `Backend.counts_steps`.
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
    lr_power: float = -0.5
    l1: float = 0.0
    l2: float = 0.0
    l2_shrinkage: float = 0.0
    beta: float = 0.0
    eps_placement: str = "inside_denominator"
    maximize: bool = False
    seed: int | None = None
    counters: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class RowGradients:
    """The summed gradients of a table: distinct rows (U,) int64, ascending, and (U, D), float32 at least.

    Results that were made without synchronizing have room for the largest possible number of rows: the last
    entries may be padding, row −1 with gradient zero.
    """

    table: int
    rows: Tensor
    grads: Tensor


class Backend(Protocol):
    """A way to look up and update tables; a backend is a subclass, and is registered in `BACKENDS`.

    Attributes and methods with a body are defaults. A call may have any number of tables and lookups. No
    method changes its arguments, except the tables of an update.
    """

    #: The key in `BACKENDS`.
    name: str
    #: Whether `look_up` and `update` check row numbers and used offsets before they read memory by them, and
    #: raise a ValueError. On CUDA they set an error flag instead, which suppresses every later update; see
    #: `check`. If False, callers check the contents of inputs first, which synchronizes.
    checks_lookups: bool = False
    #: Whether `check_offsets` checks offsets. If False, callers do.
    checks_offsets: bool = False
    #: Whether `prepare` does anything. If False, callers do not call `prepare`.
    prepares: bool = False
    #: Whether the backend works with padding rows, see `RowGradients`. If True, `coalesce_padded` returns
    #: sums without synchronizing, and `Lookup.padding` may be True. If False, callers drop padding, which
    #: synchronizes.
    pads_rows: bool = False
    #: Whether `update_rows` updates copies of the rows and writes them back. If True, dense steps, in which
    #: every row has a gradient, use `torch_rules` on the whole parameter instead.
    copies_rows: bool = False
    #: Whether `Step.count` must be a Python number even if the tables are on a device.
    needs_host_count: bool = False
    #: Whether a packed input may have keys that are looked up several times, or not at all.
    packs_any_keys: bool = False
    #: The device types on which `self_check` compares the kernels at their first use.
    checked_devices: tuple[str, ...] = ()
    #: The length of a run that reaches every path of the kernels.
    long_run: int = 64
    #: The kernels behind "sort", "look_up", "coalesce" and "update", for messages of the self-check.
    kernel_names: Mapping[str, str] = {}

    def missing(self) -> str:
        """Return why the backend cannot run on this machine, and what to install; empty if it can."""

    def refuses(self, tables: Sequence[Table], step: Step) -> str:
        """Return why the backend cannot do this (device, dtype, algorithm, option); empty if it can."""

    def kernels(self) -> str:
        """Return which kernels run, for people; empty if the name of the backend says it."""
        return ""

    def wrong_sort(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> str:
        """Compare sorted lookups with torch's; return the name of the kernel that is wrong, empty if none."""
        return ""

    def counts_steps(self, device: torch.device) -> bool:
        """Return whether updates on this device add 1 to `Step.counters`; if not, callers add 1."""
        return False

    def look_up(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the output of each lookup: (B, D) with pooling, (N, D) without; float32 at least."""

    def look_up_into(
        self, tables: Sequence[Table], lookups: Sequence[Lookup], outputs: Sequence[Tensor]
    ) -> None:
        """Write the output of each lookup into memory of its shape and dtype; only rows are contiguous."""
        for output, found in zip(outputs, self.look_up(tables, lookups), strict=True):
            output.copy_(found)

    def packs_tables(self, tables: Sequence[Table]) -> bool:
        """Return whether `look_up_packed` looks these tables up."""
        return False

    def look_up_packed(self, tables: Sequence[Table], lookups: Any, training: bool) -> Tensor:
        """Return the joined output of `PackedLookups`, (B, sum of widths) float32.

        If `training`, do what `prepare` does, too. The lookups may be given to `coalesce`, `coalesce_padded`
        and `update`.
        """
        raise NotImplementedError

    def check_offsets(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> None:
        """Check offsets that `look_up` does not use, as those without pooling; errors as `look_up`'s."""

    def check(self, device: torch.device) -> None:
        """Synchronize, and raise what was wrong with lookups on a device since the last call.

        Raises:
            ValueError: says what was wrong; no table on that device was updated since.
        """

    def prepare(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Any]:
        """Do in the forward pass what the update can use, such as the sort.

        Callers call this before `look_up`, so that both can overlap, and pass the result in
        `Lookup.prepared`.

        Returns:
            Any object for each lookup; None for a lookup without preparation.
        """
        return [None] * len(lookups)

    def coalesce(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Sum the gradients of every row: one result for each table that was looked up, without padding."""

    def coalesce_padded(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Do what `coalesce` does without synchronizing; the results may end with padding rows."""
        return self.coalesce(tables, lookups)

    def update(self, tables: Sequence[Table], lookups: Sequence[Lookup], step: Step) -> None:
        """Sum the gradients of every row, and update weights and state of the row once."""

    def update_rows(self, tables: Sequence[Table], gradients: Sequence[RowGradients], step: Step) -> None:
        """Update rows by gradients that are summed already."""

    def update_listed(self, params: Sequence[Any], names: Sequence[str], step: Step) -> bool:
        """Update parameters by sparse gradients, with less Python than `update`, if the backend can.

        Args:
            params: tuples of parameter, sparse gradient, and state by name.
            names: the state tensors, in the order of `ALGORITHMS`.
            step: the formula, without counts by row.

        Returns:
            Whether the update was done; if False, nothing is written.
        """
        return False
