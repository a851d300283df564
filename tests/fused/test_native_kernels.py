"""The native backend against the reference's rules in float64: dtypes, widths, runs, pooling, machines."""

import itertools
import os

import pytest
import torch

from keyedopt.fused.backends.interface import ALGORITHMS, Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.native import NativeBackend
from keyedopt.fused.backends.native.describe import state_widths
from keyedopt.reference import rules
from keyedopt.reference.rules import Decay, EpsPlacement

WHY = NativeBackend("").missing()
if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert not WHY, WHY
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "built")

SETS = NativeBackend.instruction_sets()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = 40

ADAM = {"eps": 1e-6, "betas": (0.8, 0.95)}
#: Steps of every algorithm, with every option that it has.
STEPS = [
    Step("sgd", 0.1),
    Step("sgd", 0.1, weight_decay=0.1, decay="l2", maximize=True),
    Step("sgd", 0.1, weight_decay=0.1, decay="decoupled", momentum=0.9, dampening=0.5),
    Step("sgd", 0.1, weight_decay=0.1, decay="l2", momentum=0.9, nesterov=True),
    Step("sgd", 0.1, momentum=0.9, dampening=0.5, first=True),
    Step("adagrad", 0.1, eps=1e-8),
    Step("adagrad", 0.1, count=3, eps=1e-8, lr_decay=0.5, weight_decay=0.1, decay="l2", maximize=True),
    Step("adagrad", 0.1, count=3, eps=1e-8, lr_decay=0.5, weight_decay=0.1, decay="decoupled"),
    Step("rowwise_adagrad", 0.1, eps=1e-8),
    Step("rowwise_adagrad", 0.1, count=3, eps=1e-8, lr_decay=0.5, weight_decay=0.1, decay="l2"),
    Step("rowwise_adagrad", 0.1, eps=1e-8, weight_decay=0.1, decay="decoupled", maximize=True),
    Step("rowwise_adagrad", 0.1, eps=1e-8, max_norm=0.7),
    Step("adam", 0.1, count=1, **ADAM),
    Step("adam", 0.1, count=5, weight_decay=0.1, decay="l2", maximize=True, **ADAM),
    Step("adam", 0.1, count=5, weight_decay=0.1, decay="decoupled", **ADAM),
    Step("adam", 0.1, count=5, eps_placement="before_bias_correction", **ADAM),
    Step("sparse_adam", 0.1, count=5, **ADAM),
    Step("partial_rowwise_adam", 0.1, count=5, weight_decay=0.1, decay="decoupled", **ADAM),
    Step("partial_rowwise_adam", 0.1, count=5, weight_decay=0.1, decay="l2", **ADAM),
    Step("lamb", 0.1, count=5, weight_decay=0.1, decay="decoupled", **ADAM),
    Step("lamb", 0.1, count=5, weight_decay=0.1, decay="l2", maximize=True, **ADAM),
    Step("partial_rowwise_lamb", 0.1, count=5, weight_decay=0.1, decay="decoupled", **ADAM),
    Step("lars_sgd", 0.1, weight_decay=0.1, momentum=0.9, eta=0.02, maximize=True),
    Step("ftrl", 0.1),
    Step("ftrl", 0.1, l1=0.5, l2=0.1, l2_shrinkage=0.2, beta=0.3, weight_decay=0.1, maximize=True),
    Step("partial_rowwise_adam", 0.1, count=5, weight_decay=0.1, decay="l2", max_norm=1.0, **ADAM),
    Step("partial_rowwise_lamb", 0.1, count=5, weight_decay=0.1, decay="decoupled", max_norm=1.0, **ADAM),
]


def named(step):
    changed = [name for name in ("decay", "maximize", "nesterov", "first", "max_norm") if getattr(step, name)]
    return f"{step.algorithm}-{step.decay}-{step.count}-" + "-".join(changed[1:])


def make_table(step, rows, width, dtype=torch.float32, counted=False):
    momentum = step.algorithm == "sgd" and step.momentum
    widths = state_widths(step.algorithm, width, int(bool(momentum)) or len(ALGORITHMS[step.algorithm]))
    states = [torch.rand(rows, size) if size > 1 or width == 1 else torch.rand(rows) for size in widths]
    counter = torch.randint(0, 5, (rows,)) if counted else None
    return Table(torch.randn(rows, width).to(dtype), tuple(states), counter)


def copied(table):
    counter = None if table.row_counter is None else table.row_counter.clone()
    return Table(table.weight.clone(), tuple(state.clone() for state in table.states), counter)


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def tensors(table):
    return [table.weight, *table.states, *([] if table.row_counter is None else [table.row_counter])]


