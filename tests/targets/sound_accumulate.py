"""Sound accumulating optimizers that are unlike the reference: a window is three tensors like the table.

The gradients of a window are added up in float64, in a tensor of the size of the table, beside a mark for
each row that had one and a count of steps; all of that is state under names of its own.
"""

from typing import Any

import sound_algorithms
import torch


class Window:
    """What is added to an optimizer."""

    defaults: Any
    state: Any
    param_groups: Any

    def __init__(
        self, params: Any, *given: Any, use_accumulate: Any = False, accumulate_step: Any = 1, **options: Any
    ) -> None:
        self._window = {"use_accumulate": use_accumulate, "accumulate_step": accumulate_step}
        super().__init__(params, *given, **options)

    def add_param_group(self, param_group: Any) -> None:
        self.defaults.update({**self._window, **self.defaults})
        super().add_param_group(param_group)  # type: ignore[misc]

    def check(self, group: Any) -> None:
        if float(group["lr"]) < 0:
            raise ValueError(f"Invalid learning rate: {group['lr']}")
        super().check(group)  # type: ignore[misc]
        if group["use_accumulate"] is not True and group["use_accumulate"] is not False:
            raise TypeError("use_accumulate: a switch")
        if type(group["accumulate_step"]) is not int or group["accumulate_step"] < 1:
            raise ValueError("accumulate_step: steps")

    def update(self, group: Any, param: Any, grad: Any, place: int) -> None:
        if not group["use_accumulate"]:
            super().update(group, param, grad, place)  # type: ignore[misc]
            return
        state = self.state[param]
        if "pending_sum" not in state:
            state["pending_sum"] = torch.zeros(param.shape, dtype=torch.float64)
            state["pending_rows"] = torch.zeros(len(param), dtype=torch.bool)
            state["pending_steps"] = torch.zeros((), dtype=torch.int64)
        if grad.is_sparse:
            rows = grad._indices()[0]
            state["pending_sum"].index_add_(0, rows, grad._values().double())
            state["pending_rows"][rows] = True
        else:
            state["pending_sum"] += grad
            state["pending_rows"].fill_(True)
        state["pending_steps"] += 1
        if int(state["pending_steps"]) < group["accumulate_step"]:
            if group.get("momentum"):
                state.setdefault("momentum_buffer", torch.zeros_like(param, requires_grad=False))
            return
        kind = torch.promote_types(param.dtype, torch.float32)
        summed = state["pending_sum"].to(kind)
        if grad.is_sparse:
            rows = state["pending_rows"].nonzero().t()
            summed = torch.sparse_coo_tensor(rows, summed[rows[0]], param.shape, check_invariants=False)
        super().update(group, param, summed, place)  # type: ignore[misc]
        for name in ("pending_sum", "pending_rows", "pending_steps"):
            state[name].zero_()

    def load_state_dict(self, state_dict: Any) -> None:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [(group, param) for group in self.param_groups for param in group["params"]]
        waiting = {}
        for key, (_, param) in zip(keys, params, strict=False):
            entry = state_dict["state"].get(key, {})
            found = [name for name in entry if name.startswith("pending")]
            if not found:
                continue
            if len(found) != 3:
                raise ValueError("part of the pending gradients is missing")
            total, rows, steps = entry["pending_sum"], entry["pending_rows"], entry["pending_steps"]
            if total.shape != param.shape or rows.shape != (len(param),) or int(steps) < 0:
                raise ValueError("pending gradients of something else")
            waiting[key] = [value.clone() for value in (total, rows, steps)]
        for group in state_dict["param_groups"]:
            pending = any(int(waiting[key][2]) for key in group["params"] if key in waiting)
            if pending and not group["use_accumulate"]:
                raise ValueError("gradients are pending, which nobody waits for")
        super().load_state_dict(state_dict)  # type: ignore[misc]
        for key, (_, param) in zip(keys, params, strict=True):
            if key in waiting:
                names = ("pending_sum", "pending_rows", "pending_steps")
                self.state[param].update(zip(names, waiting[key], strict=True))


class AccumulateSGD(Window, sound_algorithms.SGD):
    pass


class AccumulateAdagrad(Window, sound_algorithms.Adagrad):
    pass


class AccumulateAdam(Window, sound_algorithms.Adam):
    pass


class AccumulateRowWiseAdagrad(Window, sound_algorithms.RowWiseAdagrad):
    pass


class AccumulateAdamW(Window, sound_algorithms.AdamW):
    pass
