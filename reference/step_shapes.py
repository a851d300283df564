"""Check that what a step reads and writes goes with its parameter."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.memory import check_memory


def check_shapes(param: Tensor, grad: Tensor, state: Mapping[str, Any], row_states: Collection[str]) -> None:
    """Raise RuntimeError unless a gradient and the state of a parameter have its shape, device and memory.

    A parameter that was replaced through ``.data``, or a state that was replaced, may have others.

    Args:
        param: the parameter.
        grad: its gradient.
        state: its state; the step count is one number, or one for each row.
        row_states: the names of states with one number for each row.
    """
    shape = param.shape
    if grad.shape != shape:
        raise RuntimeError(f"a gradient is {tuple(grad.shape)}, but its parameter {tuple(shape)}")
    for tensor in (param, *((grad._indices(), grad._values()) if grad.is_sparse else (grad,))):
        check_memory(tensor)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            if name != "window" and not (name == "step" and type(value) is int):  # the count of SparseAdam
                raise RuntimeError(f"the state {name!r} must be a tensor, not a {type(value).__name__}")
            continue
        if name == "step":
            fits = not value.ndim or value.shape == shape[:1]
        elif name in row_states:
            fits = value.shape[:1] == shape[:1] and value.numel() == len(param)
        else:
            fits = value.shape == shape
        if not fits:
            raise RuntimeError(
                f"the state {name!r} is {tuple(value.shape)}, which does not fit its parameter "
                f"{tuple(shape)}: a parameter of another size needs a new optimizer"
            )
        elsewhere = value.device != param.device and not (name == "step" and value.is_cpu)
        if elsewhere or value.layout is not torch.strided:
            raise RuntimeError(
                f"the state {name!r} is {value.layout} on {value.device}, but its parameter is on "
                f"{param.device}: move the state to the parameter as a strided tensor"
            )
        check_memory(value)
