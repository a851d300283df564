"""Nested keyed optimizers: operations in random order."""

import functools
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.optimizer_programs import OptimizerProgram
from keyedopt.conformance.suite.support.programs import FIRST_RATE

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
    make = functools.partial(kind, lr=FIRST_RATE, **options)
    dtype = ("float32", "float64")[seed % 2]
    OptimizerProgram(impl, make, seed + 10 * list(CLASSES).index(inner), dtype, parts).run(20)


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs(impl: Any, inner: str, seed: int) -> None:
    """Each parameter trains as it does alone, in a program of random operations."""
    run(impl, inner, seed, "missing gradients", "closures")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.needs("WarmupOptimizer", "WarmupPolicy", "WarmupStage")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_warmup(impl: Any, inner: str, seed: int) -> None:
    """Each parameter trains as it does alone with the learning rates of the warmup around it."""
    run(impl, inner, seed, "missing gradients", "closures", "warmup")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.needs("GradientClippingOptimizer", "GradientClipping")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_clipping(impl: Any, inner: str, seed: int) -> None:
    """Each parameter trains as it does alone with the gradient that the clipping around it leaves."""
    run(impl, inner, seed, "clipping")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.needs("GradientClippingOptimizer", "GradientClipping")
@pytest.mark.needs("WarmupOptimizer", "WarmupPolicy", "WarmupStage")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_everything(impl: Any, inner: str, seed: int) -> None:
    """Each parameter trains as it does alone, with warmup, clipping, closures and missing gradients."""
    run(impl, inner, seed, "missing gradients", "closures", "warmup", "clipping")


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("inner", CLASSES)
def test_programs_with_copies(impl: Any, inner: str, seed: int) -> None:
    """Each parameter trains as it does alone, also in a copy and beside one."""
    run(impl, inner, seed, "missing gradients", "closures", "copies")


#: Algorithms as classes of the implementation, and whether they are given sparse gradients.
OWN = {
    "SGD": True,
    "Adagrad": True,
    "RowWiseAdagrad": True,
    "Adam": False,
    "AdamW": False,
    "PartialRowWiseAdam": True,
    "LAMB": True,
    "PartialRowWiseLAMB": True,
    "LarsSGD": True,
    "Ftrl": True,
}


@pytest.mark.clause("COMB-054")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper", "{algorithm}")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("algorithm", OWN)
def test_programs_of_algorithms(impl: Any, algorithm: str, seed: int) -> None:
    """Each table trains as it does alone with an algorithm of the implementation, and sparse gradients."""
    sparse = OWN[algorithm] and not impl.lacks(f"{algorithm}.sparse")
    parts = ["missing gradients", "closures", *(["sparse gradients"] if sparse else [])]
    make = functools.partial(getattr(impl, algorithm), lr=FIRST_RATE)
    place = seed + 10 * list(OWN).index(algorithm)
    OptimizerProgram(impl, make, place, "float32", parts, ((2, 3), (5, 4), (17, 33))).run(20)
