"""FBGEMM's table-batched embeddings on the CPU, where they do what is asked; for comparison, and as a peer.

What FBGEMM 1.8's CPU build leaves out, without a word, is refused here: weight decay, `max_norm`, momentum,
`lr_decay`, stochastic rounding, and every algorithm but SGD, Adagrad and row-wise Adagrad. Without eps it
makes NaN of 0 / 0, so eps must be above 0. What it counts or captures wrongly (rates, steps, forwards) is not
asked of it: it gets the rate that is set in the backward pass, and all lookups of a table at once.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.sums import coalesce_lookups

SUM = 0  # FBGEMM's number of the pooling; a mean is a sum with weights
FLOAT32 = 0  # and of the dtype of outputs
ALGORITHMS = ("sgd", "adagrad", "rowwise_adagrad")
DTYPES = (torch.float32, torch.float16)


@cache
def _operators() -> tuple[Any, str]:
    """Return FBGEMM's operators, or why they are not there."""
    try:
        import fbgemm_gpu  # noqa: F401  # registers them
    except (ImportError, OSError) as error:
        return None, f"FBGEMM cannot be imported ({error})"
    found: Any = torch.ops.fbgemm
    if not hasattr(found, "split_embedding_backward_codegen_rowwise_adagrad_cpu"):
        return None, "this build of FBGEMM has no operators for the CPU"
    return found, ""


class FbgemmBackend:
    """FBGEMM's operators, a table at a time; the sums before an update are torch's."""

    name = "fbgemm"

    def missing(self) -> str:
        """Return why FBGEMM is not there."""
        return _operators()[1]

    def refuses(self, tables: Sequence[Table], step: Step) -> str:
        """Return where FBGEMM would do something else than what is asked."""
        if step.algorithm not in ALGORITHMS:
            return f"on the CPU FBGEMM has {', '.join(ALGORITHMS)}, not {step.algorithm}"
        if step.weight_decay and step.decay != "none":
            return "on the CPU FBGEMM ignores weight decay"
        if step.momentum or step.lr_decay or step.max_norm is not None:
            return "on the CPU FBGEMM has neither momentum nor lr_decay nor max_norm"
        if step.seed is not None:
            return "on the CPU FBGEMM does not round stochastically"
        if step.algorithm != "sgd" and step.eps < torch.finfo(torch.float32).tiny:
            return "without eps FBGEMM makes NaN of a row that never had a gradient"
        for table in tables:
            if table.weight.device.type != "cpu":
                return f"FBGEMM's operators are used on the CPU alone, not on {table.weight.device}"
            if table.weight.dtype not in DTYPES:
                return f"FBGEMM has float32 and float16, not {table.weight.dtype}"
            if any(tensor.dtype is not torch.float32 for tensor in table.states):
                return "FBGEMM's states are float32"
            if step.algorithm == "sgd" and table.states:
                return "on the CPU FBGEMM has no momentum"
            if any(not tensor.is_contiguous() for tensor in (table.weight, *table.states)):
                return "FBGEMM needs contiguous tables and states"
        return ""

    @torch.no_grad()
    def look_up(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Tensor]:
        """Return the output of each lookup, in float32."""
        outputs = []
        for lookup in lookups:
            weight = tables[lookup.table].weight
            rows, width = weight.shape
            offsets, factors = _bags(lookup)
            if not len(lookup.values):
                outputs.append(torch.zeros(len(offsets) - 1, width))
                continue
            found: Tensor = _operators()[0].split_embedding_codegen_forward_cpu(
                weight.detach().view(-1),
                torch.zeros(1, dtype=torch.int64),
                torch.tensor([0, width], dtype=torch.int32),
                width,
                torch.tensor([0, rows]),
                lookup.values,
                offsets,
                SUM,
                factors,
                FLOAT32,
            )
            outputs.append(found)
        return outputs

    def prepare(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[Any]:
        """Do nothing in the forward."""
        return [None] * len(lookups)

    @torch.no_grad()
    def coalesce(self, tables: Sequence[Table], lookups: Sequence[Lookup]) -> list[RowGradients]:
        """Sum the gradients of every row."""
        return coalesce_lookups(lookups)

    @torch.no_grad()
    def update(self, tables: Sequence[Table], lookups: Sequence[Lookup], step: Step) -> None:
        """Sum the gradients of every row and update it: all lookups of a table are bags of one feature."""
        by_table: dict[int, list[Lookup]] = {}
        for lookup in lookups:
            if len(lookup.values):
                by_table.setdefault(lookup.table, []).append(lookup)
        for table, listed in by_table.items():
            _update(tables[table], listed, step)

    def update_rows(self, tables: Sequence[Table], gradients: Sequence[RowGradients], step: Step) -> None:
        """Update rows by gradients that are summed already: each is a bag of its own."""
        self.update(tables, [Lookup(one.table, one.rows, grad=one.grads) for one in gradients], step)


def _bags(lookup: Lookup) -> tuple[Tensor, Tensor]:
    """Return offsets, and the weight of each value: FBGEMM's operators read weights, and past none."""
    count = len(lookup.values)
    factors = torch.ones(count) if lookup.weights is None else lookup.weights.detach().float()
    if lookup.offsets is None:
        return torch.arange(count + 1), factors
    if lookup.mean:
        lengths = lookup.offsets.diff()
        factors = factors * torch.repeat_interleave(lengths.clamp(min=1).float().reciprocal(), lengths)
    return lookup.offsets, factors


def _update(table: Table, lookups: Sequence[Lookup], step: Step) -> None:
    offsets, factors, grads = [torch.zeros(1, dtype=torch.int64)], [], []
    base = 0
    for lookup in lookups:
        assert lookup.grad is not None
        bags, weights = _bags(lookup)
        offsets.append(bags[1:] + base)
        factors.append(weights)
        grads.append(lookup.grad.float())
        base += len(lookup.values)
    rows, width = table.weight.shape
    grad = torch.cat(grads)
    nowhere, begin = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    states: list[Tensor] = []
    for state in table.states:
        states += (state.view(-1), nowhere, begin)
    operator = getattr(_operators()[0], f"split_embedding_backward_codegen_{step.algorithm}_cpu")
    operator(
        -grad if step.maximize else grad,
        table.weight.detach().view(-1),
        nowhere,
        begin,
        torch.tensor([0, width], dtype=torch.int32),
        width,
        torch.tensor([0, rows]),
        max(1, (rows - 1).bit_length()),
        torch.cat([lookup.values for lookup in lookups]),
        torch.cat(offsets),
        SUM,
        torch.cat(factors),
        False,  # stochastic rounding
        *states,
        torch.tensor(float(step.lr), dtype=torch.float32),
        **({"eps": step.eps} if states else {}),
    )
