"""The Triton kernels in Triton's interpreter, against the rules of the reference.

The interpreter has to be chosen before triton is imported, so all cases run in one process of their own, of
which this file is the script; each test looks up what became of its case.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from sampling import chosen
from triton_oracle import DTYPES, STEPS, check_output, check_update, lookup_of, spread, step_of, tables_of
from triton_process import hand_over, outcomes, run_alone
from triton_sorts import SORTS, case_sort

from keyedopt.fused.backends.interface import Lookup, RowGradients, Step, Table
from keyedopt.reference import rules

# --- the cases ------------------------------------------------------------------------------------

SIZES = ((40, 16), (7, 5), (300, 33))
LENGTHS = [0, 1, 2, 17, 0, 5]


def some_lookups(tables: list[Table]) -> list[Lookup]:
    """Look up all tables, the first by two features; with bags that are empty, and a row that is hot."""
    return [
        lookup_of(0, tables[0].weight, [40, *LENGTHS], 1, hot=45),
        lookup_of(1, tables[1].weight, LENGTHS, 2),
        lookup_of(2, tables[2].weight, LENGTHS, 3, hot=2),
        lookup_of(0, tables[0].weight, [0, 3, 3], 4),
    ]


def case_step(backend: Any, name: str, dtype: str, momentum: str = "float32") -> None:
    options = STEPS[name]
    tables = [
        replace(one, states=(one.states[0].to(DTYPES[momentum]), *one.states[1:])) if one.states else one
        for one in tables_of(SIZES, options, DTYPES[dtype])
    ]
    lookups = some_lookups(tables)
    for count in (1, 2):
        step = step_of(options, count=count, first=count == 1)
        check_update(backend, tables, lookups, step, options)


def case_width(backend: Any, width: int, dtype: str, name: str = "rowwise") -> None:
    options = STEPS[name]
    tables = tables_of([(20, width)], options, DTYPES[dtype])
    lookups = [lookup_of(0, tables[0].weight, [3, 0, 20, 4], 1, hot=18)]
    check_output(backend, tables, lookups)
    check_update(backend, tables, lookups, step_of(options), options)


def case_pooling(backend: Any, kind: str) -> None:
    options = STEPS["sgd"]
    tables = tables_of(SIZES, options, torch.float32)
    given: dict[str, Any] = dict.fromkeys(kind.split("_"), True)
    lookups = [
        lookup_of(0, tables[0].weight, LENGTHS, 1, hot=18, **given),
        lookup_of(1, tables[1].weight, [0, 0], 2, **given),
        lookup_of(2, tables[2].weight, LENGTHS, 3),
        lookup_of(0, tables[0].weight, [4], 4, **given),
    ]
    check_output(backend, tables, lookups)
    check_update(backend, tables, lookups, Step(lr=0.1, **options), options)


def case_nothing(backend: Any) -> None:
    tables = tables_of(SIZES, STEPS["adam"], torch.float32)
    lookups = [lookup_of(1, tables[1].weight, [0, 0], 1), lookup_of(0, tables[0].weight, [], 2)]
    check_output(backend, tables, lookups)
    check_update(backend, tables, lookups, Step(lr=0.1, **STEPS["adam"]), STEPS["adam"])
    assert backend.look_up(tables, []) == [] == backend.coalesce(tables, [])
    assert [one.grads.shape for one in backend.coalesce(tables, lookups)] == [(0, 16), (0, 5)]


def case_runs(backend: Any, lengths: list[int]) -> None:
    options = STEPS["sgd"]
    tables = tables_of([(len(lengths) + 1, 6)], options, torch.float32)
    values = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    values = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    grad = torch.randn(len(values), 6, generator=torch.Generator().manual_seed(2))
    lookups = [Lookup(0, values, grad=grad)]
    again = [Table(tables[0].weight.clone())]
    check_update(backend, tables, lookups, Step(lr=0.1, **options), options)
    backend.update(again, lookups, Step(lr=0.1, **options))
    assert torch.equal(again[0].weight, tables[0].weight), "the same update twice gave other bits"


def case_infinite(backend: Any) -> None:
    tables = tables_of([(5, 4)], STEPS["sgd"], torch.float32)
    values = torch.tensor([0] * 60 + [1, 1, 2, 3])
    grad = torch.ones(64, 4)
    grad[10, 0] = grad[60, 1] = torch.inf
    grad[62, 2] = torch.nan
    (sums,) = backend.coalesce(tables, [Lookup(0, values, grad=grad)])
    right = torch.tensor([[torch.inf, 60, 60, 60], [2, torch.inf, 2, 2], [1, 1, torch.nan, 1], [1, 1, 1, 1]])
    torch.testing.assert_close(sums.grads, right, equal_nan=True, rtol=0, atol=0)


def case_coalesce(backend: Any) -> None:
    options = STEPS["adam"]
    tables = tables_of(SIZES, options, torch.float32)
    lookups = some_lookups(tables)
    found = backend.coalesce(tables, lookups)
    assert [one.table for one in found] == [0, 1, 2]
    for one in found:
        mine = [lookup for lookup in lookups if lookup.table == one.table]
        rows, grads = rules.coalesce(
            torch.cat([lookup.values for lookup in mine]),
            torch.cat([spread(lookup, torch.float64) for lookup in mine]),
        )
        assert torch.equal(one.rows, rows)
        torch.testing.assert_close(one.grads.double(), grads, rtol=2e-7, atol=1e-6)
    # what was summed can be used afterwards, and gives the same as the update in one go
    one_go = tables_of(SIZES, options, torch.float32)
    step = Step(lr=0.1, **options)
    backend.update(one_go, lookups, step)
    backend.update_rows(tables, found, step)
    for left, right in zip(tables, one_go, strict=True):
        assert torch.equal(left.weight, right.weight)
        assert all(torch.equal(a, b) for a, b in zip(left.states, right.states, strict=True))


def case_padding_rows(backend: Any) -> None:
    """Sums without synchronizing have room for more rows than needed: padding rows, −1 and zero."""
    options = STEPS["adam"]
    step = Step(lr=0.1, **options)
    tables, twins = (tables_of(SIZES, options, torch.float32) for _ in range(2))
    lookups = some_lookups(tables)
    exact, roomy = backend.coalesce(tables, lookups), backend.coalesce_padded(tables, lookups)
    again = [Lookup(one.table, one.rows, grad=one.grads, padding=True) for one in (*roomy, *exact)]
    joined = backend.coalesce_padded(tables, again)
    for one, more, twice in zip(exact, roomy, joined, strict=True):
        values = sum(len(lookup.values) for lookup in lookups if lookup.table == one.table)
        assert len(more.rows) == min(values, SIZES[one.table][0])
        for other, factor in ((more, 1), (twice, 2)):
            count = len(one.rows)
            assert torch.equal(other.rows[:count], one.rows)
            assert torch.equal(other.grads[:count], factor * one.grads)
            assert (other.rows[count:] == -1).all()
            assert not other.grads[count:].any()
    assert len(roomy[0].rows) > len(exact[0].rows)
    backend.update_rows(tables, exact, step)
    backend.update_rows(twins, roomy, step)
    for left, right in zip(tables, twins, strict=True):
        assert torch.equal(left.weight, right.weight)
        assert all(torch.equal(a, b) for a, b in zip(left.states, right.states, strict=True))


def case_rows(backend: Any) -> None:
    options = STEPS["partial_lamb"]
    tables = tables_of(SIZES, options, torch.float16)
    rows = torch.tensor([0, 2, 3, 6])
    grads = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    given = [RowGradients(1, rows, grads.double()), RowGradients(0, rows[:0], grads[:0, :1].expand(0, 16))]
    lookups = [Lookup(1, rows, grad=grads)]
    other = tables_of(SIZES, options, torch.float16)
    step = Step(lr=0.1, **options)
    check_update(backend, other, lookups, step, options)
    backend.update_rows(tables, given, step)
    assert torch.equal(tables[1].weight, other[1].weight)


def case_device_numbers(backend: Any) -> None:
    for name in ("adam", "rowwise_decoupled", "sgd"):
        options = STEPS[name]
        numbers = (0.1, 3), (torch.tensor(0.1, dtype=torch.float64), torch.tensor(3))
        results = []
        for lr, count in numbers:
            tables = tables_of(SIZES, options, torch.float32)
            backend.update(tables, some_lookups(tables), Step(lr=lr, count=count, **options))
            results.append([tensor for table in tables for tensor in (table.weight, *table.states)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def case_prepared(backend: Any) -> None:
    options = STEPS["rowwise"]
    results = []
    for use in (False, True, "some", "reversed"):
        tables = tables_of(SIZES, options, torch.float32)
        lookups = some_lookups(tables)
        if use:
            prepared = backend.prepare(tables, lookups)
            assert all(one is not None for one in prepared)
            pairs = zip(lookups, prepared, strict=True)
            lookups = [replace(one, prepared=what) for one, what in pairs]
        if use == "some":  # a later backward pass of another graph: what was prepared does not fit
            lookups[1] = replace(lookups[1], prepared=None)
        backend.update(tables, lookups[::-1] if use == "reversed" else lookups, Step(lr=0.1, **options))
        results.append([tensor for table in tables for tensor in (table.weight, *table.states)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def case_views(backend: Any) -> None:
    """Gradients that are slices of one tensor, misaligned, or expanded from one number."""
    options = STEPS["sgd"]
    for grad in (
        torch.randn(4, 40)[:, 3:19],
        torch.randn(4, 40)[:, 16:32],
        torch.ones(()).expand(4, 16),
        torch.randn(4, 16).bfloat16(),
        torch.randn(4, 16).double(),
        torch.randn(16, 4).t(),
    ):
        tables = tables_of(SIZES, options, torch.float32)
        lookup = lookup_of(0, tables[0].weight, [2, 0, 3, 1], 1)
        check_update(backend, tables, [replace(lookup, grad=grad)], Step(lr=0.1, **options), options)


def case_far(backend: Any) -> None:
    """Elements beyond 2³¹, in few pages of memory that are really used."""
    for rows, width in ((2**28 + 40, 8), (2**31 + 40, 1)):
        near = torch.tensor([0, 7, 7])
        weight = torch.empty(rows, width, dtype=torch.float16)
        values = torch.cat([near, near + rows - 9])
        weight[values] = 1.0
        grad = torch.ones(6, width)
        (out,) = backend.look_up([Table(weight)], [Lookup(0, values)])
        assert torch.equal(out, torch.ones(6, width))
        backend.update([Table(weight)], [Lookup(0, values, grad=grad)], Step("sgd", lr=0.25))
        assert torch.equal(
            weight[values], torch.tensor([0.75, 0.5, 0.5] * 2).half()[:, None].expand(6, width)
        )


def case_random(backend: Any, dtype: str) -> None:
    """Rounded at random, a weight lies beside the exact value, and is right in the mean."""
    half = DTYPES[dtype]
    rows, width = 256, 64
    start = torch.linspace(-3.0, 3.0, rows * width).reshape(rows, width).to(half)
    start[0, 0] = 2.0**-20  # a subnormal number of float16
    grad = torch.full((rows, width), 0.001).where(torch.arange(width) % 2 == 0, -0.0007)
    exact = start.double() - grad.double()
    lookup = Lookup(0, torch.arange(rows), grad=grad)
    mean = torch.zeros_like(exact)
    draws, runs = 8, []
    for seed in range(draws):
        weight = start.clone()
        backend.update([Table(weight)], [lookup], Step("sgd", lr=1.0, seed=seed))
        runs.append(weight)
        mean += weight.double() / draws
    again = start.clone()
    backend.update([Table(again)], [lookup], Step("sgd", lr=1.0, seed=0))
    assert torch.equal(again, runs[0])
    assert not torch.equal(runs[0], runs[1])
    info = torch.finfo(half)
    unit = 2.0 ** exact.abs().clamp(min=info.tiny).log2().floor() * info.eps
    assert ((runs[0].double() - exact).abs() <= unit).all()
    error = (mean - exact) / unit
    # the mean of `draws` times 16384 errors of a standard deviation of at most half a unit
    assert abs(error.mean().item()) < 4 * 0.5 / (draws * rows * width) ** 0.5, error.mean()
    nearest = (exact.to(half).double() - exact) / unit
    assert error.pow(2).mean() < nearest.pow(2).mean()


def case_refusals(backend: Any) -> None:
    options = STEPS["rowwise"]
    (table,) = tables_of([(4, 4)], options, torch.float32)
    step = Step(lr=0.1, **options)
    assert backend.refuses([table], step) == "" == backend.missing()
    assert "max_norm" in backend.refuses([table], Step("sgd", 0.1, max_norm=1.0))
    assert "ftrl" in backend.refuses([table], Step("ftrl", 0.1))
    assert "float64" in backend.refuses([replace(table, weight=table.weight.double())], step)
    assert "float64" in backend.refuses([replace(table, states=(table.states[0].double(),))], step)
    assert "contiguous" in backend.refuses([replace(table, weight=table.weight.t())], step)
    assert "4096" in backend.refuses([Table(torch.zeros(1, 4097))], step)
    wide, turned = replace(table, weight=torch.ones(3, 4)), replace(table, weight=torch.ones(4, 4).t())
    counted = replace(table, row_counter=torch.zeros(4, dtype=torch.int32))
    for other, why in ((wide, "does not go with"), (turned, "contiguous"), (counted, "row counter")):
        assert why in backend.refuses([other], step)
        kept, message = [other.weight.clone(), other.states[0].clone()], ""
        try:  # put there when the backend had been chosen
            backend.update([other], [lookup_of(0, other.weight, [2], 1)], step)
        except ValueError as error:
            message = str(error)
        assert why in message
        assert torch.equal(other.weight, kept[0])
        assert torch.equal(other.states[0], kept[1])


def cases() -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Name every case."""
    for name in STEPS:
        yield f"step-{name}-float32", partial(case_step, name=name, dtype="float32")
    for name in ("sgd_momentum", "rowwise_l2_norm", "adam", "partial_lamb"):
        for dtype in ("float16", "bfloat16"):
            yield f"step-{name}-{dtype}", partial(case_step, name=name, dtype=dtype)
    for name in ("sgd_momentum", "lars", "adam", "partial_lamb"):
        for momentum in ("float16", "bfloat16"):
            case = partial(case_step, name=name, dtype="float32", momentum=momentum)
            yield f"step-{name}-momentum-{momentum}", case
    yield "step-adam-all-bfloat16", partial(case_step, name="adam", dtype="bfloat16", momentum="bfloat16")
    for width in (1, 2, 3, 8, 100, 257, 1000, 4096):
        yield f"width-{width}", partial(case_width, width=width, dtype="float32")
    yield "width-1000-counted", partial(case_width, width=1000, dtype="float32", name="adamw_counted")
    for width in (7, 24, 64):
        yield f"width-{width}-bfloat16", partial(case_width, width=width, dtype="bfloat16")
    for kind in ("sum", "mean", "weighted", "weighted_mean", "unpooled", "unpooled_weighted"):
        yield f"pooling-{kind}", partial(case_pooling, kind=kind)
    for name, lengths in RUNS.items():
        yield f"runs-{name}", partial(case_runs, lengths=lengths)
    for dtype in ("float16", "bfloat16"):
        yield f"random-{dtype}", partial(case_random, dtype=dtype)
    for name, case in SORTS.items():
        yield f"sort-{name}", partial(case_sort, **case)
    others = (
        case_nothing,
        case_infinite,
        case_coalesce,
        case_padding_rows,
        case_rows,
        case_device_numbers,
        case_prepared,
    )
    for function in (*others, case_views, case_far, case_refusals):
        yield function.__name__.removeprefix("case_"), function


RUNS = {
    "ones": [1] * 50,
    "twos": [2] * 40,
    "one": [1],
    "all_the_same": [200],
    "chunks": [16, 16, 17, 15, 32, 33, 48],
    "hot_between": [1, 3, 70, 2, 1, 90, 1],
    "blocks": [8, 8, 8, 8],
}


def names() -> list[str]:
    return [name for name, _ in cases()]


# --- in the process with the interpreter ----------------------------------------------------------


def run_cases(names: Collection[str]) -> dict[str, str]:
    """Run cases; return what went wrong in each, empty where nothing did."""
    from keyedopt.fused.backends.triton import TritonBackend
    from keyedopt.fused.backends.triton.shapes import Tuning

    torch.set_num_threads(1)
    small = TritonBackend(Tuning(block=16, chunk=8, fold=2, values=16, probes=4, tile=128))
    return outcomes(
        (name, partial(case, TritonBackend() if name.startswith("random") else small))
        for name, case in cases()
        if name in names
    )


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(tmp_path_factory, __file__, *chosen(request, "name"))


@pytest.mark.complete(sample=6)
@pytest.mark.parametrize("name", names())
def test_interpreted(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


if __name__ == "__main__":
    hand_over(run_cases(sys.argv[1:-1]))
