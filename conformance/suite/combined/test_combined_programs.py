"""Nested keyed optimizers: operations in a random order."""

import functools
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.optimizer_programs import OptimizerProgram
from keyedopt.conformance.suite.support.programs import FIRST_LR

#: Classes of torch, with options.
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {"amsgrad": True}),
}
SEEDS = range(2)


def run(impl: Any, inner: str, seed: int, *parts: str) -> None:
    """Run a program with inner optimizers of torch."""
    kind, options = CLASSES[inner]
    make = functools.partial(kind, lr=FIRST_LR, **options)
    dtype = ("float32", "float64")[seed % 2]
    OptimizerProgram(impl, make, seed + 10 * list(CLASSES).index(inner), dtype, parts).run(20)


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs(impl: Any, inner: str, seed: int) -> None:
    """Nested optimizers train each parameter like an optimizer with only this parameter."""
    run(impl, inner, seed, "missing gradients", "closures")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.needs("WarmupOptimizer", "WarmupPolicy", "WarmupStage")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_warmup(impl: Any, inner: str, seed: int) -> None:
    """With warmup, that optimizer has the learning rates of the warmup around the parameter."""
    run(impl, inner, seed, "missing gradients", "closures", "warmup")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.needs("GradientClippingOptimizer", "GradientClipping")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_clipping(impl: Any, inner: str, seed: int) -> None:
    """With clipping, that optimizer gets the gradient that the clipping around the parameter clipped."""
    run(impl, inner, seed, "clipping")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.needs("GradientClippingOptimizer", "GradientClipping")
@pytest.mark.needs("WarmupOptimizer", "WarmupPolicy", "WarmupStage")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_everything(impl: Any, inner: str, seed: int) -> None:
    """The same holds with warmup, clipping, closures and missing gradients together."""
    run(impl, inner, seed, "missing gradients", "closures", "warmup", "clipping")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_copies(impl: Any, inner: str, seed: int) -> None:
    """The same holds for a copy, and for an optimizer whose copy takes a step."""
    run(impl, inner, seed, "missing gradients", "closures", "copies")


#: Classes of the implementation.
OWN = (
    *(
        "SGD",
        "Adagrad",
        "RowWiseAdagrad",
        "Adam",
        "AdamW",
        "PartialRowWiseAdam",
        "LAMB",
        "PartialRowWiseLAMB",
    ),
    *("LarsSGD", "Ftrl"),
)


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper", "{algorithm}")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("algorithm", OWN)
def test_programs_of_algorithms(impl: Any, algorithm: str, seed: int) -> None:
    """Nested optimizers of one of the implementation's classes train like optimizers of one parameter."""
    parts = ["missing gradients", "closures"]
    if not impl.lacks(f"{algorithm}.sparse"):
        parts.append("sparse gradients")
    make = functools.partial(getattr(impl, algorithm), lr=FIRST_LR)
    seed += 10 * OWN.index(algorithm)
    OptimizerProgram(impl, make, seed, "float32", parts, ((2, 3), (5, 4), (17, 33))).run(20)
