"""The backend of vectorized torch, for every device, dtype and algorithm."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from keyedopt.fused.backends import torch_rules
from keyedopt.fused.backends.interface import Backend, Lookup, RowGradients, Step, Table, misfit
from keyedopt.fused.backends.memory import check_lookups
from keyedopt.fused.backends.sums import coalesce_lookups

WIDE = (torch.float32, torch.float64)
#: The distance between the seeds of two tables. A CPU generator uses only the low 32 bits of a seed.
APART = 0x9E3779B1


class TorchBackend(Backend):
    """Sort, sum, gather the rows, apply the formula, and write the rows back, table by table."""

    name = "torch"
    copies_rows = True

    def missing(self) -> str:
        """Return an empty reason: torch is always installed."""
        return ""

    def refuses(self, tables: Sequence[Table], step: Step) -> str:
        """Return which tensors do not fit their table; every step is supported."""
        return next((why for table in tables if (why := misfit(table))), "")

    @torch.no_grad()
    def look_up(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the output of each lookup, in float32 at least."""
        check_lookups(lookups)
        return [_looked_up(tables[lookup.table].weight, lookup) for lookup in lookups]

    @torch.no_grad()
    def coalesce(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Sum the gradients of every row in float64, rounded once."""
        check_lookups(lookups)
        return coalesce_lookups(lookups)

    def update(self, tables: Sequence[Table], lookups: Sequence[Lookup], step: Step) -> None:
        """Sum the gradients of every row and update it, once."""
        self.update_rows(tables, self.coalesce(tables, lookups), step)

    @torch.no_grad()
    def update_rows(self, tables: Sequence[Table], gradients: Sequence[RowGradients], step: Step) -> None:
        """Update rows by gradients that are summed already."""
        for given in gradients:
            if given.rows.numel():
                drawn = step if step.seed is None else replace(step, seed=step.seed + given.table * APART)
                _update(tables[given.table], given.rows, given.grads, drawn)


def _looked_up(weight: Tensor, lookup: Lookup) -> Tensor:
    dtype = weight.dtype if weight.dtype in WIDE else torch.float32
    factors = None if lookup.weights is None else lookup.weights.to(dtype)
    if lookup.offsets is None:
        rows = weight[lookup.values].to(dtype)
        return rows if factors is None else rows * factors[:, None]
    values = lookup.values
    if weight.dtype not in WIDE:  # rows are added up in float32
        weight, values = weight[values].to(dtype), torch.arange(len(values), device=values.device)
    mode = "mean" if lookup.mean and factors is None else "sum"
    pooled = functional.embedding_bag(
        values, weight, lookup.offsets, mode=mode, per_sample_weights=factors, include_last_offset=True
    )
    if lookup.mean and factors is not None:
        pooled /= lookup.offsets.diff().clamp(min=1)[:, None]
    return pooled


def _update(table: Table, rows: Tensor, grads: Tensor, step: Step) -> None:
    why = misfit(table)
    if why:  # memory of the table was replaced after `refuses`
        raise ValueError(why)
    weight, *states = (tensor[rows] for tensor in table.tensors)
    counts = None if table.row_counter is None else states.pop()
    torch_rules.update(step, weight, grads, states, counts)
    new = [weight, *states, *([] if counts is None else [counts])]
    for tensor, values in zip(table.tensors, new, strict=True):
        tensor.index_copy_(0, rows, values)
