"""A load in two phases: first all state is checked, then all state is written.

The checks add writes to a :class:`PendingLoad`, or raise ValueError. Nothing is written before
:meth:`PendingLoad.run`. So a load writes all state or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from keyedopt.reference.keyed.agreement import Agreement, shared_refusal
from keyedopt.reference.keyed.bulk import ONE_BY_ONE, Bulk
from keyedopt.reference.keyed.values import Path, clone, refusal


@dataclass
class ObjectLoad:
    """The load of an object that checks a state itself, in `load_state_dict`.

    Args:
        target: the object.
        new: the state to load.
        path: where the object is, for the error message.
    """

    target: Any
    new: Any
    path: Path

    def snapshot(self) -> Any:
        """Return the argument with which :meth:`restore` undoes the load."""
        return clone(self.target.state_dict())

    def load(self, new: Any) -> None:
        """Load `new`, a copy of the state, or raise any exception."""
        self.target.load_state_dict(new)
        check_shapes_kept(self.target.state_dict(), self.new, self.path)

    def restore(self, snapshot: Any) -> None:
        """Undo a load, also if the load failed after it had written a part."""
        self.target.load_state_dict(snapshot)


@dataclass
class PendingLoad:
    """The writes of a load that has been checked; nothing is written before :meth:`run`."""

    #: Objects that check a state themselves.
    stateful: list[ObjectLoad] = field(default_factory=list)
    #: Functions to call before tensors are copied: they resize shards.
    reshapes: list[Callable[[], None]] = field(default_factory=list)
    #: Tensors to fill in place; `new` has the source of each.
    live: list[torch.Tensor] = field(default_factory=list)
    new: list[torch.Tensor] = field(default_factory=list)
    #: If `bulk` compares values while it fills them: live values, new values, and what checks their entries.
    unchecked: list[tuple[list[Any], list[Any], Callable[[PendingLoad], None]]] = field(default_factory=list)
    #: Values to replace: mapping, key, new value.
    values: list[tuple[MutableMapping[Any, Any], Any, Any]] = field(default_factory=list)
    #: Functions to call after everything has been written.
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    #: State with other placements than the live `DTensor`: path, live tensor, new tensor.
    redistributed: list[tuple[Path, Any, Any]] = field(default_factory=list)
    #: The ranks that load together; None is this rank only.
    agreement: Agreement | None = None
    #: Fills the tensors; None while the load contains no optimizer with state of its own.
    bulk: Bulk | None = None

    def copy(self, live: torch.Tensor, new: torch.Tensor) -> None:
        """Add a checked tensor to fill in place."""
        self.live.append(live)
        self.new.append(new)

    def extend(self, other: PendingLoad) -> None:
        """Add the writes of another load: both happen, or neither."""
        if self.bulk is not other.bulk:  # any `Bulk` can fill all tensors; the default if they differ
            self.bulk = ONE_BY_ONE if self.bulk and other.bulk else self.bulk or other.bulk
        self.stateful += other.stateful
        self.reshapes += other.reshapes
        self.redistributed += other.redistributed
        self.live += other.live
        self.new += other.new
        self.unchecked += other.unchecked
        self.values += other.values
        self.afterwards += other.afterwards

    def check(self) -> None:
        """Check now what `run` would compare while it fills; raise ValueError if a value does not match."""
        unchecked, self.unchecked = self.unchecked, []
        for live, new, check_entries in unchecked:
            if self.bulk and self.bulk.match(live, new):
                self.live += live
                self.new += new
            else:
                check_entries(self)

    def _fill_unchecked(self) -> bool:
        """Compare and fill all tensors in one pass, or write nothing and return False."""
        if not self.unchecked or self.bulk is None or self.agreement or self.redistributed:
            return False  # another rank may refuse
        if self.stateful or self.reshapes or self.values:
            return False  # these may raise, so they come before the first tensor
        live, new = list(self.live), list(self.new)
        for targets, sources, _ in self.unchecked:
            live += targets
            new += sources
        if not self.bulk.fill_exact(live, new):
            return False
        self.live, self.new, self.unchecked = [], [], []
        return True

    def run(self) -> None:
        """Write all state. Objects that may still raise come first, so that they can be restored."""
        with shared_refusal(self.agreement):
            if not self._fill_unchecked():
                self.check()
            sources = self.new
            if self.stateful or self.reshapes:  # these may write to a source
                pairs = zip(self.live, sources, strict=True)
                sources = [new if new is live else new.detach().clone() for live, new in pairs]
            values = [(mapping, key, clone(new)) for mapping, key, new in self.values]
            loaded = self._load_stateful()
        if self.redistributed or self.agreement is not None:
            self._agree(loaded)
        for reshape in self.reshapes:
            reshape()
        (self.bulk or ONE_BY_ONE).fill(self.live, sources)
        for mapping, key, new in values:
            mapping[key] = new
        for notify in self.afterwards:
            notify()

    def _agree(self, loaded: Sequence[tuple[ObjectLoad, Any]]) -> None:
        """Agree with the other ranks, or restore the objects that were loaded; then redistribute state."""
        self.redistributed.sort(key=lambda item: str(item[0]))  # ranks may list parameters in any order
        if self.agreement is not None:
            plan = [(path, live.placements, new.placements) for path, live, new in self.redistributed]
            try:
                self.agreement.accept(plan)
            except ValueError:
                _restore(loaded)
                raise
        pairs = [(live, new.redistribute(None, live.placements)) for _, live, new in self.redistributed]
        with torch.no_grad():
            for live, new in pairs:
                live.copy_(new)

    def _load_stateful(self) -> list[tuple[ObjectLoad, Any]]:
        """Load the objects that check a state themselves; return each with what restores it."""
        copied = [clone(one.new) for one in self.stateful]
        snapshots = [(one, one.snapshot()) for one in self.stateful]
        for number, (one, new) in enumerate(zip(self.stateful, copied, strict=True)):
            try:
                one.load(new)
            except Exception as error:
                _restore(snapshots[: number + 1])
                raise refusal(
                    f"{type(one.target).__name__} refused its state",
                    one.path,
                    "a state that it accepts",
                    f"{type(error).__name__}: {error}",
                ) from error
        return snapshots


def _restore(snapshots: Sequence[tuple[ObjectLoad, Any]]) -> None:
    for done, snapshot in reversed(snapshots):
        with suppress(Exception):  # such an object may raise again, after writing
            done.restore(snapshot)


def check_shapes_kept(seen: object, loaded: object, path: Path) -> None:
    """Raise ValueError if an object changed the shape of a tensor that it loaded (by broadcasting)."""
    if isinstance(seen, Mapping) and isinstance(loaded, Mapping):
        for key in seen.keys() & loaded.keys():
            check_shapes_kept(seen[key], loaded[key], [*path, key])
    elif isinstance(seen, torch.Tensor) and isinstance(loaded, torch.Tensor) and seen.shape != loaded.shape:
        raise refusal("Different shape", path, tuple(seen.shape), tuple(loaded.shape))


def check_tensor(live: torch.Tensor, new: torch.Tensor, path: Path, pending: PendingLoad) -> None:
    """Check shape, layout and dtype of a tensor that a load will fill in place."""
    if live.shape != new.shape:  # copying would broadcast
        raise refusal("Different shape", path, tuple(live.shape), tuple(new.shape))
    if live.layout != new.layout:
        raise refusal("Different layout", path, live.layout, new.layout)
    if not _can_represent(live.dtype, new):
        raise refusal("Different dtype, and values that it cannot hold", path, live.dtype, new)
    pending.copy(live, new)


def _can_represent(dtype: torch.dtype, value: torch.Tensor) -> bool:
    """Return whether a dtype can represent the values, except for rounding.

    The conversion must not drop a fraction, a sign or an imaginary part, and no finite number may become
    infinite. A step count may be a float in one implementation and an integer in another.
    """
    if value.dtype == dtype or value.is_meta:
        return True
    if value.is_complex() and not dtype.is_complex:
        return False
    converted = value.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        before, after = value.to_dense(), converted.to_dense()
        return torch.equal(before.isfinite(), after.isfinite())
    return torch.equal(converted.to(value.dtype), value)
