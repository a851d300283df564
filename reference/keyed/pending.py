"""A load in two halves: first everything is checked, then everything is written.

The checks note in a :class:`PendingLoad` what has to be written, or raise a `ValueError`; nothing
is touched before :meth:`PendingLoad.run`. That is what makes a load all or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from keyedopt.reference.keyed.values import Path, clone, refusal


@dataclass
class PendingLoad:
    """What a load that has been checked will write; nothing is written before :meth:`run`."""

    #: Objects that decide for themselves whether they take a state: object, state, path.
    stateful: list[tuple[Any, Any, Path]] = field(default_factory=list)
    #: What must happen before tensors are copied: shards that take another width.
    reshapes: list[Callable[[], None]] = field(default_factory=list)
    #: Tensors to fill in place: live, new.
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    #: Values to replace: mapping, key, new.
    values: list[tuple[MutableMapping[Any, Any], Any, Any]] = field(default_factory=list)
    #: Who has to be told when all is written.
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    def extend(self, other: PendingLoad) -> None:
        """Take in the writes of another load: both happen, or neither."""
        self.stateful += other.stateful
        self.reshapes += other.reshapes
        self.copies += other.copies
        self.values += other.values
        self.afterwards += other.afterwards

    def run(self) -> None:
        """Write. Whatever may still refuse goes first, so that it can be undone."""
        # What came may alias what is there (state dicts do, and may be re-keyed), so every
        # source is copied before the first write, except where it is the very tensor to fill.
        copies = [(live, new) for live, new in self.copies if new is not live]
        copies = [(live, new.detach().clone()) for live, new in copies]
        values = [(mapping, key, clone(new)) for mapping, key, new in self.values]
        self._load_stateful()
        for reshape in self.reshapes:
            reshape()
        with torch.no_grad():  # not into live.detach(): the indices of a sparse tensor would stay
            for live, new in copies:
                live.copy_(new)
        for mapping, key, new in values:
            mapping[key] = new
        for notify in self.afterwards:
            notify()

    def _load_stateful(self) -> None:
        loads = [(target, clone(new), path) for target, new, path in self.stateful]
        snapshots = [(target, clone(target.state_dict())) for target, _, _ in loads]
        for number, (target, new, path) in enumerate(loads):
            try:
                target.load_state_dict(new)
                check_taken(target.state_dict(), self.stateful[number][1], path)
            except Exception as error:
                for done, snapshot in reversed(snapshots[: number + 1]):
                    with suppress(Exception):  # whoever refuses may do so again, having written
                        done.load_state_dict(snapshot)
                raise refusal(
                    f"{type(target).__name__} refused its state",
                    path,
                    "a state that it accepts",
                    f"{type(error).__name__}: {error}",
                ) from error


def check_taken(seen: object, loaded: object, path: Path) -> None:
    """See that an object did not broadcast: what it took keeps the shape it came with."""
    if isinstance(seen, Mapping) and isinstance(loaded, Mapping):
        for key in seen.keys() & loaded.keys():
            check_taken(seen[key], loaded[key], [*path, key])
    elif isinstance(seen, torch.Tensor) and isinstance(loaded, torch.Tensor) and seen.shape != loaded.shape:
        raise refusal("Different shape", path, tuple(seen.shape), tuple(loaded.shape))


def check_tensor(live: torch.Tensor, new: torch.Tensor, path: Path, pending: PendingLoad) -> None:
    """Check shape, layout and dtype of a tensor that is to be filled in place."""
    if live.shape != new.shape:  # copying would broadcast
        raise refusal("Different shape", path, tuple(live.shape), tuple(new.shape))
    if live.layout != new.layout:
        raise refusal("Different layout", path, live.layout, new.layout)
    if not _holds(live.dtype, new):
        raise refusal("Different dtype, and values that it cannot hold", path, live.dtype, new)
    pending.copies.append((live, new))


def _holds(dtype: torch.dtype, value: torch.Tensor) -> bool:
    # Rounding is a matter of precision; a fraction, a sign or an imaginary part that is cut off is
    # not, nor is a number that becomes infinite. A step count may well be a float in one
    # implementation and an integer in the other.
    if value.dtype == dtype or value.is_meta:
        return True
    if value.is_complex() and not dtype.is_complex:
        return False
    converted = value.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        dense, taken = value.to_dense(), converted.to_dense()
        return torch.equal(dense.isfinite(), taken.isfinite())
    return torch.equal(converted.to(value.dtype), value)
