"""Rounding of weights to half precision: to nearest, or stochastically."""

import math

import torch
from torch import Tensor


def round_into(weight: Tensor, values: Tensor, seed: int | None) -> None:
    """Write values of float32 into a weight.

    Args:
        weight: float16 or bfloat16.
        values: as `weight`, in float32.
        seed: None rounds to nearest; otherwise a value between two numbers becomes either of them, with
            probabilities such that the mean is the value: an update that is too small to change the weight in
            one step changes it over many. The same seed gives the same result.
    """
    if seed is None:
        weight.copy_(values)
        return
    info = torch.finfo(weight.dtype)
    draws = _uniform(values, seed)
    # The float32 spacings in one spacing of the weight's dtype: sums of draws on that grid are exact.
    steps = info.eps * 2**23
    draws = draws.mul_(steps).floor_().div_(steps)
    exponent = torch.frexp(values).exponent.sub_(1).clamp_(min=math.frexp(info.tiny)[1] - 1)
    spacing = torch.ldexp(torch.full_like(values, info.eps), exponent)
    rounded = values.div(spacing).add_(draws).floor_().mul_(spacing).clamp_(-info.max, info.max)
    weight.copy_(torch.where(values.abs() <= info.max, rounded, values))


def _uniform(like: Tensor, seed: int) -> Tensor:
    """Draw on the device, or on the CPU for a device that has no generators."""
    try:
        generator = torch.Generator(like.device)
    except RuntimeError:
        return _uniform(torch.empty_like(like, device="cpu"), seed).to(like.device)
    generator.manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)
