"""SparseAdam, with the names and arguments of `torch.optim.SparseAdam`."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from keyedopt.reference.option_checks import check_betas, check_flags, check_learning_rate, check_range
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer
from keyedopt.reference.rules import Rows, sparse_adam
from keyedopt.reference.saved_groups import as_loaded
from keyedopt.reference.sparse_adam_inputs import check_parameters, copy_state, sum_listed

__all__ = ["SparseAdam"]


class SparseAdam(RuleOptimizer):
    r"""Adam for only those elements that a sparse gradient lists: `rules.sparse_adam`.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \gamma \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + \epsilon}

    A listed element is updated even if its value is 0; duplicates are summed first. A gradient that lists
    nothing changes no parameter and no moment, and counts as a step. Gradients are sparse COO, in rows
    (``nn.Embedding(sparse=True)``) or in single elements.

    State, from the first step on: ``step``, an int, and ``exp_avg`` and ``exp_avg_sq``, as the parameter.
    torch's SparseAdam and this one load each other's ``state_dict()``. Loading copies the tensors.

    Differences from torch: a step that raises has changed nothing; ``lr`` and ``eps`` may be 0; a parameter
    may be listed only once; groups are checked like arguments, and copied.

    Args:
        params: parameters, or groups of parameters; dense, real and each listed once.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        betas: β₁ and β₂, each in [0, 1).
        eps: ε, at least 0.
        maximize: step along the gradient, not against it.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.

    Raises:
        ValueError: an option is out of range, or a parameter is sparse, complex or listed twice.

    Source: torch.optim.SparseAdam.

    >>> import torch
    >>> from keyedopt.reference import SparseAdam
    >>> table = torch.nn.Embedding(3, 1, sparse=True)
    >>> _ = torch.nn.init.ones_(table.weight)
    >>> optimizer = SparseAdam(table.parameters(), lr=0.5)
    >>> table(torch.tensor([0, 2])).sum().backward()
    >>> optimizer.step()
    >>> [round(one, 4) for one in table.weight.flatten().tolist()]
    [0.5, 1.0, 0.5]
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
            rows=Rows.GIVEN,  # not an argument here, but an option of every rule optimizer
            error_if_nonfinite=error_if_nonfinite,
        )

    # --- arguments ------------------------------------------------------------------------------

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range."""
        check_learning_rate(group["lr"])
        check_betas(group["betas"])
        check_range("eps", group["eps"])
        check_flags(group, "maximize", "error_if_nonfinite")
        if Rows(group["rows"]) is not Rows.GIVEN:
            raise ValueError("rows must be 'given': SparseAdam updates what the gradient lists")

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a copy of a group; options that it lacks are the defaults.

        Raises:
            ValueError: an option or a parameter is invalid. Nothing is added.
        """
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
        """Return a count of 0, and moments of zero."""
        return {"step": 0, "exp_avg": self.full_state(param), "exp_avg_sq": self.full_state(param)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return `rules.sparse_adam` with the options of the group."""
        options = {name: group[name] for name in ("betas", "eps", "maximize")}
        rule = functools.partial(sparse_adam, step=int(state["step"]), lr=float(group["lr"]), **options)
        return rule, ("exp_avg", "exp_avg_sq")

    def check_layout(self, grad: Tensor) -> None:
        """Raise RuntimeError unless `grad` is sparse COO."""
        if grad.layout is not torch.sparse_coo:
            raise RuntimeError(
                f"SparseAdam takes sparse COO gradients, not {grad.layout}; for dense ones use Adam"
            )

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        if not state:
            state.update(self.initial_state(param, group))
        state["step"] += 1
        if not grad._nnz():
            return
        where, grads = sum_listed(grad)
        rule, names = self.rule(group, state, False)
        tensors = [param, *(state[name] for name in names)]
        old = [tensor[where] for tensor in tensors]
        for tensor, new in zip(tensors, rule(old[0], grads, *old[1:]), strict=True):
            tensor[where] = new

    # --- loading --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of the state tensors, and the options; hooks are called as in torch.

        Raises:
            ValueError: an option is out of range, or a state does not match its parameter. Nothing is loaded.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("state_dict must be a mapping with state and param_groups")
        Optimizer.load_state_dict(self, state_dict)  # which calls `__setstate__`

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Check and copy the state of a checkpoint or a pickle, then use the copy."""
        defaults = state.get("defaults", getattr(self, "defaults", {}))
        groups = [{**defaults, **as_loaded(group)} for group in state["param_groups"]]
        for group in groups:
            self.check_options(group)
        params = [param for group in groups for param in group["params"]]
        if any(not isinstance(param, Tensor) for param in state["state"]):
            raise ValueError(f"state must belong to the {len(params)} parameters in param_groups")
        entries = {param: copy_state(param, entry) for param, entry in state["state"].items()}
        super().__setstate__({**state, "param_groups": groups})
        self.state.update(entries)
