"""Lookups by column, as a collection gives them: the same results, and the same refusals."""

import os

import pytest
import torch

from keyedopt.fused.backends.interface import Columns, Lookup, Step, Table, Tables
from keyedopt.fused.backends.native import NativeBackend

WHY = NativeBackend("").missing()
if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert not WHY, WHY
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "built")

STEP = Step("rowwise_adagrad", 0.1, eps=1e-8)


def table(rows=10, width=4):
    return Table(torch.ones(rows, width), (torch.zeros(rows),))


def numbers(*values):
    return torch.tensor(values, dtype=torch.int64)


def by_column(lookups):
    """Return lookups as a collection gives them."""
    columns = [[getattr(one, name) for one in lookups] for name in ("table", "values", "offsets", "weights")]
    tables, values, offsets, weights = columns
    offsets = None if offsets[0] is None else offsets
    means, grads = [one.mean for one in lookups], [one.grad for one in lookups]
    return Columns(tables, values, offsets, None if weights[0] is None else weights, means, grads)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_columns_are_the_lookups(pooled, weighted):
    torch.manual_seed(0)
    lookups = [
        Lookup(
            index % 2,
            torch.randint(10, (9,)),
            numbers(0, 4, 4, 9) if pooled else None,
            torch.rand(9, dtype=torch.float64) if weighted else None,
            index == 1,
            (torch.randn(8, 3 if pooled else 9).t() if index else torch.randn(3 if pooled else 9, 8))[:, ::2],
        )
        for index in range(3)
    ]
    columns, backend = by_column(lookups), NativeBackend()
    assert all(one is not None for one in columns)
    assert [one.mean for one in columns[1:]] == [True, False]
    a, b = [table(), table()], Tables([table(), table()])
    for _ in range(2):  # what is kept from the first time is used the second time
        for got, want in zip(backend.look_up(b, columns), backend.look_up(a, lookups), strict=True):
            assert torch.equal(got, want)
        backend.update(a, lookups, STEP)
        backend.update(b, columns, STEP)
    assert all(torch.equal(x.weight, y.weight) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x.states[0], y.states[0]) for x, y in zip(a, b, strict=True))


def test_columns_that_do_not_fit_are_refused():
    tables, values, grad = Tables([table()]), numbers(1, 2, 3), torch.ones(3, 4)
    wrong = [
        Columns([0], [values], None, None, [False], [torch.ones(2, 4)]),
        Columns([0], [values], None, [torch.ones(2)], [False], [grad]),
        Columns([1], [values], None, None, [False], [grad]),
        Columns([-1], [values], None, None, [False], [grad]),
        Columns([0], [values], [numbers()], None, [False], [grad]),
        Columns([0], [values], [numbers(0, 1, 2, 4)], None, [False], [grad]),
        Columns([0, 0], [values], None, None, [False], [grad]),
        Columns([0], [numbers(10, 2, 3)], None, None, [False], [grad]),
    ]
    for columns in wrong:
        with pytest.raises(ValueError, match=r"must|one length"):
            NativeBackend().update(tables, columns, STEP)
    assert bool((tables[0].weight == 1).all())


def test_tables_that_are_kept_follow_their_memory():
    tables = Tables([table()])
    columns = Columns([0], [numbers(1)], None, None, [False], [torch.ones(1, 4)])
    backend = NativeBackend()
    backend.update(tables, columns, STEP)
    tables[0].weight.data = torch.full((3, 4), 2.0)
    tables[0].states[0].data = torch.zeros(3)
    assert backend.look_up(tables, columns)[0].tolist() == [[2.0] * 4]
    backend.update(tables, columns, STEP)
    assert (tables[0].weight != 2).any(1).tolist() == [False, True, False]
    tables[0].weight.data = torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        backend.look_up(tables, columns)


def test_outputs_are_float32_whatever_is_the_default():
    torch.set_default_dtype(torch.float64)
    try:
        one = Table(torch.ones(10, 4, dtype=torch.float32))
        lookup = Lookup(0, numbers(1, 2), grad=torch.ones(2, 4, dtype=torch.float32))
        for tables, lookups in (([one], [lookup]), (Tables([one]), by_column([lookup]))):
            (got,) = NativeBackend().look_up(tables, lookups)
            assert got.dtype is torch.float32
            assert got.tolist() == [[1.0] * 4] * 2
        (sums,) = NativeBackend().coalesce([one], [lookup])
        assert (sums.rows.tolist(), sums.grads.tolist()) == ([1, 2], [[1.0] * 4] * 2)
    finally:
        torch.set_default_dtype(torch.float32)
