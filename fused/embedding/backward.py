"""Where autograd sees a lookup: one node a forward, one leaf a module, one update a backward pass."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.embedding.clusters import Cluster

#: A lookup whose gradient has come, and the cluster that has its table.
Given = tuple[Cluster, Lookup]


class Share(list[Given]):
    """What one forward gives to a backward pass; it is held by the graph of that forward alone."""

    __slots__ = ("__weakref__",)


class Backward:
    """The leaf by which autograd differentiates a module, and what is collected until it is reached.

    The gradients themselves do not go to the leaf, which has one number: they wait, by backward pass, until
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
            self._leaf = torch.zeros((), device=device, requires_grad=True)
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


@dataclass(eq=False)
class Call:
    """What one forward looks up.

    Args:
        backward: of the module.
        clusters: of each lookup.
        lookups: with what the backend has prepared.
        trained: whether the table of each takes part in the update.
        outputs: of each lookup.
    """

    backward: Backward
    clusters: list[Cluster] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    shares: dict[int, Share] = field(default_factory=dict)

    def run(self) -> None:
        """Look everything up, cluster by cluster; where there is something to train, prepare for it."""
        self.outputs = [None] * len(self.lookups)  # type: ignore[list-item]
        by_cluster: dict[int, list[int]] = {}
        for place, cluster in enumerate(self.clusters):
            by_cluster.setdefault(id(cluster), []).append(place)
        for places in by_cluster.values():
            cluster = self.clusters[places[0]]
            lookups = [self.lookups[place] for place in places]
            found = cluster.backend.look_up(cluster.tables, lookups)
            for place, output in zip(places, found, strict=True):
                self.outputs[place] = output
            trained = [place for place in places if self.trained[place]]
            if trained:
                lookups = [self.lookups[place] for place in trained]
                prepared = cluster.backend.prepare(cluster.tables, lookups)
                for place, lookup, made in zip(trained, lookups, prepared, strict=True):
                    if made is not None:
                        self.lookups[place] = replace(lookup, prepared=made)


class LookedUp(torch.autograd.Function):
    """The outputs of a call, differentiable by the leaf of the module and by the weights of the lookups."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor | None, call: Call, *weights: Tensor | None) -> tuple[Tensor, ...]:
        saved: list[Tensor | None] = []
        for lookup, cluster, weight in zip(call.lookups, call.clusters, weights, strict=True):
            rows = None
            if weight is not None and weight.requires_grad:  # its gradient is taken at the rows as they are
                whole = Lookup(lookup.table, lookup.values)
                (rows,) = cluster.backend.look_up(cluster.tables, [whole])
            saved += [lookup.values, lookup.offsets, lookup.weights, rows]
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.call = call
        outputs, call.outputs = tuple(call.outputs), []
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: Call = ctx.call
        saved = ctx.saved_tensors
        share = Share()
        found: list[Tensor | None] = []
        for index, grad in enumerate(grads):
            values, offsets, weights, rows = saved[4 * index : 4 * index + 4]
            known = call.lookups[index]
            if grad is not None and call.trained[index]:
                lookup = Lookup(
                    known.table, values, offsets, weights, known.mean, grad.contiguous(), known.prepared
                )
                share.append((call.clusters[index], lookup))
            wanted = grad is not None and rows is not None and ctx.needs_input_grad[2 + index]
            found.append(_of_weights(known.mean, offsets, weights, rows, grad) if wanted else None)
        if not share or not ctx.needs_input_grad[0]:
            return None, None, *found
        call.shares[torch._C._current_graph_task_id()] = share
        call.backward.give(share)
        return share[0][1].grad.new_zeros((), dtype=torch.float32), None, *found


def _of_weights(
    mean: bool, offsets: Tensor | None, weights: Tensor, rows: Tensor, grad: Tensor | None
) -> Tensor:
    """Return the gradient of the weights of a lookup: of each row, along the gradient of its bag."""
    assert grad is not None
    if offsets is None:
        return (rows * grad).sum(dim=1).to(weights.dtype)
    lengths = offsets.diff()
    bags = torch.repeat_interleave(lengths, output_size=len(rows))
    if mean:
        grad = grad / lengths.clamp(min=1)[:, None]
    return (rows * grad[bags]).sum(dim=1).to(weights.dtype)
