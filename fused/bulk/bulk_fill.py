"""Filling thousands of tensors at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.bulk import native
from keyedopt.fused.keyed.values import values_of

_shape, _dtype, _layout, _is_cpu = map(attrgetter, ("shape", "dtype", "layout", "is_cpu"))


def pairs(live: dict[str, Any], new: Mapping[str, Any]) -> tuple[list[Any], list[Any]] | None:
    """Return the values of entries, as two lists, if all are dicts and each has the keys of the other one.

    Only what is usual is sure to be found: without our extension, the keys must be in the same order, too.
    """
    if type(new) is not dict:
        return None
    if native is not None:
        found: tuple[list[Any], list[Any]] | None = native.pairs(live, new)
        return found
    if live.keys() != new.keys():
        return None
    have, came = list(live.values()), list(map(new.__getitem__, live))
    usual = {dict}.issuperset(map(type, have)) and {dict}.issuperset(map(type, came))
    if not usual or not all(map(eq, map(tuple, have), map(tuple, came))):
        return None
    return list(values_of(have)), list(values_of(came))


def fill_at_once(live: list[Any], new: list[Any]) -> bool:
    """Fill tensors if all is as it mostly is, or write nothing and return False.

    That is: plain tensors, contiguous and on the CPU, pairs of the same shape and dtype, no memory in common
    but in a pair of one and the same tensor. All of it is seen before the first write, in one call; autograd
    is told of the writes, as of every write of torch's own.
    """
    return native is not None and bool(native.copy(live, new, torch.autograd.graph.increment_version))


def alike(live: list[Tensor], new: list[Tensor]) -> bool:
    """Whether all pairs are plain tensors of the same shape, dtype and layout, so that copying is exact."""
    if native is not None:
        return bool(native.alike(live, new))
    return (
        {Tensor}.issuperset(map(type, live))
        and {Tensor}.issuperset(map(type, new))
        and all(map(eq, map(_shape, live), map(_shape, new)))
        and all(map(is_, map(_dtype, live), map(_dtype, new)))
        and all(map(is_, map(_layout, live), map(_layout, new)))
    )


def disjoint(live: list[Tensor], new: list[Tensor]) -> bool:
    """Whether no memory of `live` is certain or likely to be memory of `new` as well.

    The intervals of addresses are sorted by where they begin: they are disjoint if each begins where
    all before it have ended. What is not contiguous, or has no address, is taken to overlap.
    """
    both = [*live, *new]
    if not {Tensor}.issuperset(map(type, both)) or not all(map(_contiguous, both)):
        return False
    begin = torch.tensor([tensor.data_ptr() for tensor in both], dtype=torch.int64, device="cpu")
    size = torch.tensor([tensor.nbytes for tensor in both], dtype=torch.int64, device="cpu")
    begin, order = begin.sort()
    end = (begin + size[order]).cummax(0).values
    return not bool((begin[1:] < end[:-1]).any())


def _contiguous(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.is_contiguous()


def fill(live: list[Tensor], new: list[Tensor]) -> None:
    """Copy to each tensor what its source holds now, in one call for all of one dtype and device."""
    if not disjoint(live, new):  # a write could reach another's source before it is read
        new = [came.detach().clone() for came in new]
    with torch.no_grad():
        for some, sources in _grouped(live, new):
            if {Tensor}.issuperset(map(type, some)) and {torch.strided}.issuperset(map(_layout, some)):
                torch._foreach_copy_(some, sources)
            else:
                for one, source in zip(some, sources, strict=True):
                    one.copy_(source)


def _grouped(live: list[Tensor], new: list[Tensor]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Group pairs: elsewhere than on the CPU a call is one kernel if dtypes and devices are the same."""
    if all(map(_is_cpu, live)):
        return [(live, new)] if live else []
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for one, source in zip(live, new, strict=True):
        key = type(one), one.dtype, one.device, source.dtype, source.device
        some, sources = groups.setdefault(key, ([], []))
        some.append(one)
        sources.append(source)
    return groups.values()
