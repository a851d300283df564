"""Embedding modules: operations in a random order."""

import contextlib
from typing import Any

import pytest

from keyedopt.conformance.suite.support.deferred_programs import DeferredProgram, JointClippingError
from keyedopt.conformance.suite.support.embedding import FUSED_OPTIMIZERS
from keyedopt.conformance.suite.support.embedding_programs import EmbeddingProgram
from keyedopt.conformance.suite.support.inputs import INTERPRETED

#: Options other than the learning rate, if the defaults leave out a part of the algorithm.
OF_PROGRAMS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.5}}

#: How many programs there are for each optimizer: few in Triton's interpreter, which is slow.
TIMES = 1 if INTERPRETED else 4
#: The operations of a program.
COUNT = 12 if INTERPRETED else 24
#: The seeds and dtypes of programs with one optimizer.
PLAIN = [(0, "float32"), (1, "float64"), (2, "float32"), (3, "float32")][: 2 if INTERPRETED else 4]


@pytest.mark.clause("FUSED-107")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingCollection", "{optimizer}")
@pytest.mark.parametrize(("seed", "of"), PLAIN)
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_programs(impl: Any, optimizer: str, seed: int, of: str) -> None:
    """A module trains each table like a module with only this table."""
    options = OF_PROGRAMS.get(optimizer, {})
    if seed % 2 and optimizer != "SparseAdam" and not impl.lacks(f"{optimizer}.weight_decay"):
        options = {**options, "weight_decay": 0.125}
    number = 10 * FUSED_OPTIMIZERS.index(optimizer) + seed
    EmbeddingProgram(impl, [(optimizer, options)], number, of).run(COUNT)


@pytest.mark.clause("FUSED-107")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingCollection", "{optimizer}")
@pytest.mark.needs("apply_optimizer_in_backward", "SGD")
@pytest.mark.parametrize("optimizer", [name for name in FUSED_OPTIMIZERS if name != "SGD"])
def test_programs_of_several_optimizers(impl: Any, optimizer: str) -> None:
    """The same holds for tables with several optimizers."""
    third = {"weight_decay": 0.125} if impl.lacks("SGD.rows") else {"weight_decay": 0.125, "rows": "nonzero"}
    optimizers = [("SGD", OF_PROGRAMS["SGD"]), (optimizer, {}), ("SGD", third)]
    EmbeddingProgram(impl, optimizers, FUSED_OPTIMIZERS.index(optimizer), "float32").run(COUNT)


@pytest.mark.clause("FUSED-107")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingCollection", "{optimizer}")
@pytest.mark.parametrize(
    ("seed", "optimizer"), enumerate(["AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam"] * TIMES)
)
def test_programs_with_windows(impl: Any, optimizer: str, seed: int) -> None:
    """The same holds for optimizers that accumulate gradients: each table has its own window."""
    options = {"use_accumulate": True, "accumulate_step": 2 + seed // 3 % 2}
    EmbeddingProgram(impl, [(optimizer, options)], seed, "float32", without=["clip"]).run(COUNT)


@pytest.mark.clause("FUSED-081", "FUSED-107")
@pytest.mark.plain_only("it has wrappers of its own")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingCollection", "{optimizer}")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper")
@pytest.mark.needs("GradientClippingOptimizer", "GradientClipping")
@pytest.mark.parametrize(
    ("seed", "optimizer"), enumerate(["SGD", "RowWiseAdagrad", "Adagrad", "Adam"] * TIMES)
)
def test_programs_with_joint_clipping(impl: Any, optimizer: str, seed: int) -> None:
    """The same holds for updates that a joint norm with a dense parameter defers to the step."""
    with contextlib.suppress(JointClippingError):
        DeferredProgram(impl, [(optimizer, OF_PROGRAMS.get(optimizer, {}))], seed, "float32").run(COUNT)
