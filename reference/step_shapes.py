"""Check that what a step reads and writes has the shape of its parameter."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor


def check_shapes(param: Tensor, grad: Tensor, state: Mapping[str, Any], row_states: Collection[str]) -> None:
    """Raise RuntimeError unless a gradient and the state of a parameter have the parameter's shape.

    A parameter that was replaced through ``.data``, or a state that was replaced, may have another one.

    Args:
        param: the parameter.
        grad: its gradient.
        state: its state; the step count is one number, or one for each row.
        row_states: the names of states with one number for each row.
    """
    shape = param.shape
    if grad.shape != shape:
        raise RuntimeError(f"a gradient is {tuple(grad.shape)}, but its parameter {tuple(shape)}")
    for name, value in state.items():
        if not isinstance(value, Tensor):
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
