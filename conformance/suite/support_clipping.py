"""What the cases of clipping share: parameters with given gradients."""

from typing import Any

import torch


def zeros_with_grads(*grads: list[float]) -> dict[str, Any]:
    """Make parameters of zeros with these gradients."""
    params: dict[str, Any] = {}
    for index, grad in enumerate(grads):
        params[f"p{index}"] = torch.nn.Parameter(torch.zeros(len(grad)))
        params[f"p{index}"].grad = torch.tensor(grad)
    return params
