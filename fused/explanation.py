"""Explain which code does the steps of an optimizer, and why no other code does."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from keyedopt.fused import backends
from keyedopt.fused.backends.memory import is_dense
from keyedopt.fused.backends.parameter_tables import ParameterTable
from keyedopt.fused.dense import cpu_fast_path, dense_step
from keyedopt.reference.rules.options import Rows

#: What runs for a parameter, and why others do not, by name.
Explained = tuple[str, dict[str, str]]


def explain(target: Any) -> str:
    """Return which code does the steps of an optimizer or a model, and why no other code does.

    Args:
        target: an optimizer of this package, or a wrapper or combination that contains one; or a module that
            contains embedding modules of this package.

    Returns:
        One line for all parameters that the same code updates, followed by the reasons why other backends and
        kernels do not run. For an optimizer of another package, the name of its class.

    Raises:
        TypeError: the target is neither an optimizer nor a module.

    >>> import torch
    >>> from keyedopt import fused
    >>> param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    >>> print(fused.explain(fused.Adam([param], lr=0.1)).partition(", torch.float64")[0])
    Adam: 1 parameter (dense gradients
    """
    parts = list(_parts("", target))
    if not parts:
        raise TypeError(
            f"explain takes an optimizer, or a module with embedding modules of keyedopt.fused; "
            f"{type(target).__name__} is neither"
        )
    return "\n".join(f"{key}: {text}" if key else text for key, text in parts)


def _parts(key: str, target: Any) -> Iterator[tuple[str, str]]:
    """Yield every part that has an explanation, with its key in the combinations around it."""
    if hasattr(target, "explain"):
        yield key, target.explain()
    elif isinstance(target, torch.nn.Module):
        for name, module in target.named_modules():
            if hasattr(module, "explain"):
                yield name, module.explain()
    elif hasattr(target, "optimizers"):
        for name, part in target.optimizers:
            yield from _parts(".".join(filter(None, (key, name))), part)
    elif hasattr(target, "_optimizer"):
        yield from _parts(key, target._optimizer)
        if hasattr(target, "_global_optimizer"):
            yield from _parts(key, target._global_optimizer)
    elif isinstance(target, torch.optim.Optimizer):
        yield key, f"{type(target).__module__}.{type(target).__qualname__}: its own step"


@torch.no_grad()
def explain_steps(optimizer: Any) -> str:
    """Return the explanation of a `RuleOptimizer`; see `RuleOptimizer.explain`.

    Code that reports only by running whether it supports tensors runs on copies of at most two rows.
    """
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    trial = object.__new__(type(optimizer))
    trial.state, trial.param_groups = {}, []
    for group in optimizer.param_groups:
        tried = []
        for param in group["params"]:
            where, (runs, reasons), copy = _explain_parameter(optimizer, group, param)
            reasons_seen = tuple(f"  not {name}: {why}" for name, why in reasons.items())
            line = f"({where}, {param.dtype}, {param.device}): {optimizer.algorithm} by {runs}"
            counts[line, reasons_seen] = counts.get((line, reasons_seen), 0) + 1
            if copy is not None:
                tried.append(copy[0])
                trial.state[copy[0]] = copy[1]
        trial.param_groups.append({**group, "params": tried})
    lines = []
    for (line, reasons_seen), count in counts.items():
        lines += [f"{type(optimizer).__name__}: {count} parameter{'s' * (count > 1)} {line}", *reasons_seen]
    if any(param.device.type == "cpu" for group in optimizer.param_groups for param in group["params"]):
        complete = sum(len(group["params"]) for group in trial.param_groups) == sum(counts.values())
        why = cpu_fast_path.try_step(trial) if complete else "a parameter is not a plain tensor"
        lines.append(f"  not the fast path with little Python: {why}" if why else "  by the fast path")
    return "\n".join(lines)


def _explain_parameter(
    optimizer: Any, group: Mapping[str, Any], param: Tensor
) -> tuple[str, Explained, tuple[Tensor, dict[str, Any]] | None]:
    """Return the layout of a gradient, its explanation, and copies of some rows of a parameter and its state.

    Without a gradient, and without state, those of the steps after the first are assumed.
    """
    grad = param.grad
    sparse = grad.is_sparse if grad is not None else optimizer.algorithm == "sparse_adam"
    where = "sparse gradients" if sparse else "dense gradients"
    real = optimizer.state.get(param)
    if isinstance(param, DTensor):
        state = real or optimizer.initial_state(param, group)
        step = optimizer.make_step(group)
        names = optimizer._state_names(state)
        if sparse or not dense_step.is_local(step, param, [state[name] for name in names]):
            return where, ("torch's operators on DTensors", {}), None
        few = _few(param.to_local())
        local = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}
        return where, _explain_rows(optimizer, group, few, torch.zeros_like(few), _copied(local)), None
    few = _few(param)
    state = _copied(real) if real else optimizer.initial_state(few, group)
    here = _sparse_zeros(few, grad) if sparse else _few(few if grad is None else grad)
    explained = _explain_rows(optimizer, group, few, here, _copied(state))
    if type(param) not in (Tensor, torch.nn.Parameter) or here.dtype != few.dtype:
        return where, explained, None
    few.grad = here
    return where, explained, (few, state)


def _explain_rows(
    optimizer: Any, group: Mapping[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]
) -> Explained:
    step, names, which = optimizer.make_step(group), optimizer._state_names(state), Rows(group["rows"])
    if not grad.is_sparse and which is not Rows.NONZERO:
        return dense_step.explain(step, (param, grad, state), names)
    dims, copied = grad.sparse_dim() if grad.is_sparse else 1, ""
    view = ParameterTable(step.algorithm, param, state, names, dims)
    if view.is_strided:  # steps use contiguous copies of the rows
        packed = {k: v.contiguous() if isinstance(v, Tensor) else v for k, v in state.items()}
        view = ParameterTable(step.algorithm, param.contiguous(), packed, names, dims)
        copied = " on contiguous copies of the rows"
    backend = backends.choose("auto", [view.table], step)
    others = backends.explain(backend, [view.table], step, backends.PREFERRED)
    runs, reasons = backends.described(backend) + copied, {repr(name): why for name, why in others.items()}
    if which is not Rows.ALL:
        return runs, reasons
    dense, more = dense_step.explain(step, (param, torch.zeros_like(param), state), names)
    return f"{dense}, after sums by {runs}", reasons | more


def _few(tensor: Tensor) -> Tensor:
    """Return zeros with the dtype and device of a tensor, and at most two rows, with gaps as it has."""
    rows = tensor[:2] if tensor.ndim else tensor
    strides = (torch.empty_like(rows) if is_dense(tensor) else rows).stride()
    return torch.empty_strided(rows.shape, strides, dtype=tensor.dtype, device=tensor.device).zero_()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _few(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def _sparse_zeros(param: Tensor, grad: Tensor | None) -> Tensor:
    """Return a sparse gradient of zeros that lists the first row, if any."""
    dims = 1 if grad is None else grad.sparse_dim()
    new = partial(torch.zeros, device=param.device)
    count = min(1, param.numel())
    values = new((count, *param.shape[dims:]), dtype=param.dtype if grad is None else grad.dtype)
    return torch.sparse_coo_tensor(
        new((dims, count), dtype=torch.int64), values, param.shape, check_invariants=False
    )
