"""Where autograd sees a lookup: one node a forward, one leaf a module, one update a backward pass."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.embedding.clusters import Cluster

#: Lookups whose gradients have come, and the cluster that has their tables.
Given = tuple[Cluster, list[Lookup]]


class Share(list[Given]):
    """What one forward gives to a backward pass; it is held by the graph of that forward alone."""

    __slots__ = ("__weakref__",)


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
                leaf.grad = None
                backward = myself()
                if backward is not None:
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

    def __init__(self, backward: Backward, parts: list[tuple[Cluster, list[Lookup], list[bool]]]) -> None:
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
        for cluster, lookups, trained in self.parts:
            places = [place for place, one in enumerate(trained) if one]
            if not places:
                continue
            prepared = cluster.backend.prepare(cluster.tables, [lookups[place] for place in places])
            for place, made in zip(places, prepared, strict=True):
                if made is not None:
                    lookups[place] = replace(lookups[place], prepared=made)

    def lookups(self) -> Iterator[tuple[Cluster, Lookup, bool]]:
        """Yield the lookups, in the order of the outputs."""
        for cluster, lookups, trained in self.parts:
            for lookup, one in zip(lookups, trained, strict=True):
                yield cluster, lookup, one


def make_lookup(**fields: Any) -> Lookup:
    """Make a lookup in a third of the time: a frozen dataclass sets each of its fields by a call."""
    made = Lookup.__new__(Lookup)
    made.__dict__.update(fields)  # what is not given has its default on the class
    return made


class LookedUp(torch.autograd.Function):
    """The outputs of a call, differentiable by the leaf of the module and by the weights of the lookups."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor | None, call: Call, *weights: Tensor | None) -> tuple[Tensor, ...]:
        """Keep what the backward needs, and return the outputs of the call."""
        saved: list[Tensor | None] = []
        for cluster, lookup, _ in call.lookups():
            saved += (lookup.values, lookup.offsets)
            if weights:
                rows = None
                if lookup.weights is not None and lookup.weights.requires_grad:  # its gradient is of the rows
                    whole = [Lookup(lookup.table, lookup.values)]  # as they are now
                    (rows,) = cluster.backend.look_up(cluster.tables, whole)
                saved += (lookup.weights, rows)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.weighted = bool(weights)
        outputs, call.outputs = tuple(call.outputs), []
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Give the gradients to the module; what the leaf gets only says so."""
        call: Call = ctx.call
        saved, weighted, at = ctx.saved_tensors, ctx.weighted, 0
        share = Share()
        found: list[Tensor | None] = []
        given: list[Lookup] = []
        last: Cluster | None = None
        for grad, (cluster, known, trained) in zip(grads, call.lookups(), strict=True):
            values, offsets = saved[at : at + 2]
            weights, rows = saved[at + 2 : at + 4] if weighted else (None, None)
            at += 4 if weighted else 2
            if weighted:
                of_weights = None
                if grad is not None and rows is not None and weights is not None:
                    of_weights = _of_weights(known.mean, offsets, weights, rows, grad)
                found.append(of_weights)
            if grad is not None and trained:
                lookup = make_lookup(
                    table=known.table,
                    values=values,
                    offsets=offsets,
                    weights=weights,
                    mean=known.mean,
                    grad=grad,
                    prepared=known.prepared,
                )
                if cluster is not last:
                    last, given = cluster, []
                    share.append((cluster, given))
                given.append(lookup)
        if not share or not ctx.needs_input_grad[0]:
            return None, None, *found
        call.shares[torch._C._current_graph_task_id()] = share
        call.backward.give(share)
        return torch.empty(0, device=saved[0].device), None, *found


def _of_weights(mean: bool, offsets: Tensor | None, weights: Tensor, rows: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the weights of a lookup: of each row, along the gradient of its bag."""
    if offsets is None:
        return (rows * grad).sum(dim=1).to(weights.dtype)
    lengths = offsets.diff()
    bags = torch.repeat_interleave(lengths, output_size=len(rows))
    if mean:
        grad = grad / lengths.clamp(min=1)[:, None]
    return (rows * grad[bags]).sum(dim=1).to(weights.dtype)
