"""Show, compare and fill the state of thousands of parameters at once; the `Bulk` of fused optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.bulk import native
from keyedopt.reference.keyed.bulk import Bulk
from keyedopt.reference.keyed.values import extract, layout

_shape, _dtype, _layout, _is_cpu = map(attrgetter, ("shape", "dtype", "layout", "is_cpu"))
#: Types that are saved unchanged; all others may be mappings, stateful objects or sharded tensors.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, NoneType})


class NativeBulk(Bulk):
    """Operations on the state of many parameters in a few calls, in C++ if the extension was built."""

    def show(self, entries: Collection[Any]) -> list[dict[Any, Any]]:
        """Return each entry as it is saved: live tensors, and stateful objects as their state."""
        if native is not None:
            copied: list[dict[Any, Any]] | None = native.copies(list(entries), tuple(_PLAIN))
            return list(map(extract, entries)) if copied is None else copied
        return list(map(dict.copy if _are_plain(entries) else extract, entries))

    def layouts(self, entries: Collection[Mapping[Any, Any]]) -> list[Any]:
        """Return the keys of each entry, in their order."""
        return list(map(tuple if _are_plain(entries) else layout, entries))

    def pair(self, live: dict[str, Any], new: Mapping[Any, Any]) -> tuple[list[Any], list[Any]] | None:
        """Return the values of entries as two lists if all entries are dicts and their keys match."""
        return pairs(live, new)

    def match(self, live: list[Any], new: list[Any]) -> bool:
        """Return whether all values are plain tensors, and pairs have the same shape, dtype and layout."""
        return alike(live, new)

    def fill_exact(self, live: list[Any], new: list[Any]) -> bool:
        """Compare and fill in one call of the extension, or write nothing and return False."""
        return fill_at_once(live, new)

    def fill(self, live: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Copy new tensors into live ones, all in one call if possible."""
        if not fill_at_once(list(live), list(new)):
            changing = [pair for pair in zip(live, new, strict=True) if pair[0] is not pair[1]]
            fill([one for one, _ in changing], [source for _, source in changing])


#: The `Bulk` of every fused optimizer.
NATIVE = NativeBulk()


def _are_plain(entries: Collection[Any]) -> bool:
    """Return whether all entries are dicts, and all their values of plain types."""
    return {dict}.issuperset(map(type, entries)) and _PLAIN.issuperset(map(type, _values_of(entries)))


def _values_of(entries: Collection[Any]) -> chain[Any]:
    return chain.from_iterable(map(dict.values, entries))


def pairs(live: dict[str, Any], new: Mapping[str, Any]) -> tuple[list[Any], list[Any]] | None:
    """Return the values of entries as two lists if all entries are dicts and their keys match, or None.

    Without the extension the result is also None if the keys of an entry are in another order.
    """
    if type(new) is not dict:
        return None
    if native is not None:
        found: tuple[list[Any], list[Any]] | None = native.pairs(live, new)
        return found
    if live.keys() != new.keys():
        return None
    entries, new_entries = list(live.values()), list(map(new.__getitem__, live))
    are_dicts = {dict}.issuperset(map(type, entries)) and {dict}.issuperset(map(type, new_entries))
    if not are_dicts or not all(map(eq, map(tuple, entries), map(tuple, new_entries))):
        return None
    return list(_values_of(entries)), list(_values_of(new_entries))


def fill_at_once(live: list[Any], new: list[Any]) -> bool:
    """Fill tensors in one call of the extension, or write nothing and return False.

    The extension requires plain contiguous tensors on the CPU, pairs of the same shape and dtype, and no
    memory in common except in a pair of one and the same tensor. It checks this before the first write, and
    increments the version counters of autograd as torch does.
    """
    return native is not None and bool(native.copy(live, new, torch.autograd.graph.increment_version))


def alike(live: list[Tensor], new: list[Tensor]) -> bool:
    """Return whether all pairs are plain tensors of the same shape, dtype and layout: copying is exact."""
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
    """Return whether `live` and `new` certainly share no memory.

    The address intervals are sorted by their start: they are disjoint if each starts where all earlier
    intervals have ended. A tensor that is not contiguous, or has no address, counts as overlapping.
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
    """Copy each source to its tensor, in one call for all tensors of one dtype and device."""
    if not disjoint(live, new):  # a write could change a source that is read later
        new = [source.detach().clone() for source in new]
    with torch.no_grad():
        for some, sources in _grouped(live, new):
            if {Tensor}.issuperset(map(type, some)) and {torch.strided}.issuperset(map(_layout, some)):
                torch._foreach_copy_(some, sources)
            else:
                for one, source in zip(some, sources, strict=True):
                    one.copy_(source)


def _grouped(live: list[Tensor], new: list[Tensor]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Group pairs by dtype and device, except on the CPU: one call then launches one kernel."""
    if all(map(_is_cpu, live)):
        return [(live, new)] if live else []
    groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for one, source in zip(live, new, strict=True):
        key = type(one), one.dtype, one.device, source.dtype, source.device
        some, sources = groups.setdefault(key, ([], []))
        some.append(one)
        sources.append(source)
    return groups.values()
