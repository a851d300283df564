"""What the dense optimizers share: everything but the rule."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from keyedopt.reference.option_checks import check_gradient, check_range, check_rate
from keyedopt.reference.rules.options import Rows
from keyedopt.reference.rules.rows import coalesce, update_rows

#: A rule with its options, and the names of the state tensors that it takes and returns.
Applied = tuple[Callable[..., tuple[Tensor, ...]], tuple[str, ...]]


class RuleOptimizer(Optimizer):
    """A `torch.optim.Optimizer` that applies one of the rules.

    A dense gradient updates every row of a parameter, a sparse one the rows that it lists, unless the
    option `rows` says otherwise; every other row, and its state, keep their bits. A gradient of infinity or
    NaN spoils the rows it is in and no others; with `error_if_nonfinite` the step is refused, with a
    RuntimeError and before anything is written.

    A subclass gives the state at its start and the rule to apply.
    """

    #: Whether the rule needs rows, so that parameters must be tables (R, D).
    tables_only = False

    def __init__(self, params: ParamsT, lr: float | Tensor, **options: Any) -> None:
        named = {name: getattr(value, "value", value) for name, value in options.items()}
        super().__init__(params, {"lr": lr, **named})

    # --- what a subclass says -------------------------------------------------------------------

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        raise NotImplementedError

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Tensor], first: bool) -> Applied:
        """Return the rule to apply; `first` says whether the state is at its start."""
        raise NotImplementedError

    # --- arguments ------------------------------------------------------------------------------

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range, with a ValueError that names the option; extended by subclasses."""
        check_rate(group["lr"])
        check_range("weight_decay", group["weight_decay"])
        Rows(group["rows"])
        for name in ("maximize", "error_if_nonfinite"):
            if not isinstance(group[name], bool):
                raise ValueError(f"{name} must be True or False, not {group[name]!r}")

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refused as a whole where an option or a parameter is."""
        if isinstance(param_group, dict):
            given = {name: getattr(value, "value", value) for name, value in param_group.items()}
            param_group = given
            self.check_options({**self.defaults, **given})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            shape = tuple(param.shape)
            if not param.is_floating_point() or (self.tables_only and len(shape) != 2):
                self.param_groups.pop()
                wanted = "a table (rows, width) of floats" if self.tables_only else "of floats"
                raise ValueError(f"every parameter must be {wanted}; one is {shape} of {param.dtype}")

    # --- the step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the rule to every parameter with a gradient; return what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, param) for group in self.param_groups for param in group["params"]]
        work = [(group, param) for group, param in work if param.grad is not None]
        for group, param in work:
            self.check_gradient(group, param)
        for group, param in work:
            self._update(group, param, param.grad)
        return loss

    def check_gradient(self, group: Mapping[str, Any], param: Tensor) -> None:
        """Refuse a gradient that the rule cannot take, before any parameter is updated."""
        check_gradient(param, group["error_if_nonfinite"])

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        first = not state
        if first:
            state.update(self.initial_state(param, group))
        if "step" in state and state["step"].ndim == 0:  # a count a row is the rule's
            state["step"] += 1
        # A number of Python, whatever the dtype: a rule forms products of it before they meet the weights.
        rule, names = self.rule({**group, "lr": float(group["lr"])}, state, first)
        tensors = [state[name] for name in names]
        rows, grads = touched(param, grad, Rows(group["rows"]))
        if rows is not None:
            update_rows(rule, param, tensors, rows, grads)
            return
        for tensor, new in zip([param, *tensors], rule(param, grads, *tensors), strict=True):
            tensor.copy_(new)

    # --- loading --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but copy, and refuse as a whole bad options and state of another shape."""
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                self.check_options({**self.defaults, **group})
                for param in group["params"]:
                    self._check_state(param, group)
        except Exception:
            self.state, self.param_groups = before
            raise

    def _check_state(self, param: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state.get(param)
        if not state:
            return
        wanted = {name: tuple(value.shape) for name, value in self.initial_state(param, group).items()}
        for name, value in list(state.items()):
            if value is None:  # torch's way to say that there is none
                del state[name]
            else:
                state[name] = torch.as_tensor(value).clone()  # torch shares it with what is loaded
        got = {name: tuple(value.shape) for name, value in state.items()}
        if got != wanted:
            raise ValueError(f"the state of a parameter {tuple(param.shape)} must be {wanted}, and is {got}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a checkpoint that is older than an option
            for name, value in self.defaults.items():
                group.setdefault(name, value)


def counter() -> Tensor:
    """Return a count of steps: float64 on the CPU, which torch's own optimizers can take over."""
    return torch.zeros((), dtype=torch.float64)


def touched(param: Tensor, grad: Tensor, which: Rows) -> tuple[Tensor | None, Tensor]:
    """Return the rows that a step updates, None for all, and their gradients."""
    if grad.is_sparse:
        rows, grads = coalesce(grad._indices()[0], grad._values())
        if which is Rows.ALL:
            every = grads.new_zeros(param.shape)
            return None, every.index_copy_(0, rows, grads)
    elif which is Rows.NONZERO:
        rows = torch.arange(len(param), device=grad.device)
        grads = grad
    else:
        return None, grad
    if which is Rows.NONZERO:
        kept = (grads != 0).reshape(len(rows), math.prod(grads.shape[1:])).any(dim=1)
        rows, grads = rows[kept], grads[kept]
    return rows, grads
