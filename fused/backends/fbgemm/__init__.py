"""The backend of FBGEMM's table-batched embeddings, on the CPU and on CUDA, for comparison.

`arguments` compensates differences between FBGEMM and the specification, or refuses the step. All lookups of
a table in a backward pass are one update. Benchmarks compare with FBGEMM's module of all tables, as its users
have it, not with this backend. Learning rates and step counts are numbers on the host: a learning rate in a
tensor on CUDA synchronizes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from keyedopt.fused.backends.fbgemm import tbe
from keyedopt.fused.backends.fbgemm.arguments import arguments, refusal
from keyedopt.fused.backends.interface import Backend, Lookup, RowGradients, Step, Table, misfit
from keyedopt.fused.backends.memory import check_lookups
from keyedopt.fused.backends.sums import coalesce_lookups
from keyedopt.reference.memory import check_memory

CONTIGUOUS = "FBGEMM needs contiguous tables and states"


class FbgemmBackend(Backend):
    """FBGEMM's operators, table by table; sums of gradients are torch's."""

    name = "fbgemm"
    needs_host_count = True

    def missing(self) -> str:
        """Return why FBGEMM cannot be used; empty if it can."""
        return tbe.missing()

    def refuses(self, tables: Sequence[Table], step: Step) -> str:
        """Return how FBGEMM would differ from the specification; empty if it would not."""
        return next((why for table in tables if (why := _refused(table, step))), "")

    def look_up(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the output of each lookup, in float32."""
        check_lookups(lookups)
        outputs = []
        for lookup in lookups:
            weight = tables[lookup.table].weight
            check_memory(weight)
            if not weight.is_contiguous():
                raise ValueError(CONTIGUOUS)
            offsets, factors = _bags(lookup)
            if len(lookup.values):
                outputs.append(tbe.look_up(weight, lookup.values, offsets, factors))
            else:
                outputs.append(torch.zeros(len(offsets) - 1, weight.shape[1], device=weight.device))
        return outputs

    @torch.no_grad()
    def coalesce(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Sum the gradients of every row."""
        check_lookups(lookups)
        return coalesce_lookups(lookups)

    @torch.no_grad()
    def update(self, tables: Sequence[Table], lookups: Sequence[Lookup], step: Step) -> None:
        """Sum the gradients of every row and update it: all lookups of a table are bags of one feature."""
        check_lookups(lookups)  # memory of tables and states: `TableGroup.check_tables`
        by_table: dict[int, list[Lookup]] = {}
        for lookup in lookups:
            if len(lookup.values):
                by_table.setdefault(lookup.table, []).append(lookup)
        for table in by_table:  # memory of the table may have been replaced since
            why = _refused(tables[table], step)
            if why:
                raise ValueError(why)
        for table, listed in by_table.items():
            if tables[table].weight.is_cpu and _repeats(listed):
                listed = _each_row_once(listed)
            _update(tables[table], listed, step)

    def update_rows(self, tables: Sequence[Table], gradients: Sequence[RowGradients], step: Step) -> None:
        """Update rows by gradients that are summed already: each is a bag of its own."""
        self.update(tables, [Lookup(one.table, one.rows, grad=one.grads) for one in gradients], step)


def _repeats(lookups: Sequence[Lookup]) -> bool:
    """Return whether a row is looked up more than once."""
    values = torch.cat([lookup.values for lookup in lookups])
    return len(torch.unique(values)) < len(values)


def _each_row_once(lookups: Sequence[Lookup]) -> list[Lookup]:
    """Return lookups of the sums of each row: FBGEMM's own sums on the CPU are less precise."""
    return [Lookup(one.table, one.rows, grad=one.grads) for one in coalesce_lookups(lookups)]


def _refused(table: Table, step: Step) -> str:
    weight, states = table.weight, table.states
    why = misfit(table) or refusal(step, weight.dtype, weight.device.type, weight.shape[1])
    if why:
        return why
    if any(tensor.dtype is not torch.float32 for tensor in states):
        return "FBGEMM's states are float32"
    if step.algorithm == "sgd" and states:
        return "FBGEMM's SGD has no momentum"
    if table.row_counter is not None:
        return "FBGEMM counts the steps of a row in float32, which stands still at 2²⁴"
    if any(not tensor.is_contiguous() for tensor in (weight, *states)):
        return CONTIGUOUS
    if weight.device.type == "cuda" and any(tensor.data_ptr() % 16 for tensor in (weight, *states)):
        return "on CUDA FBGEMM needs tables and states that begin at a multiple of 16 bytes"
    return ""


def _bags(lookup: Lookup) -> tuple[Tensor, Tensor]:
    """Return offsets, and the weight of each value; the CPU operators need weights."""
    count, device = len(lookup.values), lookup.values.device
    weights = lookup.weights
    factors = torch.ones(count, device=device) if weights is None else weights.detach().float().contiguous()
    if lookup.offsets is None:
        return torch.arange(count + 1, device=device), factors
    if lookup.mean:
        lengths = lookup.offsets.diff()
        shares = lengths.clamp(min=1).float().reciprocal()
        factors = factors * torch.repeat_interleave(shares, lengths, output_size=count)
    return lookup.offsets, factors


def _update(table: Table, lookups: Sequence[Lookup], step: Step) -> None:
    weight = table.weight
    begin = torch.zeros(1, dtype=torch.int64, device=weight.device)
    offsets, factors, grads, base = [begin], [], [], 0
    for lookup in lookups:
        assert lookup.grad is not None
        bags, weights = _bags(lookup)
        offsets.append(bags[1:] + base)
        factors.append(weights)
        grads.append(lookup.grad.float())
        base += len(lookup.values)
    asked = arguments(step, weight.dtype, weight.device.type, weight.shape[1])
    values = torch.cat([lookup.values for lookup in lookups])
    tbe.update(weight, table.states, values, torch.cat(offsets), torch.cat(factors), torch.cat(grads), asked)
