"""A load in two halves: all of it is checked, and then written in bulk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from keyedopt.fused.bulk.bulk_fill import alike, fill, fill_at_once
from keyedopt.fused.keyed.values import clone, refusal

Path = tuple[Any, ...]


@dataclass
class Unchecked:
    """Values in the same places here and there; whether they fit is seen when they are written.

    Args:
        live: what is there.
        new: what came.
        check: looks at one pair after the other, as is needed where they cannot be filled at once; notes
            them in a load, or raises a ValueError that says where the fault is.
    """

    live: list[Any]
    new: list[Any]
    check: Callable[[Load], None]


@dataclass
class Load:
    """What a load has to write; nothing is written before :meth:`run`."""

    unchecked: list[Unchecked] = field(default_factory=list)
    #: Tensors to fill, each with its source, which have been found to fit.
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

    def explain(self, where: str) -> None:
        """Have the errors of what is unchecked say which optimizer it is in."""
        for part in self.unchecked:
            part.check = _explained(part.check, where)

    def run(self) -> None:
        """Check what is left to check, and write.

        Raises:
            ValueError: something does not fit, or an object refuses; nothing has been written.
        """
        live = list(chain(self.live, *(part.live for part in self.unchecked)))
        new = list(chain(self.new, *(part.new for part in self.unchecked)))
        values = self._copied_values()
        if self.objects or self.reshapes or not fill_at_once(live, new):
            self._check_rest()
            values = self._copied_values()
            self._fill()
        for mapping, key, value in values:
            mapping[key] = value
        for tell in self.afterwards:
            tell()

    def _copied_values(self) -> list[tuple[MutableMapping[Any, Any], Any, Any]]:
        return [(mapping, key, clone(value)) for mapping, key, value in self.values]

    def _check_rest(self) -> None:
        for part in self.unchecked:
            if alike(part.live, part.new):
                self.live += part.live
                self.new += part.new
            else:
                part.check(self)

    def _fill(self) -> None:
        changing = [pair for pair in zip(self.live, self.new, strict=True) if pair[0] is not pair[1]]
        live, new = [have for have, _ in changing], [came for _, came in changing]
        if self.objects or self.reshapes:  # they come before the copies and may write to a source
            new = [came.detach().clone() for came in new]
            load_objects(self.objects)
            for reshape in self.reshapes:
                reshape()
        fill(live, new)


def _explained(check: Callable[[Load], None], where: str) -> Callable[[Load], None]:
    def explained(load: Load) -> None:
        try:
            check(load)
        except ValueError as error:
            raise ValueError(f"{error}{where}") from error

    return explained


def load_objects(objects: list[tuple[Any, Any, Path]]) -> None:
    """Let objects load; where one refuses, all that have written are given back what they had."""
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
