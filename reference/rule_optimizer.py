"""The base class of the optimizers: everything but the rule."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, ParamsT

from keyedopt.reference import saved_groups
from keyedopt.reference.loaded_state import copy_loaded_state
from keyedopt.reference.option_checks import as_plain, check_flags, check_learning_rate, check_range
from keyedopt.reference.rules.options import Rows
from keyedopt.reference.rules.rows import check_rows, update_rows, updated_rows
from keyedopt.reference.step_shapes import check_shapes

#: A rule with its options, and the names of the state tensors that are its arguments and results.
Applied = tuple[Callable[..., tuple[Tensor, ...]], tuple[str, ...]]


class RuleOptimizer(Optimizer):
    """A `torch.optim.Optimizer` that applies one of the rules.

    A dense gradient updates every row of a parameter, a sparse gradient the rows that it lists, unless the
    option `rows` says otherwise. Every other row, and its state, keep their bits. A gradient of infinity or
    NaN changes only the rows that contain it; with `error_if_nonfinite` the step raises RuntimeError before
    anything is written.

    A subclass defines the state before the first step and the rule to apply. `keyedopt.fused` replaces
    `update` (many parameters at once), checks (it reads each device once) and what creates state.
    """

    #: Whether the rule needs rows, so that parameters must be tables (R, D).
    tables_only: ClassVar[bool] = False
    #: The states that have one number for each row; all others but the step count have the parameter's shape.
    row_states: ClassVar[tuple[str, ...]] = ()
    #: The names of `TORCH_OPTIONS` that the torch optimizer of this name has. They are accepted if they have
    #: no effect, and are not part of the groups.
    torch_options: ClassVar[Collection[str]] = ()

    def __init__(
        self, params: ParamsT, lr: float | Tensor, torch_options: Mapping[str, Any] = {}, **options: Any
    ) -> None:
        saved_groups.check_torch_options(torch_options, self.torch_options)
        named = {name: as_plain(value) for name, value in options.items()}
        super().__init__(params, {"lr": lr, **named})

    # --- defined by a subclass --------------------------------------------------------------------

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of `param`, in a `group` with these options, before its first step."""
        raise NotImplementedError

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return the rule for the options of `group` and a `state`; `first`: the state is of this step."""
        raise NotImplementedError

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the option, if one of `group` is out of range. Subclasses extend this."""
        check_learning_rate(group["lr"])
        check_range("weight_decay", group["weight_decay"])
        Rows(group["rows"])
        check_flags(group, "maximize", "error_if_nonfinite")

    # --- new state --------------------------------------------------------------------------------

    def count_device(self, param: Tensor) -> torch.device:
        """Return the device of the step count of a parameter."""
        return torch.device("cpu")

    def count_state(self, param: Tensor) -> Tensor:
        """Return a step count of 0: float64, which torch's own optimizers can load."""
        return torch.zeros((), dtype=torch.float64, device=self.count_device(param))

    def full_state(self, param: Tensor, start: float = 0.0) -> Tensor:
        """Return a state with one number for each element of the parameter."""
        return torch.full_like(param, start, requires_grad=False)

    def row_state(
        self, param: Tensor, *columns: int, start: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a state with one number for each row of the parameter: (rows,), or (rows, columns)."""
        return param.detach().new_full((len(param), *columns), start, dtype=dtype)

    # --- groups -----------------------------------------------------------------------------------

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it lacks are the defaults.

        Raises:
            ValueError: an option is out of range, or a parameter is not of floats or, where the rule needs
                rows, not a table. Nothing is added.
        """
        if isinstance(param_group, dict):
            given = saved_groups.without_torch_options(param_group, self.torch_options)
            param_group = {name: as_plain(value) for name, value in given.items()}
            self.check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            shape = tuple(param.shape)
            if not param.is_floating_point() or (self.tables_only and len(shape) != 2):
                self.param_groups.pop()
                wanted = "a table (rows, width) of floats" if self.tables_only else "of floats"
                raise ValueError(f"every parameter must be {wanted}; one is {shape} of {param.dtype}")

    # --- the step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what the closure returns.

        Raises:
            RuntimeError: a gradient has a layout that the rule cannot use, a gradient or a state does not
                have the shape and device of its parameter, the memory of a tensor was freed, or a gradient
                is not finite and `error_if_nonfinite` is set. Nothing is written.
            ValueError: a sparse gradient lists a row that the parameter does not have. Nothing is written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            saved_groups.rename_torch_options(group, self.torch_options)
        self.check_gradients()
        for group in self.param_groups:
            self.update_group(group)
        return loss

    def check_gradients(self) -> None:
        """Raise what `step` raises if a gradient cannot be used."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.check_gradient(group, param)

    def check_gradient(self, group: Mapping[str, Any], param: Tensor) -> None:
        """Raise what `step` raises if the gradient of a parameter cannot be used."""
        grad = param.grad
        assert grad is not None
        self.check_layout(grad)
        self.check_shapes(param, grad)
        if grad.is_sparse:
            self.check_indices(grad._indices(), param.shape)
        values = grad._values() if grad.is_sparse else grad
        if group["error_if_nonfinite"] and not values.isfinite().all():
            raise RuntimeError("a gradient contains inf or NaN, and error_if_nonfinite is set")

    def check_layout(self, grad: Tensor) -> None:
        """Raise RuntimeError unless a gradient is dense, or sparse COO in its first dimension only."""
        if grad.layout not in (torch.strided, torch.sparse_coo):
            raise RuntimeError(f"a gradient must be dense or sparse COO, not {grad.layout}")
        if grad.is_sparse and grad.sparse_dim() != 1:
            raise RuntimeError(
                f"a sparse gradient must be sparse in its first dimension only, not in {grad.sparse_dim()}"
            )

    def check_shapes(self, param: Tensor, grad: Tensor) -> None:
        """Raise RuntimeError unless a gradient and the state of a parameter have the parameter's shape."""
        check_shapes(param, grad, self.state.get(param, {}), self.row_states)

    def check_indices(self, indices: Tensor, sizes: Sequence[int]) -> None:
        """Raise ValueError unless the indices (dimensions, N) of a sparse gradient are within the sizes."""
        for size, in_dimension in zip(sizes, indices, strict=False):
            check_rows(in_dimension, size, "indices of the gradient")

    def update_group(self, group: dict[str, Any]) -> None:
        """Update the parameters of one group that have a gradient."""
        self.update(group, [(param, param.grad) for param in group["params"] if param.grad is not None])

    def update(self, group: dict[str, Any], gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Update parameters of one group, given with their gradients."""
        for param, grad in gradients:
            self._update(group, param, grad)

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        state = self.state.get(param, {})
        first = not state
        if first:
            state.update(self.initial_state(param, group))
        if first and state:  # as in torch, there is no empty entry
            self.state[param] = state
        if "step" in state and state["step"].ndim == 0:  # a rule increments a count of each row itself
            state["step"] += 1
        if not param.numel():
            return  # a DTensor without elements cannot be reshaped
        # A Python float whatever the dtype of lr: a rule multiplies it by other numbers before the weights.
        rule, names = self.rule({**group, "lr": float(group["lr"])}, state, first)
        tensors = [state[name] for name in names]
        rows, grads = updated_rows(param, grad, Rows(group["rows"]))
        if rows is not None:
            update_rows(rule, param, tensors, rows, grads)
            return
        for tensor, new in zip([param, *tensors], rule(param, grads, *tensors), strict=True):
            if isinstance(tensor, DTensor):  # a table of one row may have been gathered
                new = new.redistribute(None, tensor.placements)  # type: ignore[attr-defined]
            tensor.copy_(new)

    # --- saving and loading -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups as `torch.optim.Optimizer` does, with options as numbers, not strings."""
        saved = super().state_dict()
        saved["param_groups"] = [
            saved_groups.as_saved(group, self.torch_options) for group in saved["param_groups"]
        ]
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load copies of the state tensors, and the options, as `torch.optim.Optimizer` does.

        Raises:
            ValueError: an option is out of range, or the names or shapes of a state do not match this
                optimizer. Nothing is loaded.
        """
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
        if state := self.state.get(param):
            like = torch.empty(param.shape, dtype=param.dtype, device="meta")
            copy_loaded_state(state, self.initial_state(like, group), param.shape, self.count_device(param))

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = [saved_groups.readable_group(group, self.torch_options) for group in state["param_groups"]]
        super().__setstate__({**state, "param_groups": groups})
        self.defaults.pop("differentiable", None)  # which torch adds
        for group in self.param_groups:  # an old checkpoint may lack a new option
            for name, value in self.defaults.items():
                group.setdefault(name, value)
