"""The self-check of the sort: keys, places and runs of a few lookups, against torch's."""

from collections.abc import Sequence

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.backends.triton.groups import Group
from keyedopt.fused.backends.triton.prepare import make_runs
from keyedopt.fused.backends.triton.shapes import Tuning


def wrong_runs(group: Group, lookups: Sequence[Lookup], tuning: Tuning) -> str:
    """Return the name of the kernel whose result differs from torch's; empty if none differs."""
    runs = make_runs(group, lookups, tuning)
    bases = dict(zip(group.numbers, group.bases, strict=False))
    keys = torch.cat([one.values + bases[one.table] for one in lookups])
    places = torch.cat([_bags(one) + (index << runs.shift) for index, one in enumerate(lookups)])
    ordered, order = torch.sort(keys, stable=True)
    if not torch.equal(runs.keys.long().sort().values, ordered):
        return "write_keys"
    if not torch.equal(runs.keys.long(), ordered) or not torch.equal(runs.places.long(), places[order]):
        return "radix_pass"
    scales = torch.cat([_scales(one) for one in lookups])[order]
    if runs.scales is not None and not torch.allclose(runs.scales, scales):
        return "radix_pass"
    assert runs.starts is not None
    assert runs.counts is not None
    assert runs.ends is not None
    block, count = runs.tuning.block, len(keys)
    heads = torch.ones(count, dtype=torch.bool, device=keys.device)
    heads[1:] = ordered[1:] != ordered[:-1]
    begins = heads.nonzero()[:, 0]
    counts = torch.bincount(begins // block, minlength=-(-count // block))
    listed = torch.cat([runs.starts[k * block :][:many] for k, many in enumerate(counts.tolist())])
    last = torch.arange(block, count + block, block, device=keys.device).clamp(max=count) - 1
    ends = torch.searchsorted(ordered, ordered[last], right=True)
    same = torch.equal(runs.counts.long(), counts) and torch.equal(listed.long(), begins % block)
    return "" if same and torch.equal(runs.ends.long(), ends) else "find_runs"


def _bags(lookup: Lookup) -> Tensor:
    values = torch.arange(len(lookup.values), device=lookup.values.device)
    return values if lookup.offsets is None else torch.searchsorted(lookup.offsets, values, right=True) - 1


def _scales(lookup: Lookup) -> Tensor:
    scales = torch.ones(len(lookup.values), device=lookup.values.device)
    if lookup.mean and lookup.offsets is not None:
        scales = scales / lookup.offsets.diff()[_bags(lookup)]
    return scales if lookup.weights is None else scales * lookup.weights