def expected(table, sums, step):
    """Return the table after the step, by the reference's rule, in float64."""
    takes = {
        "sgd": ("momentum", "dampening", "nesterov", "first", "weight_decay"),
        "adagrad": ("eps", "lr_decay", "weight_decay"),
        "rowwise_adagrad": ("eps", "lr_decay", "weight_decay", "max_norm"),
        "sparse_adam": ("eps", "betas"),
        "partial_rowwise_adam": ("eps", "betas", "weight_decay", "max_norm"),
        "partial_rowwise_lamb": ("eps", "betas", "weight_decay", "max_norm"),
        "lars_sgd": ("momentum", "eta", "weight_decay"),
        "ftrl": ("l1", "l2", "l2_shrinkage", "beta", "weight_decay"),
    }.get(step.algorithm, ("eps", "betas", "weight_decay"))
    options = {name: getattr(step, name) for name in ("lr", "maximize", *takes)}
    if step.algorithm not in ("sgd", "lars_sgd", "ftrl"):
        options["step"] = step.count
    if step.algorithm not in ("sparse_adam", "lars_sgd", "ftrl"):
        options["decay"] = Decay(step.decay)
    if step.algorithm == "adam":
        options["eps_placement"] = EpsPlacement(step.eps_placement)
    rows = torch.tensor(sorted(sums))
    grads = torch.stack([sums[row] for row in sorted(sums)])
    if table.row_counter is not None:
        options["step"] = table.row_counter[rows] + 1
    old = [tensor.double() for tensor in (table.weight, *table.states)]
    rules.update_rows(getattr(rules, step.algorithm), old[0], old[1:], rows, grads, **options)
    return old


def summed(lookups):
    """Return the summed gradient of each row, in float64, value by value."""
    sums = {}
    for lookup in lookups:
        offsets = range(len(lookup.values) + 1) if lookup.offsets is None else lookup.offsets.tolist()
        for bag, (begin, end) in enumerate(itertools.pairwise(offsets)):
            for i in range(begin, end):
                grad = lookup.grad[bag].double()
                grad = grad if lookup.weights is None else grad * lookup.weights[i].double()
                grad = grad / (end - begin) if lookup.mean else grad
                row = int(lookup.values[i])
                sums[row] = sums.get(row, 0) + grad
    return sums


def lookups_of(width, rows=ROWS, bags=12, kinds=("sum", "mean", "weighted", "weighted mean", "unpooled")):
    """Return a lookup of every kind in table 0: empty bags, rows many times and once.

    Gradients and weights are small fractions, and bags have 0, 1, 2, 4 or 8 values, so that sums are exact.
    """
    found = []
    for kind in kinds:
        lengths = torch.tensor([0, 1, 2, 4, 8])[torch.randint(0, 5, (bags,))]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        count = int(offsets[-1])
        values = (torch.rand(count) ** 3 * rows).long()
        weights = torch.randint(-8, 9, (count,)) / 4 if "weighted" in kind else None
        pooled = None if kind == "unpooled" else offsets
        grad = torch.randint(-64, 65, (count if pooled is None else bags, width)) / 64
        found.append(Lookup(0, values, pooled, weights, "mean" in kind, grad))
    return found


def assert_close(got, want):
    """A few last places of the dtype of what came out, and of the float32 numbers that went in."""
    error = (got.double().reshape(want.shape) - want).abs()
    allowed = 4 * torch.finfo(got.dtype).eps * want.abs() + 8 * torch.finfo(torch.float32).eps
    assert bool((error <= allowed).all()), (error / allowed).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS, ids=named)
def test_an_update_is_the_rule(step, dtype):
    torch.manual_seed(0)
    for width in (1, 3, 64, 513):
        lookups = lookups_of(width)
        table = make_table(step, ROWS, width, dtype)
        want = expected(table, summed(lookups), step)
        untouched = sorted(set(range(ROWS)) - set(summed(lookups)))
        for name in SETS:
            got = copied(table)
            NativeBackend(name).update([got], lookups, step)
            for tensor, value in zip(tensors(got), want, strict=True):
                assert_close(tensor, value)
            for new, old in zip(tensors(got), tensors(table), strict=True):
                assert torch.equal(new[untouched], old[untouched])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("algorithm", ["adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"])
def test_a_row_counts_its_own_steps(algorithm, name):
    torch.manual_seed(1)
    step = Step(algorithm, 0.1, **ADAM)
    lookups = lookups_of(8)
    table = make_table(step, ROWS, 8, counted=True)
    want = expected(table, summed(lookups), step)
    counts = table.row_counter.clone()
    counts[sorted(summed(lookups))] += 1
    NativeBackend(name).update([table], lookups, step)
    assert torch.equal(table.row_counter, counts)
    for tensor, value in zip([table.weight, *table.states], want, strict=True):
        assert_close(tensor, value)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 4095, 4096, 4097, 16384, 16385, 40000])
