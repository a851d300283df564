"""Helpers for cases of several devices: the other device, copies of parameters there, what is where."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.device import the_device


def other_device(which: str) -> torch.device:
    """Return the CPU, or another index of the device under test; without one the case cannot run."""
    if which == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(the_device())
    if module.device_count() < 2:
        raise CannotRun(f"needs a second device {the_device().type}")
    return torch.device(the_device().type, ((the_device().index or 0) + 1) % module.device_count())


def copied_to(device: torch.device, params: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
    """Make equal parameters, with equal gradients, on another device."""
    made = {}
    for key, param in params.items():
        made[key] = torch.nn.Parameter(param.detach().to(device, copy=True))
        made[key].grad = None if param.grad is None else param.grad.detach().to(device, copy=True)
    return made


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested structure."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


def elsewhere(tree: Any, device: torch.device) -> list[str]:
    """Return the devices of tensors that are not on a device; a step count may be on the CPU."""
    kinds = {str(tensor.device) for tensor in tensors_in(tree) if tensor.numel() > 1}
    here = str(torch.empty(0, device=device).device)
    return sorted(kinds - {here})
