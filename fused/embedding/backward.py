"""Where autograd sees a lookup: one node a forward, one leaf a module, one update a backward pass."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from keyedopt.fused.backends.interface import Columns, Lookup
from keyedopt.fused.backends.native import versions
from keyedopt.fused.backends.streams import current
from keyedopt.fused.embedding.table_groups import Cluster

#: Backends whose `prepare` does nothing.
UNPREPARED = ("native",)

#: Lookups whose gradients have come, and the cluster that has their tables.
Given = tuple[Cluster, Sequence[Lookup]]


class Share(list[Given]):
    """What one forward gives to a backward pass; it is held by the graph of that forward alone.

    Args:
        device: of the gradients, which are there for the stream that is current on it now.
    """

    __slots__ = ("__weakref__", "device", "stream")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.stream = device, current(device)

    def here(self) -> None:
        """Let the current stream use the gradients, too; autograd has it wait for them.

        Or, as soon as autograd lets them go, their memory could be given away in their own stream.
        """
        now = current(self.device)
        if now != self.stream:
            for _, lookups in self:
                for one in lookups:
                    if one.grad is not None and one.grad.device == self.device:
                        one.grad.record_stream(now)


class Backward:
    """The leaf by which autograd differentiates a module, and what is collected until it is reached.

    The gradients themselves do not go to the leaf, which has no number: they wait, by backward pass, until
    autograd has been everywhere from where the leaf can be reached. What waits is held by the graph, so a
    pass that fails, or does not go to the leaf, leaves nothing behind. A copy begins without a leaf.

    Args:
        update: called once a backward pass with all that was given in it.
    """

    def __init__(self, update: Callable[[Sequence[Given]], None]) -> None:
        self._update = update
        self._leaf: Tensor | None = None
        self._waiting: dict[int, list[weakref.ref[Share]]] = {}

    def leaf(self, device: torch.device) -> Tensor:
        """Return the leaf, on a device: the update runs after all that was queued for it there."""
        if self._leaf is None or self._leaf.device != device:
            self._leaf = torch.empty(0, device=device, requires_grad=True)
            myself = weakref.ref(self)

            def reached(leaf: Tensor) -> None:
                # It has no number, and stays: another thread may be about to add to it.
                grad = leaf.grad
                if grad is not None and grad.requires_grad:
                    leaf.grad = None  # or it would hold a graph
                backward = myself()
                if backward is not None and torch.compiler.is_compiling():
                    _run(backward)
                elif backward is not None:
                    backward._run()

            self._leaf.register_post_accumulate_grad_hook(reached)  # type: ignore[no-untyped-call]
        return self._leaf

    def give(self, share: Share) -> None:
        """Take what a forward gives to the backward pass that is running."""
        for task, held in list(self._waiting.items()):
            if all(one() is None for one in held):  # of a pass that failed
                self._waiting.pop(task, None)
        task = torch._C._current_graph_task_id()
        self._waiting.setdefault(task, []).append(weakref.ref(share))

    def _run(self) -> None:
        shares = [one() for one in self._waiting.pop(torch._C._current_graph_task_id(), ())]
        given = [each for share in shares if share is not None for each in share]
        for share in shares:
            if share is not None:
                share.here()
                share.clear()
        self._update(given)

    def __getstate__(self) -> dict[str, Any]:
        return {"_update": self._update, "_leaf": None, "_waiting": {}}


class Call:
    """What one forward looks up, cluster by cluster.

    Args:
        backward: of the module.
        parts: some clusters, with the lookups in each, and whether the table of each is to be updated.
    """

    def __init__(
        self, backward: Backward, parts: list[tuple[Cluster, Columns | list[Lookup], list[bool]]]
    ) -> None:
        self.backward = backward
        self.parts = parts
        self.outputs: list[Tensor] = []
        self.shares: dict[int, Share] = {}

    def run(self) -> None:
        """Look everything up."""
        for cluster, lookups, _ in self.parts:
            self.outputs += cluster.backend.look_up(cluster.tables, lookups)

    def prepare(self) -> None:
        """Do what the update can use, for what is trained."""
        for part, (cluster, columns, trained) in enumerate(self.parts):
            places = [place for place, one in enumerate(trained) if one]
            if not places or cluster.backend.name in UNPREPARED:
                continue
            lookups = list(columns)
            prepared = cluster.backend.prepare(cluster.tables, [lookups[place] for place in places])
            for place, made in zip(places, prepared, strict=True):
                if made is not None:
                    lookups[place] = replace(lookups[place], prepared=made)
            self.parts[part] = (cluster, lookups, trained)

    def some(self) -> Tensor:
        """Return a tensor that was looked up."""
        lookups = self.parts[0][1]
        return lookups.values[0] if type(lookups) is Columns else lookups[0].values

    def lookups(self) -> Iterator[tuple[Cluster, Lookup, bool]]:
        """Yield the lookups, in the order of the outputs."""
        for cluster, lookups, trained in self.parts:
            for lookup, one in zip(lookups, trained, strict=True):
                yield cluster, lookup, one


def with_gradient(lookup: Lookup, grad: Tensor) -> Lookup:
    """Return the lookup with the gradient of its output."""
    made = Lookup.__new__(Lookup)
    made.__dict__.update(lookup.__dict__)
    made.__dict__["grad"] = grad
    return made


class LookedUp(torch.autograd.Function):
    """The outputs of a call, differentiable by the leaf of the module and by the weights of the lookups."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor | None, call: Call, *weights: Tensor | None) -> tuple[Tensor, ...]:
        """Keep what the backward needs, and return the outputs of the call."""
        rows: list[Tensor | None] = []
        for cluster, lookup, _ in call.lookups() if weights else ():
            found = None
            if lookup.weights is not None and lookup.weights.requires_grad:  # its gradient is of the rows
                whole = [Lookup(lookup.table, lookup.values)]  # as they are now
                (found,) = cluster.backend.look_up(cluster.tables, whole)
            rows.append(found)
        # Only by something saved does autograd know that a graph is used up. The lookups themselves are many,
        # and to save and unpack each takes longer than to see by their versions whether they are changed.
        ctx.save_for_backward(call.some(), *rows)
        ctx.versions = _versions(call)
        ctx.set_materialize_grads(False)
        ctx.call = call
        outputs, call.outputs = tuple(call.outputs), []
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Give the gradients to the module; what the leaf gets only says so."""
        if torch.compiler.is_compiling():
            return _hand_over(ctx, *grads)
        return LookedUp.hand_over(ctx, *grads)

    @staticmethod
    def hand_over(ctx: Any, *grads: Tensor | None) -> Any:
        """Do what `backward` does."""
        call: Call = ctx.call
        some, *rows = ctx.saved_tensors
        if ctx.versions != _versions(call):
            raise RuntimeError("what was looked up has been modified by an inplace operation since")
        share = Share(some.device)
        found: list[Tensor | None] = []
        place = 0
        for cluster, lookups, trained in call.parts:
            mine = grads[place : place + len(trained)]
            if rows:
                pairs = zip(mine, lookups, rows[place:], strict=False)
                found += [
                    None if any_of is None or known is None else _of_weights(one, known, any_of)
                    for any_of, one, known in pairs
                ]
            place += len(trained)
            if type(lookups) is Columns and all(trained) and not any(grad is None for grad in mine):
                share.append((cluster, lookups.with_grads(mine)))  # type: ignore[arg-type]  # none is None
                continue
            given = [
                with_gradient(lookup, grad)
                for grad, lookup, one in zip(mine, lookups, trained, strict=True)
                if grad is not None and one
            ]
            if given:
                share.append((cluster, given))
        if not share or not ctx.needs_input_grad[0]:
            return None, None, *found
        call.shares[torch._C._current_graph_task_id()] = share
        call.backward.give(share)
        return torch.empty(0, device=some.device), None, *found


#: A compiled step that has the backward pass in it calls these as they are; see `module.py`.
_run, _hand_over = _disable_dynamo(Backward._run), _disable_dynamo(LookedUp.hand_over)


def _versions(call: Call) -> int:
    """Return how often what is looked up was changed in place: a sum of numbers that do not fall."""
    found = 0
    for _, lookups, _ in call.parts:
        if type(lookups) is Columns:
            found += versions(lookups.values, lookups.offsets, lookups.weights)
        else:
            found += versions(
                [one.values for one in lookups],
                [one.offsets for one in lookups],
                [one.weights for one in lookups],
            )
    return found


def _of_weights(lookup: Lookup, rows: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the weights of a lookup: of each row, along the gradient of its bag."""
    assert lookup.weights is not None
    if lookup.offsets is not None:
        lengths = lookup.offsets.diff()
        if lookup.mean:
            grad = grad / lengths.clamp(min=1)[:, None]
        grad = grad[_bags(lookup.offsets, len(rows), checked=lookup.offsets.is_cpu)]
    return (rows * grad).sum(dim=1).to(lookup.weights.dtype)


def _bags(offsets: Tensor, count: int, checked: bool) -> Tensor:
    """Return the bag of each of so many values; whatever the offsets are, one that there is.

    On CUDA an alarm may have been raised, and nobody has asked: a bisection reads and writes what there is.
    """
    if checked:  # which is faster
        return torch.repeat_interleave(offsets.diff(), output_size=count)
    places = torch.arange(count, device=offsets.device)
    return torch.bucketize(places, offsets[1:], right=True).clamp(max=len(offsets) - 2)