def test_runs_of_every_length(length, name):
    torch.manual_seed(2)
    values = torch.cat([torch.full((length,), 3), torch.arange(ROWS)])[torch.randperm(length + ROWS)]
    lookup = Lookup(0, values, grad=torch.randn(length + ROWS, 5))
    want = torch.zeros(ROWS, 5, dtype=torch.float64).index_add_(0, values, lookup.grad.double())
    found = []
    for threads in (1, 2, 4):
        (got,) = NativeBackend(name, threads).coalesce([Table(torch.zeros(ROWS, 5))], [lookup])
        assert torch.equal(got.rows, torch.arange(ROWS))
        assert (got.grads - want).abs().max() <= 1e-6 * lookup.grad.abs().sum(0).max()
        found.append(got.grads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_ten_million_gradients_of_one_row():
    count = 10_000_000
    grad = torch.full((count, 1), 0.1)
    lookup = Lookup(0, torch.zeros(count, dtype=torch.int64), grad=grad)
    (got,) = NativeBackend(threads=2).coalesce([Table(torch.zeros(1, 1))], [lookup])
    want = grad.double().sum()
    assert (got.grads.double() - want).abs() <= 1e-6 * want


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("step", STEPS, ids=named)
def test_threads_do_not_change_a_bit(step, name):
    torch.manual_seed(3)
    sizes = (20_000, 50, 7)  # one table is shared by threads, with runs that are, too
    tables = [make_table(step, rows, 9) for rows in sizes]
    lookups = []
    for index, (rows, count) in enumerate(zip(sizes, (60_000, 300, 50), strict=True)):
        values = torch.where(torch.rand(count) < 0.5, 5, (torch.rand(count) * rows).long())
        lookups.append(
            Lookup(index, values, torch.arange(0, count + 1, 10), grad=torch.randn(count // 10, 9))
        )
    results = []
    for threads in (1, 2, 4):
        results.append([copied(table) for table in tables])
        NativeBackend(name, threads).update(results[-1], lookups, step)
    again = [copied(table) for table in tables]
    backend = NativeBackend(name, 3)
    backend.update_rows(again, backend.coalesce(again, lookups), step)
    for other in (*results[1:], again):
        assert all(same_bits(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 64, 513])
def test_pooling(width, dtype, name):
    torch.manual_seed(4)
    weight = torch.randn(ROWS, width).to(dtype)
    lookups = lookups_of(width)
    for lookup, got in zip(lookups, NativeBackend(name).look_up([Table(weight)], lookups), strict=True):
        rows = weight.double()[lookup.values]
        rows = rows if lookup.weights is None else rows * lookup.weights.double()[:, None]
        want = rows
        if lookup.offsets is not None:
            lengths = lookup.offsets.diff()
            bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            want = rows.new_zeros(len(lengths), width).index_add(0, bags, rows)
            want = want / lengths.clamp(min=1)[:, None] if lookup.mean else want
        assert got.dtype is torch.float32
        assert_close(got, want)


def test_many_features_and_widths_in_one_call():
    torch.manual_seed(5)
    step = Step("adagrad", 0.1, eps=1e-8)
    tables = [make_table(step, ROWS, width) for width in (4, 17, 64)]
    lookups = []
    for number in range(40):
        (one,) = lookups_of(tables[number % 3].weight.shape[1], kinds=(("sum", "weighted mean")[number % 2],))
        lookups.append(Lookup(number % 3, one.values, one.offsets, one.weights, one.mean, one.grad))
    wants = [
        expected(table, summed([lookup for lookup in lookups if lookup.table == index]), step)
        for index, table in enumerate(tables)
    ]
    NativeBackend(threads=2).update(tables, lookups, step)
    for table, want in zip(tables, wants, strict=True):
        for tensor, value in zip(tensors(table), want, strict=True):
            assert_close(tensor, value)


def test_nothing_to_do():
    step = Step("sgd", 0.1)
    empty = torch.zeros(0, dtype=torch.int64)
    for rows in (0, 3):
        table = Table(torch.ones(rows, 4))
        lookups = [Lookup(0, empty, torch.zeros(3, dtype=torch.int64), grad=torch.ones(2, 4))]
        backend = NativeBackend()
        backend.update([table], lookups, step)
        assert bool((table.weight == 1).all())
        assert backend.look_up([table], lookups)[0].tolist() == [[0.0] * 4] * 2
        (sums,) = backend.coalesce([table], lookups)
        assert sums.rows.shape == (0,)
        assert sums.grads.shape == (0, 4)
        backend.update_rows([table], [RowGradients(0, empty, torch.zeros(0, 4))], step)
    backend.update([], [], step)


def test_gradients_with_strides_and_of_half_precision():
    torch.manual_seed(6)
    values = torch.tensor([1, 0, 1, 2])
    given = [
        torch.ones(1).expand(4, 6),
        torch.randn(4, 12)[:, 3:9],
        torch.randn(6, 4).t(),
        torch.randn(4, 6).half(),
    ]
    for grad in given:
        (got,) = NativeBackend().coalesce([Table(torch.zeros(3, 6))], [Lookup(0, values, grad=grad)])
        want = torch.zeros(3, 6).index_add_(0, values, grad.float())
        torch.testing.assert_close(got.grads, want)
