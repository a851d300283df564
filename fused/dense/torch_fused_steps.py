"""Steps of torch's fused optimizers on the CPU, by kernels of `fused.bulk` that also clip."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.bulk import native
from keyedopt.fused.dense.cpu_dense_steps import Clip, Group, update
from keyedopt.fused.dense.state_memory import full_state
from keyedopt.reference.memory import check_memory

#: Torch optimizers with a fused kernel, each with its algorithm and state tensors.
TORCH_OPTIMIZERS: dict[type, tuple[str, tuple[str, ...]]] = {
    optim.Adam: ("adam", ("exp_avg", "exp_avg_sq")),
    optim.AdamW: ("adam", ("exp_avg", "exp_avg_sq")),
    optim.SGD: ("sgd", ("momentum_buffer",)),
    optim.Adagrad: ("adagrad", ("sum",)),
}
#: Options that the kernels do not support.
UNSUPPORTED = ("amsgrad", "capturable", "differentiable")


def replacement_step(optimizer: Any, clip: Clip, otherwise: Callable[[], Any]) -> Callable[..., Any]:
    """Return a function that replaces one call of the ``step`` of an optimizer.

    Args:
        optimizer: an instance of a class in `TORCH_OPTIMIZERS`.
        clip: how to clip the gradients.
        otherwise: clips and steps without the kernels; called, before anything is written, if they do not
            support the step.
    """

    def step(closure: Any = None) -> Any:
        if closure is None and _step(optimizer, clip):
            return None
        return otherwise()

    return step


def check_shapes(optimizer: Any) -> None:
    """Raise RuntimeError if a gradient or state of a torch optimizer does not fit its parameter.

    torch's fused kernels compare no shapes, and write outside the memory of a state that is too small.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = (one for one in optimizer.state.get(param, {}).values() if isinstance(one, Tensor))
            for tensor in (param, param.grad, *(one for one in state if one.ndim)):
                if tensor.shape != param.shape:
                    raise RuntimeError(
                        f"a gradient or state of {tuple(tensor.shape)} does not fit its parameter "
                        f"{tuple(param.shape)}"
                    )
                check_memory(tensor)


def _step(optimizer: Any, clip: Clip) -> bool:
    if optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks:
        return False
    new_state: dict[Tensor, dict[str, Tensor]] = {}
    listed = optimizer.param_groups
    groups = [_group(type(optimizer), options, optimizer.state, new_state) for options in listed]
    known = [group for group in groups if group is not None]
    if len(known) < len(groups):
        return False
    with _recorded(f"Optimizer.step#{type(optimizer).__name__}.step"):
        done = update(known, clip)
    if done:
        for param, entry in new_state.items():
            optimizer.state[param].update(entry)
    return done


def _recorded(name: str) -> AbstractContextManager[Any]:
    """Return a context that records torch's name of the step if a profiler is running."""
    profiled = torch._C._autograd._profiler_enabled()
    return torch.profiler.record_function(name) if profiled else nullcontext()


def _group(kind: type, options: dict[str, Any], state: Any, new_state: dict[Any, Any]) -> Group | None:
    """Return a group for the kernels, or None if they do not support it; add missing state to `new_state`."""
    algorithm, names = TORCH_OPTIMIZERS[kind]
    if not options.get("fused") or any(options.get(name) for name in UNSUPPORTED):
        return None
    if algorithm == "sgd" and not options["momentum"]:
        names = ()
    counted = names if algorithm == "sgd" else (*names, "step")
    found = None if native is None else native.gathered(options["params"], state, counted)
    if found is not None:
        try:
            step = _step_of(kind, algorithm, options, first=False)
        except (TypeError, ValueError):
            return None
        params, grads, states = found
        return Group(step, params, grads, states[: len(names)], states[-1] if algorithm != "sgd" else None)
    params = [param for param in options["params"] if param.grad is not None]
    entries = [state.get(param) or {} for param in params]
    new = [param for param, entry in zip(params, entries, strict=True) if _lacks(entry, names)]
    if new:
        if len(new) < len(params) and algorithm == "sgd":  # `Step.first` holds for the whole group
            return None
        new_state |= {param: _initial(param, algorithm, names) for param in new}
        entries = [new_state.get(param, entry) for param, entry in zip(params, entries, strict=True)]
    try:
        step = _step_of(kind, algorithm, options, first=bool(new))
        states = [[entry[name] for entry in entries] for name in names]
        counts = None if algorithm == "sgd" else [entry["step"] for entry in entries]
    except (KeyError, TypeError, ValueError):
        return None
    grads = [param.grad for param in params]
    return Group(step, params, grads, states, counts)


def _lacks(entry: dict[str, Any], names: Sequence[str]) -> bool:
    """Return whether torch's optimizer would create the state of a parameter."""
    return bool(names) and (not entry or entry.get(names[0]) is None)


@torch.no_grad()
def _initial(param: Tensor, algorithm: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Return state as torch's fused optimizers create it; the first step overwrites a momentum buffer."""
    entry = {name: full_state(param) for name in names}
    return entry if algorithm == "sgd" else {"step": torch.zeros((), dtype=torch.float32), **entry}


def _step_of(kind: type, algorithm: str, options: dict[str, Any], first: bool) -> Step:
    decoupled = options.get("decoupled_weight_decay", kind is optim.AdamW)
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    return Step(
        algorithm,
        lr=_number(options["lr"]),
        eps=options.get("eps", 0.0),
        betas=(_number(beta1), _number(beta2)),
        weight_decay=_number(options["weight_decay"]),
        decay="decoupled" if decoupled else "l2",
        momentum=_number(options.get("momentum", 0.0)),
        dampening=_number(options.get("dampening", 0.0)),
        nesterov=bool(options.get("nesterov", False)),
        first=first,
        lr_decay=_number(options.get("lr_decay", 0.0)),
        maximize=bool(options["maximize"]),
    )


def _number(value: Any) -> float:
    """Return a number, also from a tensor on the CPU; raise ValueError if reading it would synchronize."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ValueError("the number is on a device")
    return float(value)
