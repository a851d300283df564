"""Optimizers that accumulate the gradients of several backward passes: those of Rec SDK Torch.

With ``use_accumulate`` each step keeps the gradient that it finds, and each ``accumulate_step``-th applies
one update with the sum of the window, not divided by its length. So N micro-batches equal one batch of
their sum, and counts rise once a window. Without ``use_accumulate`` they are `SGD`, `Adagrad` and `Adam`.

What differs from the vendor's: the window is part of the state, so a checkpoint within it loses nothing; and
it keeps each row once, with a sum in float64, so that neither its memory nor its error grows with the
number of gradients.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.fused.optimizers import SGD, Adam
from keyedopt.fused.row_optimizer import RowOptimizer
from keyedopt.fused.rowwise_adagrad import Adagrad
from keyedopt.fused.sparse.window import Window

__all__ = ["AccumulateAdagrad", "AccumulateAdam", "AccumulateSGD"]


class Accumulating(RowOptimizer):
    """What is added to an optimizer: the option, and a `Window` in the state of each parameter.

    Args:
        params: parameters or groups.
        use_accumulate: whether to accumulate; if not, ``accumulate_step`` is ignored.
        accumulate_step: how many steps make a window.
        arguments: those of the optimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        *arguments: Any,
        use_accumulate: bool = False,
        accumulate_step: int = 1,
        **options: Any,
    ) -> None:
        self._window_options = {"use_accumulate": use_accumulate, "accumulate_step": accumulate_step}
        super().__init__(params, *arguments, **options)

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range.

        Raises:
            TypeError: ``use_accumulate`` is no bool.
            ValueError: ``accumulate_step`` is no integer of at least 1; or what no window can have.
        """
        super().check_options(group)
        accumulates, steps = group["use_accumulate"], group["accumulate_step"]
        if not isinstance(accumulates, bool):
            raise TypeError(f"use_accumulate must be True or False, not {accumulates!r}")
        if type(steps) is not int or steps < 1:
            raise ValueError(f"accumulate_step must be an integer of at least 1, not {steps!r}")
        if accumulates and group.get("dampening"):
            raise ValueError(
                "dampening must be 0 with use_accumulate, which makes state before the first update"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its window options."""
        for name, value in self._window_options.items():
            self.defaults.setdefault(name, value)
        super().add_param_group(param_group)

    def gradient(self, group: dict[str, Any], param: Tensor) -> Tensor | None:
        """Return the sum of a window that is full now; where it is not, keep the gradient and return None."""
        grad = super().gradient(group, param)
        if grad is None or not group["use_accumulate"]:
            return grad
        state = self.state[param]
        if "window" not in state:
            for name, value in self.initial_state(param, group).items():
                state.setdefault(name, value)
            state["window"] = Window(param)
        window: Window = state["window"]
        rows, grads = (grad._indices()[0], grad._values()) if grad.is_sparse else (None, grad)
        if window.count + 1 < group["accumulate_step"]:
            window.add(rows, grads)
            return None
        rows, total = window.rounded(rows, grads)
        if grad.is_sparse:
            return torch.sparse_coo_tensor(rows[None], total, param.shape, check_invariants=False)
        if total.numel() == param.numel():  # every row
            return total.reshape(param.shape)
        return total.new_zeros(tuple(param.shape) or (1,)).index_copy_(0, rows, total).reshape(param.shape)

    def update(self, group: dict[str, Any], given: list[tuple[Tensor, Tensor]]) -> None:
        """Update, and begin the next windows."""
        super().update(group, given)
        if group["use_accumulate"]:
            for param, _ in given:
                self.state[param]["window"].clear()

    # --- saving and loading: a window is saved as a dictionary of tensors -------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a window is ``{"rows", "gradients", "count"}``."""
        saved = super().state_dict()
        saved["state"] = {
            key: {
                name: value.state_dict() if isinstance(value, Window) else value
                for name, value in entry.items()
            }
            for key, entry in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; a window that does not fit, or is not used, is refused (nothing is changed)."""
        entries = state_dict["state"]
        rest = {
            key: {name: value for name, value in entry.items() if name != "window"}
            for key, entry in entries.items()
        }
        before = self.state, self.param_groups
        try:
            super().load_state_dict({**state_dict, "state": rest})
            params = [(group, param) for group in self.param_groups for param in group["params"]]
            for number, (group, param) in enumerate(params):
                if "window" not in entries.get(number, {}):
                    continue
                if not group["use_accumulate"]:
                    raise ValueError("there are gradients in a window, and use_accumulate is False")
                window = self.state[param]["window"] = Window(param)
                window.load_state_dict(entries[number]["window"])
        except Exception:
            self.state, self.param_groups = before
            raise


class AccumulateSGD(Accumulating, SGD):
    """`SGD` over windows of backward passes."""


class AccumulateAdagrad(Accumulating, Adagrad):
    """`Adagrad` over windows of backward passes."""


class AccumulateAdam(Accumulating, Adam):
    """`Adam` over windows of backward passes."""
