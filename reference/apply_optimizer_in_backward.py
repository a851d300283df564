"""Optimizers that step in the backward pass, one parameter at a time."""

import copy
import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from keyedopt.reference.fused import Owner, owner_of

__all__ = ["apply_optimizer_in_backward", "in_backward_optimizer_filter"]


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[torch.nn.Parameter],
    optimizer_kwargs: Mapping[str, Any],
) -> None:
    """Give each parameter its own optimizer, which steps as soon as a backward pass has its gradient.

    The gradient is None afterwards. A parameter that is used several times in a forward pass gets one step,
    on the sum of its gradients. Each backward pass is a step, so each micro-batch is a step, too; use an
    accumulating optimizer for windows. `torch.autograd.grad` makes no step. After a second call for the same
    parameter both optimizers step once in each backward pass, in the order of the calls, on the same
    gradient.

    As in torch, the optimizers are in the list ``param._in_backward_optimizers``, for schedules and
    checkpoints, and their classes and arguments in ``_optimizer_classes`` and ``_optimizer_kwargs``. The
    arguments are copied deeply for each parameter: to change a learning rate, change it in each optimizer.

    DistributedDataParallel that wraps the parameters later steps the optimizers with the reduced gradients;
    on the CPU it raises ValueError. Initialize torch.distributed before this call.

    The optimizers stay with a parameter that moves to another device or dtype; a copy or a pickle of the
    parameter has none. A module that trains itself in the backward pass (`EmbeddingBagCollection`) creates
    the optimizer of its tables: it has the formula of the class, but updates only the rows that were looked
    up, as the class does with a sparse gradient of these rows.

    Differences from torch: all arguments are checked, and nothing is changed if one raises an error; an
    optimizer steps once in each backward pass, not once for each optimizer of the parameter; a parameter that
    was moved to another device or dtype still steps; and a parameter without other references is freed.

    Args:
        optimizer_class: the class of the optimizers.
        params: leaf tensors that require a gradient, each once; may be a generator.
        optimizer_kwargs: the arguments of each optimizer, except its parameter.

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: a parameter does not require a gradient, is not a leaf, is listed twice, or is already in
            DistributedDataParallel; an option is
            out of range; or the optimizer of a table has another type than the one it was created with.

    Source: torch.distributed.optim; torchrec.optim.apply_optimizer_in_backward.

    >>> import torch
    >>> from keyedopt.reference import apply_optimizer_in_backward
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
        raise TypeError("optimizer_kwargs must not have 'params': each parameter has an optimizer of its own")
    listed = _checked(params)
    owned: list[tuple[Owner, list[torch.nn.Parameter]]] = []
    made: list[tuple[torch.nn.Parameter, Optimizer, dict[str, Any]]] = []
    for param in listed:
        owner = owner_of(param)
        if owner is None:
            kwargs = copy.deepcopy(dict(optimizer_kwargs))
            made.append((param, optimizer_class([param], **copy.deepcopy(kwargs)), kwargs))
            continue
        weights = next((weights for known, weights in owned if known is owner), None)
        if weights is None:
            owned.append((owner, [param]))
        else:
            weights.append(param)
    for owner, weights in owned:
        owner.set_optimizer(optimizer_class, weights, optimizer_kwargs)
    for param, optimizer, kwargs in made:  # nothing below raises
        _attach(param, optimizer, kwargs)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters without an optimizer in the backward pass, or only those with one.

    Weights that a module trains in its own backward pass count as parameters with an optimizer.

    Args:
        named_parameters: names and parameters, as ``module.named_parameters()`` yields them.
        include: yield the parameters with an optimizer, not those without.

    Returns:
        An iterator of names and parameters.

    >>> import torch
    >>> from keyedopt.reference import apply_optimizer_in_backward, in_backward_optimizer_filter
    >>> layer = torch.nn.Linear(2, 1)
    >>> apply_optimizer_in_backward(torch.optim.SGD, [layer.weight], {"lr": 0.5})
    >>> [name for name, _ in in_backward_optimizer_filter(layer.named_parameters())]
    ['bias']
    """
    for name, param in named_parameters:
        owner = owner_of(param)
        has = hasattr(param, "_in_backward_optimizers") or (owner is not None and owner.trains(param))
        if has == include:
            yield name, param


def _checked(params: Any) -> list[torch.nn.Parameter]:
    """Return the parameters as a list; raise an error that names the first invalid one."""
    if isinstance(params, Tensor | str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"params must be an iterable of parameters, not a {type(params).__name__}")
    listed = list(params)
    places: dict[int, int] = {}
    replicated = _replicated()
    for index, param in enumerate(listed):
        if not isinstance(param, Tensor):
            raise TypeError(f"params[{index}] must be a parameter, not a {type(param).__name__}")
        if not param.requires_grad:
            raise ValueError(
                f"params[{index}] does not require a gradient, so no backward pass would step it"
            )
        if not param.is_leaf:
            raise ValueError(f"params[{index}] is computed, not a leaf: it has no gradient of its own")
        if id(param) in replicated:
            raise ValueError(
                f"params[{index}] is already in DistributedDataParallel, which would reduce its gradient "
                "after the step: call apply_optimizer_in_backward before wrapping the model"
            )
        first = places.setdefault(id(param), index)
        if first != index:
            raise ValueError(f"params[{index}] is params[{first}]: it would be updated twice")
    return listed


def _replicated() -> set[int]:
    """Return the ids of the parameters that DistributedDataParallel modules reduce."""
    if not (dist.is_available() and dist.is_initialized()):
        return set()
    # Not isinstance, which also reads the object's __class__: a weak proxy of a deleted object raises there.
    modules = [one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel)]
    return {id(param) for module in modules for param in module._module_parameters}


def _attach(param: torch.nn.Parameter, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
    noted: Any = param
    if not hasattr(param, "_in_backward_optimizers"):
        noted._in_backward_optimizers, noted._optimizer_classes, noted._optimizer_kwargs = [], [], []
        # A hook of the tensor, because a move to another dtype replaces the tensor's node in the graph.
        handle = param.register_post_accumulate_grad_hook(_step)  # type: ignore[no-untyped-call]
        if dist.is_available() and dist.is_initialized():
            # DistributedDataParallel calls `remove`, and steps the optimizers when it has reduced a gradient.
            from torch.distributed.optim import apply_optimizer_in_backward as registry

            registry.param_to_optim_hook_handle_map[param] = [_Handle(handle)]
    noted._in_backward_optimizers.append(optimizer)
    noted._optimizer_classes.append(type(optimizer))
    noted_arguments = getattr(optimizer, "noted_arguments", None)  # of `fused`, for torchrec's sharding
    noted._optimizer_kwargs.append(noted_arguments(param, kwargs) if noted_arguments else kwargs)


class _Handle:
    """The hook of a parameter, which DistributedDataParallel removes when it wraps the parameter."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remove(self) -> None:
        if not torch.accelerator.is_available():
            raise ValueError(
                "DistributedDataParallel steps optimizers in the backward pass on accelerators only: on the "
                "CPU use an optimizer whose step() is called after the backward pass"
            )
        self._handle.remove()


@_disable_dynamo  # a compiled step that includes the backward pass must not trace this
def _step(param: Tensor) -> None:
    """Step every optimizer of a parameter, then set its gradient to None."""
    noted: Any = param
    for optimizer in noted._in_backward_optimizers:
        optimizer.step()
    param.grad = None
