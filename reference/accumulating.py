"""The window of gradients that accumulation adds to an optimizer."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.rule_optimizer import RuleOptimizer
from keyedopt.reference.window import Window

__all__ = ["Accumulating"]


class Accumulating(RuleOptimizer):
    """The options and the state that accumulation adds to an optimizer: a `Window` for each parameter.

    Args:
        params: parameters, or groups of parameters.
        arguments: positional arguments of the optimizer.
        use_accumulate: whether to accumulate; without, ``accumulate_step`` is ignored.
        accumulate_step: the number of steps in a window.
        options: keyword arguments of the optimizer.

    Raises:
        TypeError: ``use_accumulate`` is not a bool.
        ValueError: another option is out of range.
    """

    #: Stores the gradients of an unfinished window.
    window_type: ClassVar[type[Window]] = Window

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
        """Raise what the constructor raises if an option is out of range."""
        super().check_options(group)
        flag, step = group["use_accumulate"], group["accumulate_step"]
        if not isinstance(flag, bool):
            raise TypeError(f"use_accumulate must be True or False, not {flag!r}")
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise ValueError(f"accumulate_step must be an integer of at least 1, not {step!r}")
        if flag and group.get("dampening"):
            raise ValueError(
                "dampening must be 0 with use_accumulate, because state is created before the first update"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its window options; see `RuleOptimizer.add_param_group`."""
        given = vars(self).get("_window_options", {})  # a copy of the optimizer has them in its defaults
        for name, value in given.items():
            self.defaults.setdefault(name, value)
        super().add_param_group(param_group)

    def check_shapes(self, param: Tensor, grad: Tensor) -> None:
        """Raise RuntimeError unless gradient, state and window have the shape of a parameter."""
        super().check_shapes(param, grad)
        window = self.state.get(param, {}).get("window")
        if window is not None and not window.fits(_local(param)):
            raise RuntimeError(f"the window of a parameter does not have its shape, {tuple(param.shape)}")

    def update_group(self, group: dict[str, Any]) -> None:
        """Store the gradients of one group; update the parameters whose window is full now."""
        if not group["use_accumulate"]:
            super().update_group(group)
            return
        found = [(param, self._total(group, param)) for param in group["params"] if param.grad is not None]
        full = [(param, total) for param, total in found if total is not None]
        self.update(group, full)
        for param, _ in full:
            self.state[param]["window"].clear()

    def _total(self, group: Mapping[str, Any], param: Tensor) -> Tensor | None:
        """Return the sum of a window that this gradient fills; else store the gradient and return None.

        The window of a `DTensor` has the gradients of its local shard.
        """
        state, spread = self.state[param], param.grad
        assert spread is not None
        grad, local = _local(spread), _local(param)
        if "window" not in state:
            for name, value in self.initial_state(param, group).items():
                state.setdefault(name, value)
            state["window"] = self.window_type(local)
        window: Window = state["window"]
        rows, grads = (grad._indices()[0], grad._values()) if grad.is_sparse else (None, grad)
        if window.count + 1 < group["accumulate_step"]:
            window.add(rows, grads)
            return None
        rows, sums = window.total(rows, grads)
        if grad.is_sparse:
            return torch.sparse_coo_tensor(rows[None], sums, param.shape, check_invariants=False)
        if sums.numel() != local.numel():  # or else every row, in order
            sums = sums.new_zeros(tuple(local.shape) or (1,)).index_copy_(0, rows, sums)
        total = sums.reshape(local.shape)
        if not isinstance(spread, DTensor):
            return total
        shape, stride, where = spread.shape, spread.stride(), (spread.device_mesh, spread.placements)
        return DTensor.from_local(total, *where, run_check=False, shape=shape, stride=stride)

    # --- saving and loading: a window is saved as a dictionary of tensors -------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a window is ``{"rows", "gradients", "count"}``."""
        saved = super().state_dict()
        saved["state"] = {key: _with_plain_window(entry) for key, entry in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with its windows; see `RuleOptimizer.load_state_dict`.

        Raises:
            ValueError: also if a window does not fit its parameter, or ``use_accumulate`` is False. Nothing
                is loaded.
        """
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
                        raise ValueError("a window has gradients, but use_accumulate is False")
                    window = self.window_type(_local(param))
                    window.load_state_dict(windows[number])
                    self.state[param]["window"] = window
        except Exception:
            self.state, self.param_groups = before
            raise

    def _numbered(self) -> list[tuple[dict[str, Any], Tensor]]:
        return [(group, param) for group in self.param_groups for param in group["params"]]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_plain_window(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() if isinstance(value, Window) else value for name, value in entry.items()}
