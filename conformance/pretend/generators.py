"""Random numbers of the pretend device: one generator per index, seeded like those of CUDA."""

from typing import Any

import torch

from keyedopt.conformance.pretend.devices import COUNT, NAME, device_of
from keyedopt.conformance.pretend.memory import CPU
from keyedopt.conformance.pretend.schemas import Plan

#: The generators from which operators draw that get none, one per index.
default_generators = tuple(torch.Generator(CPU) for _ in range(COUNT))


def run(op: Any, plan: Plan, device: torch.device, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator of the CPU with the random numbers of a device."""
    if kwargs.get("generator") is not None:
        return op(*args, **kwargs)
    generator = default_generators[device.index]
    if plan.generator:
        return op(*args, **{**kwargs, "generator": generator})
    # The operator draws from the default generator of the CPU, whose state must not change.
    outer = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(outer)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    default_generators[device_of().index].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for generator in default_generators:
        generator.manual_seed(seed)


def seed_all() -> None:
    """Seed the generators of all devices with one random number."""
    manual_seed_all(torch.random.seed())


def initial_seed() -> int:
    """Return the seed of the generator of the current device."""
    return default_generators[device_of().index].initial_seed()


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    """Return the state of the generator of a device, as bytes on the CPU."""
    return default_generators[device_of(device).index].get_state()


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    """Set the state of the generator of a device."""
    default_generators[device_of(device).index].set_state(state)
