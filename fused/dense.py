"""Dense gradients: the parameters of a group in one of torch's fused kernels, others a piece at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends import torch_rules
from keyedopt.fused.backends.interface import Step

#: A parameter of a step, its gradient, and its state.
Work = tuple[Tensor, Tensor, dict[str, Any]]

#: How many elements of a parameter are updated at a time for each thread, so that they stay in its cache.
PIECE = 1 << 15


def update(step: Step, work: Sequence[Work], names: Sequence[str]) -> None:
    """Update parameters by dense gradients, in place.

    Args:
        step: the formula; its count is that of all of them, unless it is on a device: then each has its own.
        work: parameters, gradients of the same shape, and states by name.
        names: the state tensors, as `ALGORITHMS` orders them.
    """
    call = KERNELS.get(step.algorithm)
    together: dict[tuple[torch.device, torch.dtype], list[Work]] = {}
    for param, grad, state in work:
        tensors = [param, grad, *(state[name] for name in names)]
        if call is not None and _exact(step, state, names) and _plain(tensors, step):
            together.setdefault((param.device, param.dtype), []).append((param, grad, state))
        else:
            _update_one(step, param, grad, state, names)
    for (device, _), same in together.items():
        assert call is not None
        params, grads = [param for param, _, _ in same], [grad for _, grad, _ in same]
        states = [[state[name] for _, _, state in same] for name in names]
        call(step, params, grads, states, _counts(step, same, device), _rate(step))


# --- torch's kernels ------------------------------------------------------------------------------


def _exact(step: Step, state: dict[str, Any], names: Sequence[str]) -> bool:
    """Whether torch's kernel has the formula, options included."""
    if step.algorithm == "sgd":
        return not (step.decay == "decoupled" and step.weight_decay) and bool(names) == bool(step.momentum)
    if step.eps <= torch.finfo(torch.float32).tiny:  # 0 / 0 is NaN there
        return False
    if step.algorithm == "adagrad":
        return not (step.decay == "decoupled" and step.weight_decay)
    return step.eps_placement == "inside_denominator" and state["step"].ndim == 0


def _plain(tensors: Sequence[Tensor], step: Step) -> bool:
    """Whether torch's kernels take these: alike, contiguous, and no halves, whose state they round."""
    first = tensors[0]
    if isinstance(step.lr, Tensor) and first.dtype is torch.float64:  # they take such a rate in float32
        return False
    return first.dtype in torch_rules.WIDE and all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype is first.dtype
        and tensor.device == first.device
        and tensor.device.type in ("cpu", "cuda")
        and tensor.is_contiguous()
        for tensor in tensors
    )


def _counts(step: Step, same: Sequence[Work], device: torch.device) -> list[Tensor]:
    """Return the counts as the kernels take them: float32, on the device of the parameters."""
    if isinstance(step.count, Tensor):
        return list(torch.stack([state["step"] for _, _, state in same]).float().unbind())
    return [torch.full((), float(step.count), device=device)] * len(same)


def _rate(step: Step) -> Any:
    return step.lr.float() if isinstance(step.lr, Tensor) else step.lr


def _sgd(
    step: Step, params: list[Tensor], grads: list[Tensor], states: list[Any], counts: list[Tensor], lr: Any
) -> None:
    torch._fused_sgd_(
        params,
        grads,
        states[0] if states else [],
        weight_decay=step.weight_decay if step.decay == "l2" else 0.0,
        momentum=step.momentum,
        lr=lr,
        dampening=step.dampening,
        nesterov=step.nesterov,
        maximize=step.maximize,
        is_first_step=step.first,
    )


def _adagrad(
    step: Step, params: list[Tensor], grads: list[Tensor], states: list[Any], counts: list[Tensor], lr: Any
) -> None:
    torch._fused_adagrad_(
        params,
        grads,
        states[0],
        counts,
        lr=lr,
        lr_decay=step.lr_decay,
        weight_decay=step.weight_decay if step.decay == "l2" else 0.0,
        eps=step.eps,
        maximize=step.maximize,
    )


def _adam(
    step: Step, params: list[Tensor], grads: list[Tensor], states: list[Any], counts: list[Tensor], lr: Any
) -> None:
    kernel: Any = torch._fused_adamw_ if step.decay == "decoupled" else torch._fused_adam_
    kernel(
        params,
        grads,
        *states,
        [],
        counts,
        lr=lr,
        beta1=step.betas[0],
        beta2=step.betas[1],
        weight_decay=0.0 if step.decay == "none" else step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=step.maximize,
    )


KERNELS: dict[str, Callable[..., None]] = {"sgd": _sgd, "adagrad": _adagrad, "adam": _adam}


# --- one parameter --------------------------------------------------------------------------------


def _update_one(step: Step, param: Tensor, grad: Tensor, state: dict[str, Any], names: Sequence[str]) -> None:
    """Update a parameter by the rules in torch, so many rows at a time as a cache holds."""
    counts: Tensor | None = state.get("step")
    if counts is None or not counts.ndim:
        if counts is not None and isinstance(step.count, Tensor):
            step = replace(step, count=counts)
        counts = None
    tensors = [param, grad, *(state[name] for name in names)]
    if counts is not None:
        tensors.append(counts)
    rows = len(param) if param.ndim else 1
    piece = max(1, PIECE * torch.get_num_threads() * rows // max(1, param.numel()))
    if param.ndim == 0 or rows <= piece or param.device.type != "cpu" or type(param.data) is not Tensor:
        pieces = [tensors]
    else:
        pieces = [list(part) for part in zip(*(tensor.split(piece) for tensor in tensors), strict=True)]
    for index, (weight, g, *states) in enumerate(pieces):
        count = states.pop() if counts is not None else None
        one = step if step.seed is None else replace(step, seed=step.seed + index)
        torch_rules.update(one, weight, g, states, count)
