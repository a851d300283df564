"""Parameters, gradients and states whose sizes disagree: an error, and no memory outside of them is written.

Every tensor is a view of the first rows of a larger buffer, so a kernel that writes beyond its end writes to
memory of the case, where it is seen.
"""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    WITH_OTHER,
    make_algorithm,
    need_switch,
    sparse_rows,
)
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.buffers import Buffers
from keyedopt.conformance.suite.support.described import OTHER, entries_of
from keyedopt.conformance.suite.support.inputs import parameter, set_grads

every = pytest.mark.parametrize("algorithm", ALGORITHMS)
any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)
#: Which tensors get another number of rows, and how many; all others have 4 rows.
SIZES = pytest.mark.parametrize(
    ("which", "rows"),
    [("weight", 2), ("weight", 8), ("gradient", 2), ("gradient", 8), ("state", 2), ("state", 8)],
    ids=lambda value: str(value),
)
KERNELS = pytest.mark.parametrize("kernels", ["fused", "foreach"])


def disagreeing(
    impl: Any, algorithm: str, which: str, rows: int, layout: str = "dense", options: Any = None
) -> tuple[Any, list[Any], Buffers]:
    """Make an optimizer of two groups, with gradients; sizes in the second group disagree.

    A ``weight`` is replaced together with its gradient, as if a table had grown.
    """
    weights = [parameter(4, 3, seed=seed) for seed in (1, 2)]
    optimizer = make_algorithm(
        impl, algorithm, [{"params": [weight]} for weight in weights], **(options or {})
    )
    set_grads(weights)
    optimizer.step()
    last, buffers = weights[1], Buffers()
    entries = entries_of(optimizer, last).values()
    states = [value for value in entries if type(value) is torch.Tensor and value.ndim]
    if not states and (which == "state" or (which == "weight" and algorithm == OTHER)):
        getattr(impl, f"{algorithm}.state")  # raises MissingName, so the case is unsupported
    for tensor in (last, *states):
        replaced = which == ("weight" if tensor is last else "state")
        tensor.data = buffers.view(tensor.detach(), rows if replaced else len(tensor))
    set_grads(weights, seed=2)
    for weight in weights:
        grad = weight.grad
        assert grad is not None
        listed = [len(weight) - 1, 0, len(weight) - 1]
        if layout == "sparse":
            weight.grad = sparse_rows(listed, grad[listed], weight)
        elif which == "gradient" and weight is last:
            grad.data = buffers.view(grad, rows)
    return optimizer, weights, buffers


def expect_error(optimizer: Any, buffers: Buffers) -> None:
    """Expect a step to raise an error, and to write nothing behind the tensors."""
    before = buffers.behind()
    error: Exception | None = None
    try:
        optimizer.step()
    except Exception as raised:
        error = raised
    for seen, wanted in zip(buffers.behind(), before, strict=True):
        expect_bits(seen, wanted, "the memory behind a tensor")
    expect(error is not None, "an error: the sizes of parameter, gradient and state disagree", "no error")


@pytest.mark.clause("ALGO-104")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
@SIZES
def test_sizes(impl: Any, algorithm: str, which: str, rows: int) -> None:
    """A step with a parameter, gradient or state of another size raises, and writes nothing behind them."""
    optimizer, _, buffers = disagreeing(impl, algorithm, which, rows)
    expect_error(optimizer, buffers)


@pytest.mark.clause("ALGO-104")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse", "{algorithm}.groups")
@every
@pytest.mark.parametrize(("which", "rows"), [("weight", 8), ("state", 2)], ids=lambda value: str(value))
def test_sizes_with_sparse_gradients(impl: Any, algorithm: str, which: str, rows: int) -> None:
    """A sparse gradient does not update rows behind the end of a state."""
    optimizer, _, buffers = disagreeing(impl, algorithm, which, rows, "sparse")
    expect_error(optimizer, buffers)


@pytest.mark.clause("ALGO-104")
@pytest.mark.needs("{algorithm}", "{algorithm}.{kernels}", "{algorithm}.groups")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "Adam", "AdamW"])
@KERNELS
@SIZES
def test_sizes_with_kernels(impl: Any, algorithm: str, kernels: str, which: str, rows: int) -> None:
    """If there is a kernel switch, other kernels compare sizes too."""
    need_switch(impl, algorithm, kernels)
    optimizer, _, buffers = disagreeing(impl, algorithm, which, rows, options={kernels: True})
    expect_error(optimizer, buffers)


@pytest.mark.clause("ALGO-105")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
@SIZES
def test_nothing_is_updated(impl: Any, algorithm: str, which: str, rows: int) -> None:
    """A step that raises because of sizes changes no parameter and no state, of any group."""
    optimizer, weights, _ = disagreeing(impl, algorithm, which, rows)
    states = [dict(entries_of(optimizer, weight)) for weight in weights]
    before = snapshot([weights, states])
    expect_raises(optimizer.step, Exception, expected="an error: sizes disagree")
    states = [dict(entries_of(optimizer, weight)) for weight in weights]
    expect_unchanged(before, [weights, states], "weights and state")
