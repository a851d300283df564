"""Scale and clamp many gradients in place. On CUDA nothing synchronizes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: What the kernel of `GradScaler` scales; on CUDA it lacks bfloat16.
_SCALED = (torch.float16, torch.float32)
_SCALED_ON_CPU = (*_SCALED, torch.bfloat16)


def clipping_factor(norm: Tensor, bound: float) -> Tensor:
    """Return ``min(1, bound / (norm + 1e-6))``."""
    return (bound / (norm + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def scale_all(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply by one factor of float32 or float64, and round once; in float16 a small factor would be 0."""
    for (device, dtype), some in _by_kind(tensors).items():
        one_pass = dtype in _SCALED
        if device.type == "cpu":
            number = float(factor)
            if number == 1.0:
                continue
            one_pass = dtype in _SCALED_ON_CPU
            if dtype is torch.float32 and not 1e-30 < number < 1.0:  # round only the product
                one_pass = False
        if one_pass:  # and the float32 factor stays on the device
            inf = torch.zeros(1, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(some, inf, factor.to(device, torch.float32))
            continue
        wide = torch.promote_types(dtype, factor.dtype)
        for part in [[tensor] for tensor in some] if device.type == "cpu" else [some]:
            products = [tensor.to(wide) for tensor in part]
            torch._foreach_mul_(products, factor.to(device, wide))
            torch._foreach_copy_(part, products)


@torch.no_grad()
def clamp_all(tensors: Iterable[Tensor], bound: float) -> None:
    """Limit every element to [-bound, bound]; NaN stays."""
    for (device, _), some in _by_kind(tensors).items():
        if device.type == "cpu":  # one pass for each tensor, not two
            for tensor in some:
                tensor.clamp_(-bound, bound)
        else:
            torch._foreach_clamp_min_(some, -bound)
            torch._foreach_clamp_max_(some, bound)


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds
