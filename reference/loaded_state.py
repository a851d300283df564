"""The state of one parameter, after torch has loaded it into an optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def copy_loaded_state(
    state: dict[str, Any], initial: Mapping[str, Tensor], shape: torch.Size, count_device: torch.device
) -> None:
    """Replace loaded values by copies, and check their names and shapes.

    Args:
        state: the loaded state of the parameter, changed in place. torch shares its tensors with the
            checkpoint.
        initial: a new state of the same parameter, on any device; only names and shapes are read.
        shape: the shape of the parameter, for the error message.
        count_device: the device of the step count.

    Raises:
        ValueError: the names or the shapes differ from those of the new state.
    """
    for name, value in list(state.items()):
        if value is None:  # torch saves None for a missing momentum buffer
            del state[name]
        else:
            state[name] = torch.as_tensor(value).clone()
    wanted = {name: tuple(value.shape) for name, value in initial.items()}
    got = {name: tuple(value.shape) for name, value in state.items()}
    if got != wanted:
        raise ValueError(f"the state of a parameter {tuple(shape)} must be {wanted}, and is {got}")
    if "step" in state and state["step"].ndim == 0:
        state["step"] = state["step"].to(count_device)
