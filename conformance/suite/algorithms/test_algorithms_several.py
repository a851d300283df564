"""Several parameters that differ, tables larger than a block, version counters, and effects of options."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    MOMENTUM,
    WITH_EPS,
    WITH_OTHER,
    expect_same_way,
    make_algorithm,
    need_independent,
    resumed_with,
    sparse_rows,
    trained_copy,
)
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    same_bits,
)
from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.device import on_host, ones
from keyedopt.conformance.suite.support.inputs import moments, parameter, set_grads, set_wide_grads, train
from keyedopt.conformance.suite.support.options import (
    AT_FIRST,
    EACH,
    TWO,
    WITH_DECAY,
    with_required_options,
    with_zeros,
)

every = pytest.mark.parametrize("algorithm", ALGORITHMS)
any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)

#: Shapes of tables, from one element to more than 4096, in whole blocks of 256.
SHAPES = ((4, 3), (64, 68), (1, 1), (4, 3))
#: Which parameters have a gradient in each step: no two are updated equally often.
PRESENT = ((0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 1, 2, 3))
#: Options with which the size of a step depends on the step count.
COUNTED = {"Adagrad": {"lr_decay": 0.5}, "RowWiseAdagrad": {"lr_decay": 0.5}}


def give(weights: list[Any], step: int, layout: str) -> None:
    """Give gradients to the parameters of a step; all others have none."""
    for at, weight in enumerate(weights):
        weight.grad = None
        if at in PRESENT[step]:
            set_grads([weight], seed=10 * step + at)
            if layout == "sparse" or (layout == "mixed" and at % 2 == 0):
                rows = [len(weight) - 1, 0, len(weight) - 1]
                weight.grad = sparse_rows(rows, weight.grad[rows], weight)


@pytest.mark.clause("ALGO-099")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_parameters_with_unlike_step_counts(impl: Any, algorithm: str) -> None:
    """Parameters of a group that were updated unequally often train like each one by itself."""
    expect_apart(impl, algorithm, "dense")


@pytest.mark.clause("ALGO-099")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_parameters_with_unlike_step_counts_and_sparse_gradients(impl: Any, algorithm: str) -> None:
    """Parameters of a group with sparse gradients train like each one by itself."""
    expect_apart(impl, algorithm, "sparse")


@pytest.mark.clause("ALGO-099")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_parameters_with_unlike_step_counts_and_layouts(impl: Any, algorithm: str) -> None:
    """Parameters of a group, of which only some have sparse gradients, train like each one by itself."""
    expect_apart(impl, algorithm, "mixed")


def expect_apart(impl: Any, algorithm: str, layout: str) -> None:
    """Expect parameters of one optimizer to train like each in an optimizer of its own, state included."""
    together, apart = ([parameter(*shape, seed=at) for at, shape in enumerate(SHAPES)] for _ in range(2))
    need_independent(impl, algorithm, first=(0, 1))
    options = dict(COUNTED.get(algorithm, {}))
    if algorithm == "SGD" and not impl.lacks("SGD.dampening"):
        options["dampening"] = 0.5
    one = make_algorithm(impl, algorithm, together, **options)
    others = [make_algorithm(impl, algorithm, [weight], **options) for weight in apart]
    largest = [weight.detach().abs() for weight in apart]
    for step in range(len(PRESENT)):
        give(together, step, layout)
        give(apart, step, layout)
        one.step()
        for other in others:
            other.step()
        largest = [
            torch.maximum(size, weight.detach().abs()) for size, weight in zip(largest, apart, strict=True)
        ]
    for at, (seen, wanted) in enumerate(zip(together, apart, strict=True)):
        expect_same_way(seen, wanted, largest[at], f"parameter {at}", algorithm, steps=len(PRESENT))


# --- more than one block --------------------------------------------------------------------------


ROWS, WIDTH = 512, 17  # blocks of 128 to 512 elements fill it, and rows lie across them


def unlike_rows(dtype: str, step: int) -> torch.Tensor:
    """Make gradients of a table whose rows differ in magnitude by factors of up to 4096."""
    rows = torch.arange(ROWS) * 7 % 13 - 6.0
    found = on_host(parameter(ROWS, WIDTH, dtype="float64", seed=step)) * torch.exp2(rows)[:, None]
    return found.to(getattr(torch, dtype))


def trained(
    impl: Any, algorithm: str, start: Any, grads: list[Any], resume: bool = False, largest: Any = None
) -> Any:
    """Train a table with these gradients; with `resume` in a new optimizer after the first step.

    `largest` is raised to the largest magnitude of each weight on its way, to which rounding errors are
    proportional.
    """
    weight = torch.nn.Parameter(start.detach().clone())
    options: dict[str, Any] = {"eps": 1e-3} if algorithm in WITH_EPS else {}
    optimizer = make_algorithm(impl, algorithm, [weight], **options)
    for step, grad in enumerate(grads):
        weight.grad = grad.to(weight.device, weight.dtype, copy=True)
        if resume and step == 1:
            made = make_algorithm(impl, algorithm, [weight], **options)
            optimizer = resumed(made, optimizer)
        optimizer.step()
        if largest is not None:
            torch.maximum(largest, weight.detach().abs(), out=largest)
    return weight


def resumed(fresh: Any, old: Any) -> Any:
    """Load the state of an optimizer into another one."""
    fresh.load_state_dict(old.state_dict())
    return fresh


@pytest.mark.clause("ALGO-100")
@pytest.mark.needs("{algorithm}")
@every
def test_rows_of_a_large_table(impl: Any, algorithm: str, dtype: str) -> None:
    """Rows of a table of several blocks do not depend on their places, on other rows, or on a checkpoint."""
    start = parameter(ROWS, WIDTH, dtype=dtype)
    grads = [unlike_rows(dtype, step) for step in range(3)]
    largest = start.detach().abs()
    whole = trained(impl, algorithm, start, grads, largest=largest)

    order = torch.arange(ROWS) * 7 % ROWS
    permuted = trained(impl, algorithm, start[order], [grad[order] for grad in grads])
    expect_same_way(permuted, whole[order], largest[order], "the permuted table", algorithm)

    expect_bits(trained(impl, algorithm, start, grads, resume=True), whole, "the table after a checkpoint")
    if impl.lacks(f"{algorithm}.by_row"):
        return  # norms of whole tables: each row depends on all others

    some = torch.arange(0, ROWS, 29)
    alone = trained(impl, algorithm, start[some], [grad[some] for grad in grads])
    expect_same_way(alone, whole[some], largest[some], "rows in a table of their own", algorithm)

    spoiled = [grad.clone() for grad in grads]
    spoiled[1][100:103, 3] = torch.tensor([float("inf"), float("nan"), 1e3])
    others = (torch.arange(ROWS) < 100) | (torch.arange(ROWS) > 102)
    seen = trained(impl, algorithm, start, spoiled)
    expect_same_way(seen[others], whole[others], largest[others], "rows beside inf, NaN and 1000", algorithm)


# --- version counters -----------------------------------------------------------------------------


def take_step(optimizer: Any, algorithm: str, layout: str, dtype: str) -> None:
    """Take a step; the case is unsupported if torch has no operator for the gradients of this dtype."""
    try:
        optimizer.step()
    except NotImplementedError as error:
        raise CannotRun(f"torch has no operator: {error}") from None


def expect_versions(impl: Any, algorithm: str, layout: str, dtype: str) -> None:
    """Expect a graph that saved parameters or state to raise after a step."""
    weights = [parameter(*shape, dtype=dtype, seed=at) for at, shape in enumerate(SHAPES)]
    optimizer = make_algorithm(impl, algorithm, [{"params": weights[:1]}, {"params": weights[1:]}])
    for step in range(2):
        give(weights, len(PRESENT) - 1, layout)
        if step == 0:
            take_step(optimizer, algorithm, layout, dtype)
    saved, states = {}, {}
    for at, weight in enumerate(weights):
        saved[f"parameter {at}"] = (weight * weight).sum()
        for name, state in moments(optimizer, weight).items():
            if type(state) is not torch.Tensor:
                continue  # a quantized one may have no operators for graphs
            one = ones(1, dtype=state.dtype, requires_grad=True)
            saved[f"{name} of parameter {at}"] = (one * state).sum()
            states[f"{name} of parameter {at}"] = (weight, name, state)
    take_step(optimizer, algorithm, layout, dtype)
    for what, graph in saved.items():
        if what in states and moments(optimizer, states[what][0]).get(states[what][1]) is not states[what][2]:
            continue  # another tensor replaced it, so what the graph saved is as it was
        expect_raises(
            graph.backward, RuntimeError, expected=f"RuntimeError: {what} was modified after it was saved"
        )


@pytest.mark.clause("ALGO-101")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
def test_versions(impl: Any, algorithm: str, dtype: str) -> None:
    """A graph that was saved before a step raises in its backward pass."""
    expect_versions(impl, algorithm, "dense", dtype)


@pytest.mark.clause("ALGO-101")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse", "{algorithm}.groups")
@every
def test_versions_after_sparse_gradients(impl: Any, algorithm: str, dtype: str) -> None:
    """A graph that was saved before a step with sparse gradients raises in its backward pass."""
    expect_versions(impl, algorithm, "sparse", dtype)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.clause("ALGO-092")
@pytest.mark.needs("{algorithm}", "{algorithm}.{option}")
@pytest.mark.parametrize(("algorithm", "option"), [pair for pair in EACH if pair[1] not in AT_FIRST])
def test_options_have_an_effect(impl: Any, algorithm: str, option: str) -> None:
    """Two values of an option that is set between two steps lead to different weights."""
    kind, seen = getattr(impl, algorithm), []
    more = MOMENTUM.get(algorithm, {}) if option == "decay" else {}
    for value in TWO[option]:
        weight = parameter(4, 3)
        optimizer = kind([weight], **more, **with_required_options(option, TWO[option][0]))
        for seed in range(4):
            if seed == 1:
                changed = {**more, **with_required_options(option, value)}
                optimizer = resumed_with(kind, optimizer, weight, **changed)
            with_zeros([weight], seed)
            optimizer.step()
        seen.append(weight.detach())
    expect(not same_bits(*seen), f"other weights with {option} = {TWO[option]}", seen)


@pytest.mark.clause("ALGO-041")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_gradients_of_several_steps_are_left(impl: Any, algorithm: str) -> None:
    """A step without options modifies no gradient, also none of an earlier step."""
    weights = [parameter(*shape, seed=at) for at, shape in enumerate(SHAPES[:2])]
    optimizer = make_algorithm(impl, algorithm, weights)
    given: list[tuple[Any, Any]] = []
    for seed in range(2):
        set_wide_grads(weights, seed=seed)
        grads: list[Any] = [weight.grad for weight in weights]
        given += [(grad, grad.clone()) for grad in grads]
        optimizer.step()
    for grad, before in given:
        expect_bits(grad, before, "the gradient")


@pytest.mark.clause("ALGO-022")
@pytest.mark.needs("{algorithm}", "{algorithm}.decay")
@pytest.mark.parametrize("algorithm", WITH_DECAY)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_no_decay(impl: Any, algorithm: str, layout: str) -> None:
    """An option decay='none' means no decay, whatever weight_decay is, or raises ValueError."""
    expect_no_decay(impl, algorithm, layout, "float32")


@pytest.mark.clause("ALGO-022")
@pytest.mark.needs("{algorithm}", "{algorithm}.decay")
@pytest.mark.parametrize("algorithm", WITH_DECAY)
def test_no_decay_in_each_dtype(impl: Any, algorithm: str, dtype: str) -> None:
    """An option decay='none' means no decay in any dtype, whatever weight_decay is, or raises ValueError."""
    expect_no_decay(impl, algorithm, "dense", dtype)


def expect_no_decay(impl: Any, algorithm: str, layout: str, dtype: str) -> None:
    """Expect the same bits from a weight decay that is off and from none, or a ValueError."""
    weights = [parameter(*SHAPES[0], dtype=dtype) for _ in range(2)]
    try:
        optimizers = [
            make_algorithm(impl, algorithm, [weights[0]], decay="none", weight_decay=0.5),
            make_algorithm(impl, algorithm, [weights[1]], weight_decay=0.0),
        ]
    except ValueError:
        return
    for _ in range(2):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            give([weight], 0, "dense" if impl.lacks(f"{algorithm}.sparse") else layout)
            optimizer.step()
    expect_bits(weights[0].detach(), weights[1].detach(), "the weight without decay")


@pytest.mark.clause("ALGO-040")
@pytest.mark.needs("{algorithm}", "{algorithm}.rows")
@every
def test_rows_that_count_as_zero(impl: Any, algorithm: str) -> None:
    """With rows='nonzero' a row is left only if its whole gradient is 0; tiny numbers and NaN are not 0."""
    nan = float("nan")
    grads = torch.tensor([[0.0, 0.0, 1.0], [0.0, nan, 0.0], [0.0, 0.0, 0.0], [0.0, 1e-30, 0.0]])
    before, found = list[Any](), list[Any]()
    for rows in ("nonzero", "given"):
        weight = parameter(4, 3)
        optimizer = make_algorithm(impl, algorithm, [weight], rows=rows)
        set_grads([weight])
        optimizer.step()
        before = [*before, weight.detach().clone()]
        weight.grad = grads.to(weight.device, copy=True)
        optimizer.step()
        found.append(weight.detach())
    nonzero, given = found
    expect_bits(nonzero[2], before[0][2], "the row whose gradient is zero")
    for row in (0, 3):
        expect_same_way(
            nonzero[row], given[row], before[0][row], f"row {row} as with rows='given'", algorithm, steps=2
        )
    expect(not same_bits(nonzero[1], before[0][1]), "a change of the row with NaN", nonzero[1])


@pytest.mark.clause("ALGO-040")
@pytest.mark.needs("{algorithm}", "{algorithm}.rows", "{algorithm}.sparse")
@every
def test_no_row_counts(impl: Any, algorithm: str) -> None:
    """With rows='nonzero' a sparse gradient without rows changes nothing, in each of two steps."""
    weight = parameter(4, 3)
    optimizer = make_algorithm(impl, algorithm, [weight], rows="nonzero")
    before = weight.detach().clone()
    for _ in range(2):
        weight.grad = torch.zeros_like(weight).to_sparse(1)
        optimizer.step()
    expect_bits(weight.detach(), before, "the weight")


@pytest.mark.plain_only("it makes groups of its own")
@pytest.mark.clause("ALGO-082")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
@pytest.mark.parametrize("added", [False, True])
def test_every_group_is_trained(impl: Any, algorithm: str, added: bool) -> None:
    """Steps train the parameters of each group, of the constructor and added, as those of one group."""

    def moved(count: int) -> list[bool]:
        weights = [parameter(4, 3, seed=index) for index in range(2)]
        groups = [{"params": weights}] if count == 1 else [{"params": [weight]} for weight in weights]
        optimizer = make_algorithm(impl, algorithm, groups[: 1 if added else 2])
        for group in groups[1:] if added else ():
            optimizer.add_param_group(group)
        train(optimizer, weights, 3)
        return [not same_bits(weight, parameter(4, 3, seed=at)) for at, weight in enumerate(weights)]

    expect_equal(moved(2), moved(1), "which weights of two groups have changed")


@pytest.mark.clause("ALGO-099")
@pytest.mark.needs("{algorithm}.rows", "{algorithm}.sparse")
@every
@pytest.mark.parametrize("rows", ["given", "all"])
def test_several_sparse_gradients(impl: Any, rows: str, algorithm: str) -> None:
    """Each of several weights with sparse gradients, also of other strides, trains as it does by itself."""
    need_independent(impl, algorithm)
    starts = [parameter(4, 3, seed=seed).detach() for seed in range(3)]
    starts[1:] = [start.t().contiguous().t() for start in starts[1:]]
    grads = [
        [sparse_rows([3, 1, 3], parameter(3, 3, seed=10 * step + at).detach(), start) for step in range(3)]
        for at, start in enumerate(starts)
    ]
    weights = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = make_algorithm(impl, algorithm, weights, rows=rows)
    for step in range(3):
        for weight, given in zip(weights, grads, strict=True):
            weight.grad = given[step].clone()
        optimizer.step()
    for weight, start, given in zip(weights, starts, grads, strict=True):
        wanted, _ = trained_copy(impl, algorithm, start, given, rows=rows)
        expect_same_way(weight, wanted, start, "the weight", algorithm)
