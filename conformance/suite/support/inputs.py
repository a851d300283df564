"""Deterministic inputs of the cases: parameters, gradients, and optimizers built from literals."""

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.described import entries_of
from keyedopt.conformance.suite.support.device import seed_torch, the_device

#: Whether kernels run in Triton's interpreter, which takes minutes for a million sums.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: The attribute of a parameter that the case does not know of: see `situations`.
MARK = "beside_the_case"


def _numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Make fixed, distinct numbers in (-1, 1) that are the same on every machine and version."""
    return (_fractions(math.prod(shape), seed) * 2 - 1).reshape(tuple(shape))


@functools.lru_cache(maxsize=1024)
def _fractions(count: int, seed: int) -> torch.Tensor:
    """Return fixed, distinct numbers in [0, 1); the caller must not change the tensor, which is cached."""
    index = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    return (index * 0.6180339887 + seed * 0.7548776662).frac()


def parameter(*shape: int, dtype: str = "float32", device: Any = None, seed: int = 0) -> torch.nn.Parameter:
    """Make a parameter with fixed values in (-1, 1)."""
    return torch.nn.Parameter(_numbers(shape, seed).to(device or the_device(), getattr(torch, dtype)))


def parameters(
    n: int = 2, shape: Sequence[int] = (3,), dtype: str = "float32", device: Any = None
) -> dict[str, torch.nn.Parameter]:
    """Make ``n`` parameters with the keys ``p0``, ``p1``, …"""
    return {f"p{index}": parameter(*shape, dtype=dtype, device=device, seed=index) for index in range(n)}


def _listed(params: Any) -> list[torch.Tensor]:
    return list(params.values()) if isinstance(params, Mapping) else list(params)


def layouts(start: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return copies of a weight whose elements are in another order, or apart, in memory."""
    yield "a transposed", start.t().contiguous().t()
    yield "a spaced", torch.stack([start, start], dim=-1)[..., 0]


def set_grads(params: Any, seed: int = 1, scale: float = 1.0) -> None:
    """Give gradients as `give_grads` does; a repetition of the step draws the same random numbers."""
    seed_torch(seed)
    give_grads(params, seed, scale)


def give_grads(params: Any, seed: int = 1, scale: float = 1.0) -> None:
    """Give every parameter (of a mapping or a list) a fixed dense gradient in (-scale, scale)."""
    for index, param in enumerate(_listed(params)):
        fixed = _numbers(param.shape, 101 * seed + index) * scale
        param.grad = fixed.to(param.device, param.dtype)


def set_wide_grads(params: Any, seed: int = 1) -> None:
    """Give every parameter a fixed dense gradient that also has very large and small elements."""
    for index, param in enumerate(_listed(params)):
        fixed = _numbers(param.shape, 101 * seed + index) * wide(param.numel()).reshape(param.shape)
        param.grad = fixed.to(param.device, param.dtype)


def wide(count: int) -> torch.Tensor:
    """Return factors for a gradient: what limits its elements, from above or below, changes some of them."""
    return torch.tensor([(1.0, 2.0**10, 2.0**-20)[index % 3] for index in range(count)])


def values(params: Any) -> list[torch.Tensor]:
    """Clone the values of the parameters of a mapping or a list."""
    return [param.detach().clone() for param in _listed(params)]


def train(optimizer: Any, params: Any, steps: int, seed: int = 1) -> None:
    """Take ``steps`` steps, each with a different fixed gradient; a repetition draws the same numbers."""
    for step in range(steps):
        set_grads(params, seed=seed + step)
        optimizer.step()


def set_sparse_grad(param: Any, rows: Sequence[int], seed: int = 1, scale: float = 1.0) -> None:
    """Give a parameter a fixed, uncoalesced sparse gradient for these rows, which may repeat."""
    fixed = _numbers((len(rows), *param.shape[1:]), 101 * seed) * scale
    indices = torch.tensor([list(rows)], dtype=torch.int64, device=param.device)
    listed = fixed.to(param.device, param.dtype)
    param.grad = torch.sparse_coo_tensor(indices, listed, tuple(param.shape), check_invariants=True)


def train_sparse(optimizer: Any, params: Any, steps: int, seed: int = 1) -> None:
    """Take ``steps`` steps, each with a fixed sparse gradient that omits some rows and repeats others."""
    for step in range(steps):
        for index, param in enumerate(_listed(params)):
            first = (seed + step + index) % len(param)
            set_sparse_grad(param, [first, (first + 2) % len(param), first], seed=seed + step + 7 * index)
        seed_torch(seed + step)
        optimizer.step()


def moments(optimizer: Any, param: Any) -> dict[str, torch.Tensor]:
    """Return the state tensors with the shape of a parameter, whatever their names are."""
    state = entries_of(optimizer, param, {})
    listed = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in listed.items() if value.shape == param.shape}


def sgd(impl: Any, params: Mapping[str, Any], lr: float = 0.1, **options: Any) -> Any:
    """Wrap ``torch.optim.SGD`` in the implementation's `KeyedOptimizerWrapper`."""
    return impl.KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=lr, **options))


def adam(impl: Any, params: Mapping[str, Any], lr: float = 0.1, **options: Any) -> Any:
    """Wrap ``torch.optim.Adam`` in the implementation's `KeyedOptimizerWrapper`."""
    return impl.KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adam, lr=lr, **options))


def adagrad(impl: Any, params: Mapping[str, Any], lr: float = 0.1, **options: Any) -> Any:
    """Wrap ``torch.optim.Adagrad`` in the implementation's `KeyedOptimizerWrapper`."""
    return impl.KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adagrad, lr=lr, **options))


def warmup_stages(impl: Any, listed: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Make the implementation's `WarmupStage` objects from literals, with policies given by name."""
    return [
        impl.WarmupStage(
            **{**fields, "policy": impl.WarmupPolicy[fields["policy"]]} if "policy" in fields else fields
        )
        for fields in listed
    ]
