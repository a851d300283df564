"""A load in two halves: all of it is checked, and then written in bulk."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.keyed.values import clone, refusal

_bulk: Any
try:
    _bulk = importlib.import_module("keyedopt.fused.keyed._bulk")
except ImportError:  # built without a compiler, or for another torch
    _bulk = None

_shape, _dtype, _layout, _is_cpu = map(attrgetter, ("shape", "dtype", "layout", "is_cpu"))
Path = tuple[Any, ...]


@dataclass
class Load:
    """What has been found to fit; nothing is written before :meth:`run`."""

    #: Tensors to fill, each with its source.
    live: list[Tensor] = field(default_factory=list)
    new: list[Tensor] = field(default_factory=list)
    #: Values to replace: mapping, key, new value.
    values: list[tuple[MutableMapping[Any, Any], Any, Any]] = field(default_factory=list)
    #: Objects that load for themselves, and may refuse: object, what it gets, path.
    objects: list[tuple[Any, Any, Path]] = field(default_factory=list)
    #: Shards to be resized before tensors are filled.
    reshapes: list[Callable[[], None]] = field(default_factory=list)
    #: Whom to tell when everything is written.
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    def extend(self, other: Load) -> None:
        """Make the writes of another load part of this one."""
        for name in self.__dataclass_fields__:
            getattr(self, name).extend(getattr(other, name))

    def run(self) -> None:
        """Write: objects first, for they may refuse and are then rolled back, then what cannot fail."""
        live, new = self.live, self.new
        if any(map(is_, live, new)):  # state that is loaded where it comes from
            changing = [(have, came) for have, came in zip(live, new, strict=True) if have is not came]
            live, new = [have for have, _ in changing], [came for _, came in changing]
        if self.objects or self.reshapes:  # they run before the copies and may write to a source
            new = [came.detach().clone() for came in new]
        values = [(mapping, key, clone(value)) for mapping, key, value in self.values]
        _load_objects(self.objects)
        for reshape in self.reshapes:
            reshape()
        fill(live, new)
        for mapping, key, value in values:
            mapping[key] = value
        for tell in self.afterwards:
            tell()


def alike(live: list[Tensor], new: list[Tensor]) -> bool:
    """Whether all pairs are plain tensors of the same shape, dtype and layout, so that copying is exact."""
    if _bulk is not None:
        return bool(_bulk.alike(live, new))
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
    if _bulk is not None and _bulk.copy(live, new):
        torch.autograd.graph.increment_version(live)  # as every write of torch's own does
        return
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


def _load_objects(objects: list[tuple[Any, Any, Path]]) -> None:
    given = [clone(state) for _, state, _ in objects]
    before = [clone(target.state_dict()) for target, _, _ in objects]
    for number, (target, state, path) in enumerate(objects):
        try:
            target.load_state_dict(given[number])
            _check_taken(target.state_dict(), state, path)
        except Exception as error:
            for done in range(number, -1, -1):
                with suppress(Exception):  # an object that refuses once may do so again, having written
                    objects[done][0].load_state_dict(before[done])
            text = f"{type(error).__name__}: {error}"
            name = type(target).__name__
            raise refusal(f"{name} refused its state", path, "a state that it accepts", text) from error


def _check_taken(has: object, came: object, path: Path) -> None:
    """See that an object did not broadcast: what it holds now has the shape that came."""
    if isinstance(has, Mapping) and isinstance(came, Mapping):
        for key in has.keys() & came.keys():
            _check_taken(has[key], came[key], (*path, key))
    elif isinstance(has, Tensor) and isinstance(came, Tensor) and has.shape != came.shape:
        raise refusal("Different shape", path, tuple(has.shape), tuple(came.shape))
