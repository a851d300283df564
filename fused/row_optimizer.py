"""What the dense and sparse optimizers share: options, state, and how a step reaches the fast kernels."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from keyedopt.fused.backends.interface import ALGORITHMS, Step
from keyedopt.fused.dense import cpu_fast_path, dense_step
from keyedopt.fused.dense.initial_state import count_device
from keyedopt.fused.dense.step_hooks import surround
from keyedopt.fused.option_checks import check_flags, check_range, check_rate, plain
from keyedopt.fused.sparse import sparse_step
from keyedopt.reference.rules.options import Rows

#: The options of a group that are numbers of a `Step` of the same name.
NUMBERS = ("eps", "weight_decay", "momentum", "dampening", "nesterov", "eta", "lr_decay", "max_norm")


class RowOptimizer(Optimizer):
    """A `torch.optim.Optimizer` of one of the algorithms that backends know.

    A dense gradient updates every row of a parameter, a sparse one the rows that it lists, unless the
    option `rows` says otherwise; every other row, and its state, keep their bits. A gradient of infinity or
    NaN spoils the rows it is in and no others; with `error_if_nonfinite` the step is refused, with a
    RuntimeError and before anything is written.

    A subclass names the algorithm and gives the state at its start. The embedding modules take from it what
    their tables need: `check_options`, `initial_state` and `make_step`.
    """

    #: A key of `ALGORITHMS`.
    algorithm: ClassVar[str]
    #: Whether the algorithm needs rows, so that parameters must be tables (R, D).
    tables_only: ClassVar[bool] = False
    #: Set by a class itself, and not by the one that it extends, whose steps `quick_steps` may do.
    quick: ClassVar[bool]
    #: What every gradient is divided by as long as it is set, a tensor of one number on the device: so that
    #: clipping needs no pass over memory of its own. Some kernels overwrite dense ones by the quotient.
    grad_scale: Tensor

    def __init__(self, params: ParamsT, lr: float | Tensor, **options: Any) -> None:
        super().__init__(params, {"lr": lr} | {name: plain(value) for name, value in options.items()})

    # --- what backends need ---------------------------------------------------------------------

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter before its first step, in the parameter's dtype."""
        raise NotImplementedError

    def state_names(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the state tensors, in the order in which backends take them."""
        return ALGORITHMS[self.algorithm]

    def make_step(self, group: Mapping[str, Any], count: int | Tensor = 1, first: bool = False) -> Step:
        """Return what a backend is to do for the parameters of a group.

        Args:
            group: the options, as they are now.
            count: t, from 1, of the step that is about to be done.
            first: whether the state is at its start.
        """
        options = {name: group[name] for name in NUMBERS if name in group}
        options |= {name: plain(group[name]) for name in ("decay", "eps_placement") if name in group}
        if "betas" in group:
            options["betas"] = tuple(group["betas"])
        lr = group["lr"]
        if isinstance(lr, Tensor):  # on the CPU it can be read; elsewhere to read it would synchronize
            lr = float(lr) if lr.device.type == "cpu" else lr.detach().reshape(())
        return Step(self.algorithm, lr=lr, count=count, first=first, maximize=group["maximize"], **options)

    # --- arguments ------------------------------------------------------------------------------

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range, with a ValueError that names the option; extended by subclasses."""
        check_rate(group["lr"])
        check_range("weight_decay", group["weight_decay"])
        Rows(group["rows"])
        check_flags(group, "maximize", "error_if_nonfinite")

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refused as a whole where an option or a parameter is."""
        if isinstance(param_group, dict):
            param_group = {name: plain(value) for name, value in param_group.items()}
            self.check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        wanted = "a table (rows, width) of floats" if self.tables_only else "of floats"
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point() or (self.tables_only and param.ndim != 2):
                self.param_groups.pop()
                raise ValueError(
                    f"every parameter must be {wanted}; one is {tuple(param.shape)} of {param.dtype}"
                )

    # --- the step -------------------------------------------------------------------------------

    profile_hook_step = staticmethod(surround)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what the closure does."""
        if closure is None and cpu_fast_path.step(self):
            return None
        return self._step(closure)

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Do a step whatever is asked for."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # all of them, before anything is written
            for param in group["params"]:
                if param.grad is not None:
                    self.check_gradient(group, param)
        for group in self.param_groups:
            found = [(param, self.gradient(group, param)) for param in group["params"]]
            self.update(group, [(param, grad) for param, grad in found if grad is not None])
        return loss

    def check_gradient(self, group: Mapping[str, Any], param: Tensor) -> None:
        """Refuse a gradient that the algorithm cannot take, before any parameter is updated."""
        sparse_step.check_gradient(param, group["error_if_nonfinite"])

    def gradient(self, group: dict[str, Any], param: Tensor) -> Tensor | None:
        """Return the gradient to step with, None for no step; who accumulates extends it."""
        return param.grad

    def update(self, group: dict[str, Any], given: list[tuple[Tensor, Tensor]]) -> None:
        """Update some parameters of a group by their gradients."""
        alike: dict[Any, list[dense_step.Work]] = {}
        on_devices: list[Tensor] = []
        listed: dict[Tensor, int] = {}
        for param, grad in given:
            state = self.state[param]
            first = not state
            if first:
                state.update(self.initial_state(param, group))
            count: Any = state.get("step")
            if not isinstance(count, Tensor) or count.ndim:  # none, or one a row, which the backend moves
                count = 1
            elif count.device.type == "cpu":
                count += 1
                count = int(count)
            else:
                on_devices.append(count)
                count = None
            # A parameter that is listed again is updated again, and not at the same time.
            again = listed[param] = listed.get(param, -1) + 1
            key = (count, first, self.state_names(state), again)
            alike.setdefault(key, []).append((param, grad, state))
        if on_devices:
            torch._foreach_add_(on_devices, 1)
        for (count, first, names, _), work in alike.items():
            if count is None:
                count = work[0][2]["step"]
            self.update_alike(self.make_step(group, count, first), work, names, Rows(group["rows"]))

    def update_alike(
        self, step: Step, work: list[dense_step.Work], names: tuple[str, ...], which: Rows
    ) -> None:
        """Update parameters by one step, those with a sparse gradient through a backend."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        whole = [item for item in work if not item[1].is_sparse and which is not Rows.NONZERO]
        listed = [item for item in work if item[1].is_sparse or which is Rows.NONZERO]
        if scale is not None:
            listed = [(param, sparse_step.divided(grad, scale), state) for param, grad, state in listed]
        if whole:
            dense_step.update(step, whole, names, scale)
        if isinstance(step.count, Tensor):
            for item in listed:
                sparse_step.update(replace(step, count=item[2]["step"]), [item], names, which)
        elif listed:
            sparse_step.update(step, listed, names, which)

    # --- loading --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but copy, and refuse as a whole bad options and state of another shape."""
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                self.check_options({**self.defaults, **group})
                for param in group["params"]:
                    if self.state.get(param):
                        self.state[param] = self._checked(param, group, self.state[param])
        except Exception:
            self.state, self.param_groups = before
            raise

    def _checked(self, param: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the state, for torch shares it with what is loaded; a None is torch's nothing."""
        like = torch.empty(param.shape, dtype=param.dtype, device="meta")
        wanted = {name: tuple(value.shape) for name, value in self.initial_state(like, group).items()}
        copied = {name: torch.as_tensor(value).clone() for name, value in state.items() if value is not None}
        if "step" in copied and copied["step"].ndim == 0:
            copied["step"] = copied["step"].to(count_device(param))
        got = {name: tuple(value.shape) for name, value in copied.items()}
        if got != wanted:
            raise ValueError(f"the state of a parameter {tuple(param.shape)} must be {wanted}, and is {got}")
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of a checkpoint that is older than an option
            for name, value in self.defaults.items():
                group.setdefault(name, value)
