"""Helpers for cases of optimizers in the backward pass, and ordinary training to compare with."""

import warnings
from typing import Any

import torch

from keyedopt.conformance.suite.support.device import zeros
from keyedopt.conformance.suite.support.inputs import parameter

#: What to compile. With a backward pass in a step, later compilations of torch 2.11 sometimes crash.
COMPILED = ["model"] if torch.__version__ < "2.12" else ["model", "step"]


def apply_in_backward(impl: Any, kind: Any, params: Any, options: Any = None) -> Any:
    """Apply an optimizer in the backward pass, and ignore deprecation warnings of the function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return impl.apply_optimizer_in_backward(kind, params, {"lr": 0.25} if options is None else options)


def optimizers_of(param: Any) -> list[Any]:
    """Return the optimizers of a parameter, from the attribute that torch and torchrec use."""
    return list(getattr(param, "_in_backward_optimizers", []))


def quadratic_loss(*params: Any, seed: int = 1) -> torch.Tensor:
    """Make a loss with a different gradient for each element and seed."""
    total = zeros((), dtype=params[0].dtype)
    for index, param in enumerate(params):
        factors = parameter(*param.shape, seed=seed + 10 * index).detach().to(param.dtype)
        total = total + (param * factors).sum() + (param * param).sum() / 2
    return total


def train_by_hand(kind: Any, params: Any, steps: int = 1, seed: int = 1, **options: Any) -> None:
    """Train the ordinary way: backward, step, zero_grad."""
    optimizer = kind(list(params), **options)
    for step in range(steps):
        quadratic_loss(*params, seed=seed + step).backward()
        optimizer.step()
        optimizer.zero_grad()


def leaf_copies(*params: Any) -> list[Any]:
    """Make copies of parameters as leaf tensors."""
    return [param.detach().clone().requires_grad_() for param in params]
