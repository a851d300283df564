"""SparseAdam, with the surface of torch's."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.dense import dense_step
from keyedopt.fused.dense.initial_state import full_state
from keyedopt.fused.option_checks import check_betas, check_flags, check_range, check_rate
from keyedopt.fused.row_optimizer import RowOptimizer
from keyedopt.fused.sparse import sparse_step
from keyedopt.reference.rules.options import EpsPlacement, Rows

__all__ = ["SparseAdam"]


class SparseAdam(RowOptimizer):
    r"""Adam for the elements that a sparse gradient lists; others keep their bits.

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
        w \leftarrow w - \gamma \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + \epsilon}

    A listed element counts as not zero, whatever its value; duplicates are summed first. A gradient that
    lists nothing changes no parameter and no moment, and counts as a step. Gradients are sparse COO, in rows
    (``nn.Embedding(sparse=True)``) or in single elements; dense ones are refused.

    State, from the first step on: ``step``, an int, and ``exp_avg`` and ``exp_avg_sq``, like the parameter.
    It is torch's, so either optimizer loads the other's ``state_dict()``. Loading takes copies, and refuses
    (ValueError, nothing changed) state that is not of these parameters, and options out of range.

    Args:
        params: parameters, or groups of them.
        lr: rate; a tensor of one element is kept, and read at each step.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        maximize: ascend.
        error_if_nonfinite: refuse a step with a gradient of infinity or NaN; else it stays where it is.
    """

    algorithm = "sparse_adam"
    quick = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        error_if_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas=betas,
            eps=eps,
            maximize=maximize,
            rows=Rows.GIVEN,  # which is no choice here, but every optimizer of rows says it
            error_if_nonfinite=error_if_nonfinite,
        )

    # --- arguments ------------------------------------------------------------------------------

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        check_rate(group["lr"])
        check_betas(group["betas"])
        check_range("eps", group["eps"])
        check_flags(group, "maximize", "error_if_nonfinite")
        if Rows(group["rows"]) is not Rows.GIVEN:
            raise ValueError("rows must be 'given': SparseAdam updates what the gradient lists")

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refused as a whole where an option or a parameter is."""
        if isinstance(param_group, dict):
            if "params" not in param_group:
                raise ValueError("a group must have params")
            params = param_group["params"]
            if not isinstance(params, set):  # torch's error about their order is clear
                params = [params] if isinstance(params, Tensor) else list(params)
                _check_parameters(params)
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)

    # --- the step -------------------------------------------------------------------------------

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return no steps, and moments of zero."""
        return {"step": 0, "exp_avg": full_state(param), "exp_avg_sq": full_state(param)}

    def make_step(self, group: Mapping[str, Any], count: int | Tensor = 1, first: bool = False) -> Step:
        """Return what a backend is to do: eps stands beside √v, as in torch's code."""
        placement = EpsPlacement.BEFORE_BIAS_CORRECTION
        return super().make_step({**group, "eps_placement": placement}, count, first)

    def check_gradient(self, group: Mapping[str, Any], param: Tensor) -> None:
        """Refuse a dense gradient, elements that do not exist, and on demand what is not finite."""
        grad = param.grad
        assert grad is not None
        if grad.layout is not torch.sparse_coo:
            raise RuntimeError(
                f"SparseAdam takes sparse COO gradients, not {grad.layout}; for dense ones use Adam"
            )
        sparse_step.check_indices(grad._indices(), param.shape)
        if group["error_if_nonfinite"]:
            sparse_step.check_finite(grad._values())

    def update(self, group: dict[str, Any], given: list[tuple[Tensor, Tensor]]) -> None:
        """Update some parameters of a group; those with the same count together."""
        alike: dict[int, list[dense_step.Work]] = {}
        for param, grad in given:
            state = self.state[param]
            if not state:
                state.update(self.initial_state(param, group))
            state["step"] += 1
            alike.setdefault(state["step"], []).append((param, grad, state))
        for count, work in alike.items():
            self.update_alike(self.make_step(group, count), work, self.state_names({}), Rows.GIVEN)

    # --- loading --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, hooks included; `__setstate__` checks what is to be loaded."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("state_dict must be a mapping with state and param_groups")
        Optimizer.load_state_dict(self, state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take state from a checkpoint or a pickle: checked first, and copied, to be nobody else's."""
        defaults = state.get("defaults", getattr(self, "defaults", {}))
        groups = [{**defaults, **group} for group in state["param_groups"]]
        for group in groups:
            self.check_options(group)
        if not all(isinstance(param, Tensor) for param in state["state"]):
            count = sum(len(group["params"]) for group in groups)
            raise ValueError(f"state must be of the {count} parameters in param_groups alone")
        entries = {param: _own_entry(param, entry) for param, entry in state["state"].items()}
        super().__setstate__({**state, "param_groups": groups})
        self.state.update(entries)


def _check_parameters(params: list[Any]) -> None:
    """Refuse a parameter that is sparse, complex, or listed twice, with a ValueError that says where."""
    seen: set[int] = set()
    for index, param in enumerate(params):
        tensor = param[1] if isinstance(param, tuple) and len(param) == 2 else param
        if not isinstance(tensor, Tensor):
            continue  # torch's error is clear
        if tensor.layout is not torch.strided or tensor.is_complex():
            raise ValueError(f"params[{index}] must be dense and real, not {tensor.layout} of {tensor.dtype}")
        if id(tensor) in seen:
            raise ValueError(f"params[{index}] is listed before: it would be updated twice")
        seen.add(id(tensor))


def _own_entry(param: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of a parameter.

    Raises:
        ValueError: it is not of this parameter.
    """
    if not entry:
        return {}
    if set(entry) != {"step", "exp_avg", "exp_avg_sq"}:
        raise ValueError(f"the state of a parameter is step, exp_avg and exp_avg_sq, not {sorted(entry)}")
    step = float(entry["step"])
    if not math.isfinite(step) or step < 0 or step != int(step):
        raise ValueError(f"step must be a number of steps, not {entry['step']!r}")
    own: dict[str, Any] = {"step": int(step)}
    for name in ("exp_avg", "exp_avg_sq"):
        value = entry[name]
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (param.shape, param.dtype):
            what = f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} must be {param.dtype} of {tuple(param.shape)}, not {what}")
        own[name] = value.detach().clone(memory_format=torch.preserve_format)
    return own
