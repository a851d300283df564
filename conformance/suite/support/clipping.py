"""Helpers for cases of clipping: given gradients, distributed tensors, clipping by hand."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import exactly, expect, expect_close
from keyedopt.conformance.suite.support.device import tensor, zeros
from keyedopt.conformance.suite.support.inputs import parameter, set_grads
from keyedopt.conformance.suite.support.sharded import mesh_of

#: Optimizers of torch. A large eps makes the step depend on the size of a gradient, not only on its sign.
INNER: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"eps": 0.1, "betas": (0.5, 0.8)}),
    "Adam-amsgrad": (torch.optim.Adam, {"eps": 0.1, "betas": (0.5, 0.8), "amsgrad": True}),
    "Adam-l2": (torch.optim.Adam, {"eps": 0.1, "maximize": True, "weight_decay": 0.5}),
    "Adam-decoupled": (torch.optim.Adam, {"eps": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": True}),
    "AdamW": (torch.optim.AdamW, {"eps": 0.1, "weight_decay": 0.5}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.5, "maximize": True}),
    "SGD-momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "SGD-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"eps": 0.1, "lr_decay": 0.5, "weight_decay": 0.5}),
}
#: Optimizers of the implementation.
OWN_INNER: dict[str, dict[str, Any]] = {
    "Adam": {"eps": 0.1, "weight_decay": 0.5},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
    "Adagrad": {"eps": 0.1, "lr_decay": 0.5},
}
#: Formulas for which an implementation may have slower kernels.
DECOUPLED_DECAY = {"weight_decay": 0.5, "decay": "decoupled"}
CLIPPED_TO = 2.0
#: The sizes of the gradients of each step: those of the second step are within the bound.
SCALES_OF_STEPS = (4.0, 1e-3, 30.0)


def zeros_with_grads(*grads: list[float]) -> dict[str, Any]:
    """Make parameters of zeros with these gradients."""
    params: dict[str, Any] = {}
    for index, grad in enumerate(grads):
        params[f"p{index}"] = torch.nn.Parameter(zeros(len(grad)))
        params[f"p{index}"].grad = tensor(grad)
    return params


def spread(tensor: torch.Tensor, placement: str, ranks: int = 1) -> Any:
    """Make a DTensor whose local part on this rank is the tensor, on a mesh with some ranks per dimension.

    The mesh has one dimension for each word of the placement: ``"replicate shard"`` shards within groups,
    and the parts of ``"partial"`` are summands.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    placements = {"shard": Shard(0), "replicate": Replicate(), "partial": Partial()}
    words = placement.split()
    mesh = mesh_of(torch.arange(ranks ** len(words)).reshape((ranks,) * len(words)))
    return DTensor.from_local(tensor, mesh, [placements[word] for word in words], run_check=False)


def local(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def expect_scaled(seen: Any, grads: list[list[float]], bound: float, norm: float) -> None:
    """Expect gradients multiplied by one factor between bound / (norm + 1e-6) and bound / norm."""
    flat = torch.tensor([element for grad in grads for element in grad], dtype=torch.float64)
    have = torch.cat([one.detach().cpu().flatten() for one in seen])
    largest = int(flat.abs().argmax())
    factor = float(have[largest]) / float(flat[largest])
    slack = 8 * torch.finfo(have.dtype).eps
    low, high = bound / (norm + 1e-6) * (1 - slack), bound / norm * (1 + slack)
    expect(low <= factor <= high, f"a factor between {low} and {high}", factor)
    expect_close(have, flat * factor, "received gradients", ulps=8)


def inner_weights(dtype: str = "float32") -> dict[str, Any]:
    """Make parameters of one element, of a few, and of more than one block."""
    shapes = ((3,), (70, 70), (1,))
    return {f"p{at}": parameter(*shape, dtype=dtype, seed=at) for at, shape in enumerate(shapes)}


def give_late_grads(params: dict[str, Any], step: int) -> None:
    """Set the gradients of a step; the second parameter has its first one later than the others."""
    give_early_grads(params, step)
    if step == 0:
        params["p1"].grad = None


def give_early_grads(params: dict[str, Any], step: int) -> None:
    """Set the gradients of a step; all parameters have one in the first step."""
    set_grads(params, seed=step + 1, scale=SCALES_OF_STEPS[step])
    if step == 2:
        params["p0"].grad = None


def clip_by_hand(params: dict[str, Any], kind: str, norm_type: float) -> float:
    """Clip gradients in float64, rounded once, and return their norm."""
    grads = [param.grad for param in params.values() if param.grad is not None]
    norm = float(torch.cat([exactly(grad).flatten() for grad in grads]).norm(norm_type))
    bound, factor = CLIPPED_TO, min(1.0, CLIPPED_TO / (norm + 1e-6))
    for grad in grads:
        exact = exactly(grad)
        grad.copy_(exact.clamp(-bound, bound) if kind == "VALUE" else exact * factor)
    return norm


Factory = Callable[[Any], Any]


def expect_as_by_hand(
    impl: Any,
    make: Factory,
    plain: Factory,
    kind: str,
    dtype: str = "float32",
    give: Any = give_late_grads,
    closure: bool = False,
    **options: Any,
) -> list[tuple[Any, float]]:
    """Expect three clipped steps to equal three steps of a plain optimizer after clipping by hand.

    Args:
        impl: the implementation.
        make: makes the keyed optimizer to clip, of parameters by key.
        plain: makes the optimizer to compare with, of the same parameters.
        kind: of clipping.
        dtype: of the parameters.
        give: sets the gradients of a step.
        closure: whether the clipped optimizer gets its gradients from a closure.
        options: of the clipping optimizer.

    Returns:
        The tracked norm of each step, if it is tracked, and the norm by hand.
    """
    norms = []
    params, others = inner_weights(dtype), inner_weights(dtype)
    clipped = impl.GradientClippingOptimizer(
        make(params), clipping=impl.GradientClipping[kind], max_gradient=CLIPPED_TO, **options
    )
    by_hand = plain(others)
    for step in range(len(SCALES_OF_STEPS)):
        give(others, step)
        evaluate = functools.partial(give, params, step)
        if closure:
            clipped.step(evaluate)
        else:
            evaluate()
            clipped.step()
        norm = clip_by_hand(others, kind, options.get("norm_type", 2.0))
        norms.append((clipped.last_total_grad_norm if options.get("track_grad_norm") else None, norm))
        by_hand.step()
        # A gradient rounded to the dtype or not, in weights of at most 4 that move a few times.
        budget = 32 * torch.finfo(getattr(torch, dtype)).eps
        for key, wanted in others.items():
            error = float((exactly(params[key]) - exactly(wanted)).abs().max())
            expect(error <= budget, f"{key} after step {step} within {budget:.2g} of clipping by hand", error)
    return norms


def keyed_by_factory(impl: Any, factory: Factory) -> Factory:
    """Return a function that wraps the optimizer of a factory."""
    return lambda params: impl.KeyedOptimizerWrapper(params, factory)


def without_keys(factory: Factory) -> Factory:
    """Return a factory that takes parameters by key."""
    return lambda params: factory(list(params.values()))
