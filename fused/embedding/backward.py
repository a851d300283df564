"""Lookups in the graph of autograd: a node for each forward pass, a leaf for each module.

On CUDA the update runs in the hook of the leaf, on autograd's thread. Autograd makes the stream of the leaf
the current stream there, lets that stream wait for the streams of all nodes that gave the leaf a gradient,
and lets the stream of the caller of `backward` wait for it. The gradient without elements is what autograd
waits for.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from keyedopt.fused.backends.interface import Columns, Lookup
from keyedopt.fused.backends.native import versions
from keyedopt.fused.backends.packed import PackedLookups
from keyedopt.fused.backends.streams import current_id, stream_of
from keyedopt.fused.embedding.feature_layout import FeatureLayout, GroupLayout
from keyedopt.fused.embedding.inputs import Inputs
from keyedopt.fused.embedding.table_groups import TableGroup

#: Lookups with their gradients, and the group that has their tables.
GroupLookups = tuple[TableGroup, Sequence[Lookup]]


class ForwardGradients(list[GroupLookups]):
    """The gradients that a backward pass has computed for one forward pass; only that graph refers to them.

    Args:
        device: of the gradients, which are ready for the present stream of the device.
    """

    __slots__ = ("__weakref__", "device", "stream")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.stream = device, current_id(device)

    def record_stream(self) -> None:
        """Keep the memory of gradients for the present stream, for which autograd synchronizes streams.

        Otherwise their own stream could reuse the memory as soon as autograd frees it.
        """
        now = current_id(self.device)
        if now is not None and now != self.stream:
            stream = stream_of(now)
            for _, lookups in self:
                for lookup in [lookups] if type(lookups) is PackedLookups else lookups:
                    if lookup.grad is not None and lookup.grad.device == self.device:
                        lookup.grad.record_stream(stream)


class Backward:
    """The leaf by which autograd differentiates a module; collects gradients until the leaf is reached.

    The leaf has no elements, and gets no gradients: they are collected by backward pass, until autograd has
    visited every node from which the leaf can be reached. Only the graph refers to collected gradients, so a
    pass that fails, or does not reach the leaf, leaves nothing behind. A copy has no leaf yet.

    Args:
        update: called once in a backward pass with all gradients of that pass.
    """

    def __init__(self, update: Callable[[Sequence[GroupLookups]], None]) -> None:
        self._update = update
        self._leaf: Tensor | None = None
        self._collected: dict[int, list[weakref.ref[ForwardGradients]]] = {}

    def leaf(self, device: torch.device) -> Tensor:
        """Return the leaf, on a device: the update runs after all that was queued for it there."""
        if self._leaf is None or self._leaf.device != device:
            self._leaf = torch.empty(0, device=device, requires_grad=True)
            this = weakref.ref(self)

            def reached(leaf: Tensor) -> None:
                # The gradient has no elements, and stays: another thread may be about to add to it.
                grad = leaf.grad
                if grad is not None and grad.requires_grad:
                    leaf.grad = None  # a graph of the gradient would stay in memory
                backward = this()
                if backward is not None and torch.compiler.is_compiling():
                    _run(backward)
                elif backward is not None:
                    backward._run()

            self._leaf.register_post_accumulate_grad_hook(reached)  # type: ignore[no-untyped-call]
        return self._leaf

    def present(self) -> Tensor:
        """Return the leaf that the last call of `leaf` returned."""
        assert self._leaf is not None
        return self._leaf

    def collect(self, gradients: ForwardGradients) -> None:
        """Add the gradients of a forward pass to those of the running backward pass."""
        for task, listed in list(self._collected.items()):
            if all(reference() is None for reference in listed):  # of a pass that failed
                self._collected.pop(task, None)
        task = torch._C._current_graph_task_id()
        self._collected.setdefault(task, []).append(weakref.ref(gradients))

    def _run(self) -> None:
        found = [reference() for reference in self._collected.pop(torch._C._current_graph_task_id(), ())]
        lookups = [each for gradients in found if gradients is not None for each in gradients]
        for gradients in found:
            if gradients is not None:
                gradients.record_stream()
                gradients.clear()
        if not torch.is_grad_enabled():
            self._update(lookups)
            return
        with torch.no_grad():  # backward(create_graph=True)
            self._update(lookups)

    def __getstate__(self) -> dict[str, Any]:
        return {"_update": self._update, "_leaf": None, "_collected": {}}


class ForwardPass:
    """The lookups of one forward pass, by table group, and their outputs.

    Args:
        backward: of the module; None if the tables are only read.

    Attributes:
        parts: table groups, the lookups in each, and whether each lookup is differentiated by its table.
        results: the outputs, until they are returned; if joined, one tensor.
        columns: the columns of each output in the joined tensor, in the order of `parts`; None if not joined.
        gradients: of each backward pass through this forward pass.
    """

    def __init__(self, backward: Backward | None) -> None:
        self.backward = backward
        self.parts: list[tuple[TableGroup, Columns | PackedLookups | list[Lookup], list[bool]]] = []
        self.results: list[Tensor] = []
        self.columns: list[slice] | None = None
        self.gradients: dict[int, ForwardGradients] = {}
        self._names: list[str] = []

    def add(self, layout: GroupLayout, inputs: Inputs, training: bool) -> None:
        """Add the lookups in one table group."""
        if layout.slots:
            trained = [training and weight.requires_grad for weight in layout.weights]
            self.parts.append((layout.group, layout.columns(inputs, offsets=layout.pools), trained))
            self._names += layout.outputs

    def run_packed(self, group: TableGroup, lookups: PackedLookups, trained: bool) -> Tensor:
        """Return the joined output of a packed input, differentiable as `outputs` are."""
        self.parts.append((group, lookups, [trained]))
        output = group.backend.look_up_packed(group.tables, lookups, trained)
        self.results = [output]
        if trained:
            assert self.backward is not None
            leaf = self.backward.leaf(output.device)
            (output,) = LookedUp.apply(leaf, self)  # type: ignore[no-untyped-call, unused-ignore]
        return output

    def run(self, widths: Mapping[str, int] | None = None) -> None:
        """Run all lookups. The update is prepared first, while the queue of the device is still empty.

        Args:
            widths: the columns of each output by name, in the order of one joined tensor; None
                for a tensor for each output.
        """
        self._prepare()
        if widths is not None:
            self._run_joined(widths)
            return
        for group, lookups, _ in self.parts:
            self.results += group.backend.look_up(group.tables, lookups)

    def _run_joined(self, widths: Mapping[str, int]) -> None:
        ends = dict(zip(widths, accumulate(widths.values()), strict=True))
        self.columns = [slice(ends[name] - widths[name], ends[name]) for name in self._names]
        group, lookups, _ = self.parts[0]
        offsets = lookups[0].offsets
        assert offsets is not None  # outputs are joined only with pooling
        dtype = torch.promote_types(group.dtype, torch.float32)
        size = (offsets.numel() - 1, sum(widths.values()))
        whole = torch.empty(size, dtype=dtype, device=group.device)
        views = iter([whole[:, one] for one in self.columns])
        for group, lookups, _ in self.parts:
            group.backend.look_up_into(group.tables, lookups, list(islice(views, len(lookups))))
        self.results = [whole]

    def outputs(self) -> Iterator[tuple[str, Tensor]]:
        """Return the outputs by name, differentiable by the tables and by the weights of the lookups."""
        return zip(self._names, self.differentiable(), strict=True)

    def differentiable(self) -> Sequence[Tensor]:
        """Return the outputs, or the one joined tensor, differentiable by tables and weights of lookups."""
        any_trained = any(any(trained) for _, _, trained in self.parts)
        weights = [weight for _, lookups, _ in self.parts for weight in _weights_of(lookups)]
        results: Sequence[Tensor] = self.results
        if any_trained or (
            torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in weights)
        ):
            leaf = self.backward.leaf(results[0].device) if any_trained and self.backward else None
            results = LookedUp.apply(leaf, self, *weights)  # type: ignore[no-untyped-call, unused-ignore]
        return results

    def _prepare(self) -> None:
        for index, (group, columns, trained) in enumerate(self.parts):
            if not group.backend.prepares or not any(trained):
                continue
            chosen = [place for place, one in enumerate(trained) if one]
            lookups = list(columns)
            prepared = group.backend.prepare(group.tables, [lookups[place] for place in chosen])
            for place, made in zip(chosen, prepared, strict=True):
                if made is not None:
                    lookups[place] = replace(lookups[place], prepared=made)
            self.parts[index] = (group, lookups, trained)

    def first_values(self) -> Tensor:
        """Return the values of the first lookup, or of all."""
        lookups = self.parts[0][1]
        if type(lookups) is PackedLookups:
            return lookups.values
        return lookups.values[0] if type(lookups) is Columns else lookups[0].values


def _weights_of(lookups: Columns | PackedLookups | list[Lookup]) -> Sequence[Tensor | None]:
    """Return the weights of each lookup; nothing for columns without weights, or if none needs a gradient."""
    if type(lookups) is PackedLookups:
        return ()
    if type(lookups) is Columns:
        return lookups.weights or ()
    weights = [lookup.weights for lookup in lookups]
    return weights if any(one is not None for one in weights) else ()


def _with_gradient(lookup: Lookup, grad: Tensor) -> Lookup:
    """Return the lookup with the gradient of its output."""
    made = Lookup.__new__(Lookup)
    made.__dict__.update(lookup.__dict__)
    made.__dict__["grad"] = grad
    return made


class LookedUp(torch.autograd.Function):
    """The outputs of a forward pass, differentiable by the module's leaf and the weights of the lookups."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor | None, call: ForwardPass, *weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Save what the backward pass needs, and return the outputs."""
        rows: list[Tensor | None] = []
        for group, lookups, _ in call.parts if weights else ():
            for lookup in lookups:
                found = None
                if lookup.weights is not None and lookup.weights.requires_grad:
                    # The gradient of weights depends on the rows, as they are now.
                    (found,) = group.backend.look_up(group.tables, [Lookup(lookup.table, lookup.values)])
                rows.append(found)
        # Autograd detects the second use of a graph only if something is saved. The lookups themselves are
        # many; saving and unpacking each takes longer than comparing their versions.
        ctx.save_for_backward(call.first_values(), *rows)
        ctx.versions = _versions(call)
        ctx.set_materialize_grads(False)
        ctx.call = call
        outputs, call.results = tuple(call.results), []
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Collect the gradients for the update of the module; the leaf gets a gradient without elements."""
        if torch.compiler.is_compiling():
            return _collect(ctx, *grads)
        # The decorator takes long, and changes nothing unless a graph of the gradients is made.
        return (_collect_once if torch.is_grad_enabled() else LookedUp.collect)(ctx, *grads)

    @staticmethod
    def collect(ctx: Any, *grads: Tensor | None) -> Any:
        """Do the work of `backward`."""
        call: ForwardPass = ctx.call
        first, *rows = ctx.saved_tensors
        if ctx.versions != _versions(call):
            raise RuntimeError(
                "values, offsets or weights were modified by an inplace operation since the lookup"
            )
        gradients = ForwardGradients(first.device)
        group, packed, _ = call.parts[0]
        if type(packed) is PackedLookups:
            (whole,) = grads
            if whole is not None:
                gradients.append((group, packed.with_grad(whole)))
            return _collected(ctx, gradients, [])
        if call.columns is not None:
            (whole,) = grads
            grads = tuple(None if whole is None else whole[:, one] for one in call.columns)
        of_weights: list[Tensor | None] = []
        place = 0
        for group, lookups, trained in call.parts:
            mine = grads[place : place + len(trained)]
            if rows:
                triples = zip(mine, lookups, rows[place:], strict=False)
                of_weights += [
                    None if grad is None or known is None else _weights_gradient(lookup, known, grad)
                    for grad, lookup, known in triples
                ]
            place += len(trained)
            if type(lookups) is Columns and all(trained) and not any(grad is None for grad in mine):
                gradients.append((group, lookups.with_grads(mine)))  # type: ignore[arg-type]  # none is None
                continue
            given = [
                _with_gradient(lookup, grad)
                for grad, lookup, one in zip(mine, lookups, trained, strict=True)
                if grad is not None and one
            ]
            if given:
                gradients.append((group, given))
        return _collected(ctx, gradients, of_weights)


def _collected(ctx: Any, gradients: ForwardGradients, of_weights: Sequence[Tensor | None]) -> Any:
    """Collect gradients, and return the gradients of the leaf, of the call and of the weights."""
    if not gradients or not ctx.needs_input_grad[0]:
        return None, None, *of_weights
    ctx.call.gradients[torch._C._current_graph_task_id()] = gradients
    ctx.call.backward.collect(gradients)
    return torch.empty(0, device=gradients.device), None, *of_weights


def collect_traced(
    backward: Backward, layout: FeatureLayout, inputs: Inputs, grads: Mapping[str, Tensor]
) -> None:
    """Collect the gradients of a forward pass in a compiled graph, by output, for the update of a module.

    The node of the graph refers to them, as a node of `LookedUp` does.
    """
    gradients = ForwardGradients(inputs.values[0].device)
    for part in layout.parts:
        lookups = list(part.columns(inputs, offsets=layout.pools)) if part.slots else []
        given = [
            _with_gradient(lookup, grads[name])
            for lookup, name, weight in zip(lookups, part.outputs, part.weights, strict=True)
            if weight.requires_grad and name in grads
        ]
        if given and part.group.optimizer is not None:
            gradients.append((part.group, given))
    node: Any = torch._C._current_autograd_node()
    node.metadata.setdefault("keyedopt", []).append(gradients)
    backward.collect(gradients)


_collect_once = torch.autograd.function.once_differentiable(LookedUp.collect)
#: Called by a compiled step that contains the backward pass without being traced; see `collection.py`.
_run, _collect = _disable_dynamo(Backward._run), _disable_dynamo(_collect_once)


def _versions(call: ForwardPass) -> int:
    """Return how often the inputs of lookups were changed in place: a sum of numbers that never decrease."""
    found = 0
    for _, lookups, _ in call.parts:
        if type(lookups) is PackedLookups:
            found += lookups.values._version + lookups.offsets._version
            found += 0 if lookups.weights is None else lookups.weights._version
        elif type(lookups) is Columns:
            found += versions(lookups.values, lookups.offsets, lookups.weights)
        else:
            found += versions(
                [one.values for one in lookups],
                [one.offsets for one in lookups],
                [one.weights for one in lookups],
            )
    return found


def _weights_gradient(lookup: Lookup, rows: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the weights of a lookup: each row times the gradient of its bag."""
    assert lookup.weights is not None
    if lookup.offsets is not None:
        lengths = lookup.offsets.diff()
        if lookup.mean:
            grad = grad / lengths.clamp(min=1)[:, None]
        grad = grad[_bags(lookup.offsets, len(rows), checked=lookup.offsets.is_cpu)]
    return (rows * grad).sum(dim=1).to(lookup.weights.dtype)


def _bags(offsets: Tensor, count: int, checked: bool) -> Tensor:
    """Return the bag of each of `count` values; a valid bag even if offsets are not valid.

    On CUDA the error flag may be set without the host knowing; a bisection stays inside the memory of the
    offsets.
    """
    if checked:  # the faster way
        return torch.repeat_interleave(offsets.diff(), output_size=count)
    places = torch.arange(count, device=offsets.device)
    return torch.bucketize(places, offsets[1:], right=True).clamp(max=len(offsets) - 2)
