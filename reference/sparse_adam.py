"""SparseAdam, with the surface of torch's."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from keyedopt.reference.option_checks import check_betas, check_range, check_rate
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer
from keyedopt.reference.rules import Rows, check_rows, sparse_adam
from keyedopt.reference.sparse_adam_inputs import check_parameters, checked, listed

__all__ = ["SparseAdam"]


class SparseAdam(RuleOptimizer):
    """Adam for the elements that a sparse gradient lists, see `rules.sparse_adam`; others keep their bits.

    A listed element counts as not zero, whatever its value; duplicates are summed first. A gradient that
    lists nothing changes no parameter and no moment, and counts as a step. Gradients are sparse COO, in rows
    (``nn.Embedding(sparse=True)``) or in single elements; dense ones are refused.

    State, from the first step on: ``step``, an int, and ``exp_avg`` and ``exp_avg_sq``, like the parameter.
    It is torch's, so either optimizer loads the other's ``state_dict()``. Loading takes copies, and refuses
    (ValueError, nothing changed) state that is not of these parameters, and options out of range.

    What differs from torch's beside that: a refused step has changed nothing; ``lr`` and ``eps`` may be 0; a
    parameter may be listed once; groups are checked like arguments, and copied.

    Args:
        params: parameters, or groups of them.
        lr: rate; a tensor of one element is kept, and read at each step.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        maximize: ascend.
        error_if_nonfinite: refuse a step with a gradient of infinity or NaN; else it stays where it is.
    """

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
            rows=Rows.GIVEN,  # which is no choice here, but every rule optimizer says it
            error_if_nonfinite=error_if_nonfinite,
        )

    # --- arguments ------------------------------------------------------------------------------

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        check_rate(group["lr"])
        check_betas(group["betas"])
        check_range("eps", group["eps"])
        for name in ("maximize", "error_if_nonfinite"):
            if not isinstance(group[name], bool):
                raise ValueError(f"{name} must be True or False, not {group[name]!r}")
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
                check_parameters(params)
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)

    # --- the step -------------------------------------------------------------------------------

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return no steps, and moments of zero."""
        zeros = torch.zeros_like(param, requires_grad=False)
        return {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return `rules.sparse_adam` with the options of the group."""
        options = {name: group[name] for name in ("betas", "eps", "maximize")}
        rule = functools.partial(sparse_adam, step=int(state["step"]), lr=float(group["lr"]), **options)
        return rule, ("exp_avg", "exp_avg_sq")

    def check_gradient(self, group: Mapping[str, Any], param: Tensor) -> None:
        """Refuse a dense gradient, elements that do not exist, and on demand what is not finite."""
        grad = param.grad
        assert grad is not None
        if grad.layout is not torch.sparse_coo:
            raise RuntimeError(
                f"SparseAdam takes sparse COO gradients, not {grad.layout}; for dense ones use Adam"
            )
        for size, indices in zip(param.shape, grad._indices(), strict=False):
            check_rows(indices, size, "indices of the gradient")
        if group["error_if_nonfinite"] and not grad._values().isfinite().all():
            raise RuntimeError("a gradient is not finite, and error_if_nonfinite asks to refuse it")

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if not state:
            state.update(self.initial_state(param, group))
        state["step"] += 1
        if not grad._nnz():
            return
        where, grads = listed(grad)
        rule, names = self.rule(group, state, False)
        tensors = [param, *(state[name] for name in names)]
        old = [tensor[where] for tensor in tensors]
        for tensor, new in zip(tensors, rule(old[0], grads, *old[1:]), strict=True):
            tensor[where] = new

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
        params = [param for group in groups for param in group["params"]]
        if any(not isinstance(param, Tensor) for param in state["state"]):
            raise ValueError(f"state must be of the {len(params)} parameters in param_groups alone")
        entries = {param: checked(param, entry) for param, entry in state["state"].items()}
        super().__setstate__({**state, "param_groups": groups})
        self.state.update(entries)
