"""Fused kernels for many parameters at once: those of `fused.bulk` on the CPU, torch's on CUDA.

`triton_dense_steps` updates the parameters on CUDA that it supports before these kernels get the others.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.bulk import native
from keyedopt.fused.dense import cpu_dense_steps
from keyedopt.fused.dense.cpu_dense_steps import Clip, Group
from keyedopt.reference.memory import PLAIN

CPU_KERNELS = "C++ kernels for dense gradients"
DEVICES = ("cpu", "cuda")
#: A parameter of a step, its gradient, and its state.
Work = tuple[Tensor, Tensor, dict[str, Any]]


def update(step: Step, work: Sequence[Work], names: Sequence[str], scale: Tensor | None) -> None:
    """Update parameters of one device and dtype for which `fit` is true; see `dense_step.update`."""
    params, grads = [param for param, _, _ in work], [grad for _, grad, _ in work]
    states = [[state[name] for _, _, state in work] for name in names]
    if params[0].device.type == "cpu" and params[0].dtype is torch.float32:
        clip = Clip() if scale is None else Clip(factor=1.0 / float(scale))
        if cpu_dense_steps.update([Group(step, params, grads, states)], clip):
            return
    options: dict[str, Any] = {"maximize": step.maximize}
    options["lr"] = step.lr.float() if isinstance(step.lr, Tensor) else step.lr
    if scale is not None:
        options["grad_scale"] = scale.to(params[0].device, torch.float32).reshape(())
    KERNELS[step.algorithm](step, params, grads, states, _counts(step, work), options)
    # These operators do not raise versions, by which autograd sees that a saved tensor was modified.
    torch.autograd.graph.increment_version(chain(params, *states))


def refuses(step: Step, item: Work, names: Sequence[str], scale: Tensor | None) -> str:
    """Return why torch's kernel does not support these options, dtypes or layouts; empty if it does."""
    param, grad, state = item
    if step.algorithm not in KERNELS:
        return f"torch has none for {step.algorithm}"
    if not same_formula(step, state, names):
        return "its formula differs with these options"
    dtype, device = param.dtype, param.device
    if device.type not in DEVICES:
        return f"there is none for {device.type}"
    if dtype is torch.float64:
        if scale is not None or isinstance(step.lr, Tensor):
            return "it reads scales, and learning rates that are tensors, as float32"
    elif dtype is not torch.float32 and step.algorithm != "adam":
        # SGD skips elements (pytorch#191763), Adagrad rounds more often.
        return f"it is not exact in {dtype}"
    for tensor in (param, grad, *[state[name] for name in names]):
        if type(tensor) not in PLAIN or tensor.dtype is not dtype:
            return "parameter, gradient and state must be plain tensors of one dtype"
        if tensor.device != device or not tensor.is_contiguous():
            return "parameter, gradient and state must be contiguous, on one device"
        if tensor.shape != param.shape:  # torch's kernels do not compare shapes: they write outside of memory
            return "parameter, gradient and state must have one shape"
    return ""


def explain(step: Step, item: Work, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return which kernel runs for an item that `refuses` accepts, and why no earlier one does.

    On the CPU this updates the item.
    """
    param, grad, state = item
    torchs = f"torch's fused kernel for {step.algorithm}"
    if param.device.type != "cpu":
        return torchs, {}
    if cpu_dense_steps.update([Group(step, [param], [grad], [[state[name]] for name in names])], Clip()):
        return f"{CPU_KERNELS}, {torch.get_num_threads()} threads", {}
    return torchs, {CPU_KERNELS: cpu_dense_steps.NOT_BUILT if native is None else cpu_dense_steps.REFUSED}


def same_formula(step: Step, state: dict[str, Any], names: Sequence[str]) -> bool:
    """Return whether torch's kernel has the formula of a step with these options."""
    if step.algorithm == "sgd":
        return not (step.decay == "decoupled" and step.weight_decay) and bool(names) == bool(step.momentum)
    if step.eps <= torch.finfo(torch.float32).tiny:  # 0 / 0 is NaN in torch's kernel
        return False
    if step.algorithm == "adagrad":
        return not (step.decay == "decoupled" and step.weight_decay)
    return step.eps_placement == "inside_denominator" and state["step"].ndim == 0


def _counts(step: Step, work: Sequence[Work]) -> list[Tensor]:
    """Return step counts for torch's kernels: float32, on the device of the parameters."""
    if isinstance(step.count, Tensor):
        return list(torch.stack([state["step"] for _, _, state in work]).float().unbind())
    return [torch.full((), float(step.count), device=work[0][0].device)] * len(work)


def _sgd(step: Step, params: Any, grads: Any, states: Any, counts: Any, options: dict[str, Any]) -> None:
    torch._fused_sgd_(
        params,
        grads,
        states[0] if states else [],
        weight_decay=step.weight_decay if step.decay == "l2" else 0.0,
        momentum=step.momentum,
        dampening=step.dampening,
        nesterov=step.nesterov,
        is_first_step=step.first,
        **options,
    )


def _adagrad(step: Step, params: Any, grads: Any, states: Any, counts: Any, options: dict[str, Any]) -> None:
    torch._fused_adagrad_(
        params,
        grads,
        states[0],
        counts,
        lr_decay=step.lr_decay,
        weight_decay=step.weight_decay if step.decay == "l2" else 0.0,
        eps=step.eps,
        **options,
    )


def _adam(step: Step, params: Any, grads: Any, states: Any, counts: Any, options: dict[str, Any]) -> None:
    kernel: Any = torch._fused_adamw_ if step.decay == "decoupled" else torch._fused_adam_
    kernel(
        params,
        grads,
        *states,
        [],
        counts,
        beta1=step.betas[0],
        beta2=step.betas[1],
        weight_decay=0.0 if step.decay == "none" else step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        **options,
    )


KERNELS: dict[str, Callable[..., None]] = {"sgd": _sgd, "adagrad": _adagrad, "adam": _adam}
