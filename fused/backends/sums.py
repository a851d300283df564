"""Sums of the gradients of rows, in vectorized torch, on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from keyedopt.fused.backends.interface import Lookup, RowGradients

#: How many numbers `sum_listed` sums at a time.
PIECE = 1 << 20


def sum_rows(
    rows: Tensor, grads: Tensor, places: Tensor | None = None, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum ``factors[i] · grads[places[i]]`` over all i of the same ``rows[i]``, in float64, rounded once.

    Gradients are not copied for each row number: sorted places are summed run by run.

    Args:
        rows: (N,) row numbers, in any order.
        grads: (M, D).
        places: (N,), which of the gradients; None for 0, 1, …, N − 1.
        factors: (N,), multiplied with each gradient; None for 1.

    Returns:
        The distinct rows (U,), ascending, and their sums (U, D), in float32 at least.
    """
    dtype = torch.promote_types(grads.dtype, torch.float32)
    if not rows.numel():
        return rows, grads.new_zeros(0, grads.shape[1], dtype=dtype)
    ordered, order = torch.sort(rows, stable=True)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    total = functional.embedding_bag(
        order if places is None else places[order],
        grads.double(),
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=None if factors is None else factors[order].double(),
    )
    return distinct, total.to(dtype)


def sum_listed(rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of each row, in float64, piece by piece.

    This needs float64 memory only for distinct rows, not for each gradient.

    Args:
        rows: (N,) row numbers, in any order.
        grads: (N, D).

    Returns:
        The distinct rows (U,), ascending, and their sums (U, D), in float64.
    """
    ordered, order = torch.sort(rows, stable=True)
    distinct, number = torch.unique_consecutive(ordered, return_inverse=True)
    sums = torch.zeros(len(distinct), grads.shape[1], dtype=torch.float64, device=grads.device)
    piece = max(1, PIECE // max(1, grads.shape[1]))
    for begin in range(0, len(order), piece):
        some = slice(begin, begin + piece)
        here, part = sum_rows(number[some], grads[order[some]].double())
        sums.index_add_(0, here, part)  # each row once: the same result each time, on every device
    return distinct, sums


def coalesce_lookups(lookups: Sequence[Lookup]) -> list[RowGradients]:
    """Sum the gradients of every row that was looked up, table by table.

    Backends call `check_lookups` before: torch's operators read memory that has been freed.
    """
    by_table: dict[int, list[Lookup]] = {}
    for lookup in lookups:
        by_table.setdefault(lookup.table, []).append(lookup)
    found = []
    for table, listed in by_table.items():
        grads = [lookup.grad for lookup in listed if lookup.grad is not None]
        places, factors, base = [], [], 0
        for lookup, grad in zip(listed, grads, strict=True):
            place, factor = _spread(lookup)
            places.append(place + base)
            factors.append(factor)
            base += len(grad)
        same = all(factor is None for factor in factors)
        rows, sums = sum_rows(
            _joined([lookup.values for lookup in listed]),
            _joined(grads),
            _joined(places),
            None if same else _joined([_ones(one, f) for one, f in zip(places, factors, strict=True)]),
        )
        found.append(RowGradients(table, rows, sums))
    return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _ones(places: Tensor, factor: Tensor | None) -> Tensor:
    return torch.ones(len(places), dtype=torch.float64, device=places.device) if factor is None else factor


def _spread(lookup: Lookup) -> tuple[Tensor, Tensor | None]:
    """Return the row of the output's gradient for each value, and a factor for each value or None."""
    values, weights = lookup.values, lookup.weights
    factor = None if weights is None else weights.double()
    if lookup.offsets is None:
        return torch.arange(len(values), device=values.device), factor
    lengths = lookup.offsets.diff()
    bags = torch.arange(len(lengths), device=values.device)
    places = torch.repeat_interleave(bags, lengths, output_size=len(values))
    if lookup.mean:
        share = lengths.clamp(min=1).double().reciprocal()[places]
        factor = share if factor is None else factor * share
    return places, factor
