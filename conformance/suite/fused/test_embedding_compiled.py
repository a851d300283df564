"""Embedding modules in compiled and exported models: weights of lookups, unpooled rows, invalid features."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.assertions import expect_bits, expect_raises
from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.embedding import BAGS, collection, jagged, tables_of
from keyedopt.conformance.suite.support.late_errors import expect_lookup_error

REFUSALS = (ValueError, IndexError, RuntimeError)
KINDS = pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
WEIGHTS = {"f": [[0.5, 2.0, -1.0], [4.0]], "g": [[], [-0.5, 8.0]], "h": [[2.0, 0.25], [-4.0]]}
#: Other features than those with which a module is exported.
LATER = {"f": [[5, 0, 4], []], "g": [[3], [2]], "h": [[], [4, 1]]}
LATER_WEIGHTS = {"f": [[1.0, -2.0, 0.25], []], "g": [[3.0], [-1.0]], "h": [[], [0.5, 4.0]]}


def loss_of(module: Any, features: Any) -> torch.Tensor:
    """Return a loss whose gradients are small integers."""
    outputs = module(features)
    return sum((place + 1) * outputs[name].sum() for place, name in enumerate(sorted(outputs)))


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-092", "FUSED-047")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize(
    ("kind", "learned"), [("EmbeddingBagCollection", "g"), ("EmbeddingCollection", "fgh")]
)
def test_compiled_gradient_of_weights(impl, kind, learned):
    """In a compiled model the weights of lookups that need a gradient get the same as without compiling."""
    torch.compiler.reset()  # the number of compilations of one function is limited
    module, other = (collection(impl, "Adagrad", kind=kind, weighted=True) for _ in range(2))
    compiled = torch.compile(loss_of, backend="eager")
    for scale in (1.0, -2.0):  # features of other shapes would compile once more
        weights = {name: [[scale * one for one in bag] for bag in bags] for name, bags in WEIGHTS.items()}
        given = [jagged(BAGS, weights) for _ in range(2)]
        for features in given:
            for name in learned:
                features[name][2].requires_grad_()
        for each, tables, features in zip((compiled, loss_of), (module, other), given, strict=True):
            each(tables, features).backward()
        for name in learned:
            seen, wanted = (features[name][2].grad for features in given)
            expect_near(tensor([0.0]) if seen is None else seen, wanted, f"gradient of the weights of {name}")
        for name in ("t", "u"):
            expect_near(tables_of(module)[name], tables_of(other)[name], f"table {name}")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-101")
@pytest.mark.needs("{kind}", "Adagrad")
@KINDS
@pytest.mark.parametrize("weighted", [False, True])
def test_exported_rows(impl, weighted, kind):
    """An exported module of any kind, also with weights, gives the outputs of the module."""
    module = collection(impl, "Adagrad", kind=kind, weighted=weighted).eval()
    sizes = {name: tuple({0: torch.export.Dim.AUTO} for _ in range(2 + weighted)) for name in BAGS}
    given = jagged(BAGS, WEIGHTS if weighted else None)
    program = torch.export.export(module, (given,), dynamic_shapes=(sizes,), strict=False).module()
    for bags, weights in ((BAGS, WEIGHTS), (LATER, LATER_WEIGHTS)):
        features = jagged(bags, weights if weighted else None)
        seen, expected = program(features), module(features)
        for name, output in expected.items():
            expect_bits(seen[name].detach(), output.detach(), f"output {name} of the exported module")


def needed(what: str, action: Callable[[], Any]) -> Any:
    """Return what an action returns.

    Raises:
        CannotRun: the action raises an error, which other clauses judge.
    """
    try:
        return action()
    except Exception as error:
        raise CannotRun(f"{what} cannot run: {type(error).__name__}") from error


#: Row numbers and offsets of the last feature that are invalid.
INVALID = {
    "a row that is too large": ([3, 5, 0], [0, 2, 3]),
    "a negative row": ([3, -1, 0], [0, 2, 3]),
    "offsets past the end": ([3, 3, 0], [0, 2, 4]),
    "falling offsets": ([3, 3, 0], [0, 4, 3]),
}


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("FUSED-024")
@pytest.mark.needs("{kind}", "Adagrad")
@KINDS
def test_bad_features_of_a_compiled_model(impl, kind):
    """A compiled model raises an error for invalid features, in training and evaluation; nothing changes."""
    torch.compiler.reset()  # the number of compilations of one function is limited
    module = collection(impl, "Adagrad", kind=kind)
    compiled = torch.compile(module, backend="eager")
    good = jagged(BAGS)
    for training in (True, False):
        module.train(training)
        for what, (values, offsets) in INVALID.items():
            needed("a compiled module", lambda: compiled(good))
            bad = {**good, "h": (tensor(values), tensor(offsets))}
            expect_lookup_error(compiled, bad, good, *REFUSALS, expected=f"an error for {what}")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.cpu_only("another device reports the error late, and an exported module has no later check")
@pytest.mark.clause("FUSED-024")
@pytest.mark.needs("{kind}", "Adagrad")
@KINDS
def test_bad_features_of_an_exported_model(impl, kind):
    """An exported module raises an error for invalid features."""
    module = collection(impl, "Adagrad", kind=kind).eval()
    sizes = {name: ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO}) for name in BAGS}
    given = jagged(BAGS)
    made = needed(
        "an exported module",
        lambda: torch.export.export(module, (given,), dynamic_shapes=(sizes,), strict=False),
    )
    program = made.module()
    program(given)
    for what, (values, offsets) in INVALID.items():
        bad = {**given, "h": (tensor(values), tensor(offsets))}
        expect_raises(lambda bad=bad: program(bad), *REFUSALS, expected=f"an error for {what}")
