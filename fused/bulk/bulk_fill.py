"""Show, compare and fill the state of thousands of parameters at once; the `Bulk` of fused optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.bulk import native
from keyedopt.reference.keyed.bulk import ONE_BY_ONE, Bulk
from keyedopt.reference.keyed.values import extract, layout

_layout, _is_cpu = attrgetter("layout"), attrgetter("is_cpu")
#: Types that are saved unchanged; all others may be mappings, stateful objects or sharded tensors.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, NoneType})


class NativeBulk(Bulk):
    """Operations on the state of many parameters, each in one call of the C++ extension."""

    def show(self, entries: Collection[Any]) -> list[dict[Any, Any]]:
        """Return each entry as it is saved: live tensors, and stateful objects as their state."""
        copied: list[dict[Any, Any]] | None = native.copies(list(entries), tuple(_PLAIN))
        return list(map(extract, entries)) if copied is None else copied

    def layouts(self, entries: Collection[Mapping[Any, Any]]) -> list[Any]:
        """Return the keys of each entry, in their order."""
        return list(map(tuple if _are_plain(entries) else layout, entries))

    def pair(self, live: dict[str, Any], new: Mapping[Any, Any]) -> tuple[list[Any], list[Any]] | None:
        """Return the values of entries as two lists if all entries are dicts and their keys match."""
        pairs: tuple[list[Any], list[Any]] | None = native.pairs(live, new) if type(new) is dict else None
        return pairs

    def match(self, live: list[Any], new: list[Any]) -> bool:
        """Return whether all values are plain tensors, and pairs have the same shape, dtype and layout."""
        return bool(native.alike(live, new))

    def fill_exact(self, live: list[Any], new: list[Any]) -> bool:
        """Compare and fill in one call, or write nothing and return False.

        The tensors must be plain and contiguous on the CPU, of the same shape and dtype, and share no memory
        except in a pair of one and the same tensor. The version counters of autograd rise as in torch.
        """
        return bool(native.copy(live, new, torch.autograd.graph.increment_version))

    def fill(self, live: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Copy new tensors into live ones, all in one call if possible."""
        if not self.fill_exact(list(live), list(new)):
            changing = [pair for pair in zip(live, new, strict=True) if pair[0] is not pair[1]]
            fill([one for one, _ in changing], [source for _, source in changing])


#: The `Bulk` of every fused optimizer; without the extension, that of the reference.
NATIVE = ONE_BY_ONE if native is None else NativeBulk()


def _are_plain(entries: Collection[Any]) -> bool:
    """Return whether all entries are dicts, and all their values of plain types."""
    values = chain.from_iterable(map(dict.values, entries))
    return {dict}.issuperset(map(type, entries)) and _PLAIN.issuperset(map(type, values))


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
