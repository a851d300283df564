"""Optimizers that accumulate the gradients of several backward passes: those of Rec SDK Torch.

With ``use_accumulate`` each step keeps the gradient that it finds, and each ``accumulate_step``-th applies
one update with the sum of the window, not divided by its length. So N micro-batches equal one batch of
their sum, and counts rise once a window. Without ``use_accumulate`` they are `SGD`, `Adagrad` and `Adam`.

What differs from the vendor's: the window is part of the state, so a checkpoint within it loses nothing; and
the sum is taken once, in float64, over all gradients of the window (see `rules.coalesce`), so its error does
not grow with their number, which the document bounds to 10,000 for a precision of 0.01 %.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.optimizers import SGD, Adagrad, Adam
from keyedopt.reference.rule_optimizer import RuleOptimizer
from keyedopt.reference.rules import coalesce
from keyedopt.reference.window import Window

__all__ = ["AccumulateAdagrad", "AccumulateAdam", "AccumulateSGD"]


class Accumulating(RuleOptimizer):
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
        flag, step = group["use_accumulate"], group["accumulate_step"]
        if not isinstance(flag, bool):
            raise TypeError(f"use_accumulate must be True or False, not {flag!r}")
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise ValueError(f"accumulate_step must be an integer of at least 1, not {step!r}")
        if flag and group.get("dampening"):
            raise ValueError(
                "dampening must be 0 with use_accumulate, which makes state before the first update"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its window options."""
        self.defaults.update({**self._window_options, **self.defaults})
        super().add_param_group(param_group)

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
        if not group["use_accumulate"]:
            super()._update(group, param, grad)
            return
        state = self.state[param]
        if "window" not in state:
            for name, value in self.initial_state(param, group).items():
                state.setdefault(name, value)
            state["window"] = Window(param)
        window: Window = state["window"]
        rows, grads = _listed(grad)
        if window.count + 1 < group["accumulate_step"]:
            window.add(rows, grads)
            return
        total = _total(param, grad.is_sparse, *coalesce(*window.with_(rows, grads)))
        super()._update(group, param, total)
        window.clear()

    # --- saving and loading: a window is saved as a dictionary of tensors -------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a window is ``{"rows", "gradients", "count"}``."""
        saved = super().state_dict()
        saved["state"] = {key: _shown(entry) for key, entry in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; a window that does not fit, or is not used, is refused (nothing is changed)."""
        entries = state_dict["state"]
        windows = {key: entry["window"] for key, entry in entries.items() if "window" in entry}
        rest = {
            key: {name: entry[name] for name in entry if name != "window"} for key, entry in entries.items()
        }
        before = self.state, self.param_groups
        try:
            super().load_state_dict({**state_dict, "state": rest})
            for number, (group, param) in enumerate(self._numbered()):
                if number in windows:
                    if not group["use_accumulate"]:
                        raise ValueError("there are gradients in a window, and use_accumulate is False")
                    window = Window(param)
                    window.load_state_dict(windows[number])
                    self.state[param]["window"] = window
        except Exception:
            self.state, self.param_groups = before
            raise

    def _numbered(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, param) for group in self.param_groups for param in group["params"]]


class AccumulateSGD(Accumulating, SGD):
    """`SGD` over windows of backward passes."""


class AccumulateAdagrad(Accumulating, Adagrad):
    """`Adagrad` over windows of backward passes."""


class AccumulateAdam(Accumulating, Adam):
    """`Adam` over windows of backward passes."""


def _listed(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return row numbers, with repetitions, and their gradients."""
    if grad.is_sparse:
        return grad._indices()[0], grad._values()
    grad = grad.reshape(1) if grad.ndim == 0 else grad
    return torch.arange(len(grad), device=grad.device), grad


def _total(param: Tensor, sparse: bool, rows: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient of a window, in the layout of its last."""
    if sparse:
        return torch.sparse_coo_tensor(rows[None], grads, param.shape, check_invariants=False)
    dense = grads.new_zeros(tuple(param.shape) or (1,))
    return dense.index_copy_(0, rows, grads).reshape(param.shape)


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() if isinstance(value, Window) else value for name, value in entry.items()}
