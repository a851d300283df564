"""Optimizers that step in the backward pass, one parameter at a time."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer

from keyedopt.reference.fused import Owner, owner_of

__all__ = ["apply_optimizer_in_backward", "in_backward_optimizer_filter"]


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any],
) -> None:
    """Give each parameter an optimizer of its own, which steps as soon as a backward pass has its gradient.

    The gradient is None afterwards. A parameter that is used several times gets one step, on the sum; each
    backward pass is a step, so micro-batches are steps, too (the accumulating optimizers make windows of
    them). `torch.autograd.grad` makes none. Applied again, each optimizer steps once a backward pass, in the
    order in which they were applied, on the same gradient.

    The optimizers are at ``param._in_backward_optimizers``, to schedule and to save; their classes and
    arguments at ``_optimizer_classes`` and ``_optimizer_kwargs``, as torch has them. The arguments are
    copied deeply for each parameter, so nothing is shared: a rate is changed at the optimizers.

    It goes with the parameter itself: to another device or dtype, but not into a copy, nor a pickle. Weights
    of a module that trains itself in the backward pass (`EmbeddingBagCollection`) get the optimizer from it,
    and with it the module's fast update.

    What differs from torch's: everything is checked, and nothing is changed if anything is refused; an
    optimizer steps once a backward pass, not once for each that was applied; a parameter that was moved to
    another device or dtype goes on; and a parameter that nobody holds any more is freed.

    Args:
        optimizer_class: makes the optimizers.
        params: tensors that are leaves and require a gradient, each once; may be a generator.
        optimizer_kwargs: the arguments of each optimizer, beside its parameter.

    Raises:
        TypeError: an argument is of another type; the message names it.
        ValueError: a parameter is frozen, no leaf, or listed twice; an option is out of range; the optimizer
            is of another type than the one that the table was created with.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.ones_(layer.weight)
    >>> apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.5})
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> layer.weight.tolist(), layer.weight.grad
    ([[0.5, 0.5]], None)
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"optimizer_class must be a class of optimizers, not {optimizer_class!r}")
    if not isinstance(optimizer_kwargs, Mapping):
        raise TypeError(f"optimizer_kwargs must be a mapping, not a {type(optimizer_kwargs).__name__}")
    if "params" in optimizer_kwargs:
        raise TypeError("optimizer_kwargs must have no 'params': each parameter has an optimizer of its own")
    alone: list[tuple[nn.Parameter, Optimizer, dict[str, Any]]] = []
    tables: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for param in _leaves(params):
        owner = owner_of(param)
        if owner is not None:
            tables.setdefault(id(owner), (owner, []))[1].append(param)
        else:
            noted = copy.deepcopy(dict(optimizer_kwargs))
            alone.append((param, optimizer_class([param], **copy.deepcopy(noted)), noted))
    for owner, weights in tables.values():
        owner.set_optimizer(optimizer_class, weights, optimizer_kwargs)
    for param, optimizer, noted in alone:  # from here on nothing is refused
        _attach(param, optimizer, noted)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Choose, lazily, the parameters that have no optimizer in the backward pass, or those that have one.

    Weights that a module trains in its own backward pass have one.

    Args:
        named_parameters: names and parameters, as ``module.named_parameters()`` gives them.
        include: whether those are wanted that have one.
    """
    return ((name, param) for name, param in named_parameters if _steps_itself(param) == include)


def _steps_itself(param: Tensor) -> bool:
    owner = owner_of(param)
    return hasattr(param, "_in_backward_optimizers") or (owner is not None and owner.trains(param))


def _leaves(params: Any) -> list[nn.Parameter]:
    """Return the parameters as a list; the error says which one cannot be, and why."""
    if isinstance(params, Tensor | str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of parameters, not a {type(params).__name__}")
    listed: list[nn.Parameter] = []
    first: dict[int, int] = {}
    for index, param in enumerate(params):
        where = f"params[{index}]"
        if not isinstance(param, Tensor):
            raise TypeError(f"{where} must be a parameter, not a {type(param).__name__}")
        if not param.requires_grad:
            raise ValueError(f"{where} does not require a gradient, so no backward pass would step it")
        if not param.is_leaf:
            raise ValueError(f"{where} is computed, not a leaf: it has no gradient of its own")
        if id(param) in first:
            raise ValueError(f"{where} is params[{first[id(param)]}]: it would be updated twice")
        first[id(param)] = index
        listed.append(param)  # type: ignore[arg-type]  # any leaf will do
    return listed


def _attach(param: nn.Parameter, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
    noted: Any = param
    if not hasattr(param, "_in_backward_optimizers"):
        noted._in_backward_optimizers, noted._optimizer_classes, noted._optimizer_kwargs = [], [], []
        # A hook of the tensor, not of its node in the graph, which a move to another dtype replaces.
        param.register_post_accumulate_grad_hook(_step)  # type: ignore[no-untyped-call]
    noted._in_backward_optimizers.append(optimizer)
    noted._optimizer_classes.append(type(optimizer))
    noted._optimizer_kwargs.append(kwargs)


def _step(param: Tensor) -> None:
    """Step with every optimizer of a parameter; the gradient is used up."""
    if torch.compiler.is_compiling():  # a step that has the backward pass in it; not worth a graph
        _step_uncompiled(param)
        return
    noted: Any = param
    for optimizer in noted._in_backward_optimizers:
        optimizer.step()
    param.grad = None


_step_uncompiled = _disable_dynamo(_step)
