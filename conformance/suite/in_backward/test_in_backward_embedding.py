"""Optimizers in the backward pass, applied to the tables of embedding modules."""

import copy

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import set_options
from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.described import MissingName, named
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    collection,
    fit,
    jagged,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.inputs import INTERPRETED, parameter, values


@pytest.mark.clause("INBW-032")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("created", ["SGD", "Adagrad", "Adam"])
def test_optimizer_of_another_type(impl, created):
    """For a table created with an optimizer, another type raises; the same type is used."""
    module, explicit = collection(impl, created), collection(impl, created, {"lr": 0.5})
    before = values(tables_of(module))
    other = {"SGD": "Adagrad", "Adagrad": "SGD", "Adam": "SparseAdam"}[created]
    expect_raises(
        lambda: apply_in_backward(impl, getattr(torch.optim, other), module.parameters()),
        ValueError,
        expected=f"an error for {other} with tables with {created}",
    )
    expect_equal(len(tables_of(module)), 2, "the tables of the optimizer")
    for old, new in zip(before, tables_of(module).values(), strict=True):
        expect_bits(new.detach(), old, "a table")
    apply_in_backward(impl, getattr(torch.optim, created), module.parameters(), {"lr": 0.5})
    for one in (module, explicit):
        fit(one, jagged(BAGS))
    for name, table in tables_of(module).items():
        expect_bits(table.detach(), tables_of(explicit)[name].detach(), f"table {name}")


@pytest.mark.clause("INBW-016")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("first", ["parameter", "table"])
def test_a_table_that_refuses(impl, first):
    """A call that raises because of a table applies no optimizer to a parameter in the same list."""
    module, weight = collection(impl, "SGD"), parameter(3)
    listed = [weight, *module.parameters()]
    expect_raises(
        lambda: apply_in_backward(
            impl, torch.optim.Adagrad, listed if first == "parameter" else listed[::-1]
        ),
        ValueError,
        expected="an error for Adagrad with tables with SGD",
    )
    before = weight.detach().clone()
    weight.sum().backward()
    expect_bits(weight.detach(), before, "the parameter after a backward pass")
    expect_bits(weight.grad, torch.ones_like(before), "its gradient")


@pytest.mark.clause("INBW-033")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("copied", [False, True])
def test_embedding_module(impl, copied):
    """The tables of an embedding module, or of a copy, are trained in its own backward pass."""
    bags = jagged(BAGS)
    module, other = collection(impl, None), collection(impl, "SGD", {"lr": 0.25})
    module = copy.deepcopy(module) if copied else module
    apply_in_backward(impl, torch.optim.SGD, module.parameters())
    for one in (module, other):
        fit(one, bags, steps=2)
    expected = dict(other.named_parameters())
    expect_equal(len(expected), 2, "the tables")
    expect_equal(set(tables_of(module)), {"t", "u"}, "the tables of the fused optimizer")
    for name, table in module.named_parameters():
        expect_bits(table.detach(), expected[name].detach(), f"table {name}")


@pytest.mark.clause("INBW-033")
@pytest.mark.needs("EmbeddingBagCollection")
def test_several_modules_of_a_call(impl):
    """One call sets the optimizer of the tables of several modules, beside a dense parameter."""
    modules, dense = [collection(impl, None) for _ in range(2)], parameter(3)
    other, before = collection(impl, "SGD", {"lr": 0.25}), dense.detach().clone()
    listed = [*modules[0].parameters(), dense, *modules[1].parameters()]
    apply_in_backward(impl, torch.optim.SGD, listed)
    dense.sum().backward()
    expect_bits(dense.detach(), before - 0.25, "the dense parameter")
    for one in (*modules, other):
        fit(one, jagged(BAGS), steps=2)
    for place, module in enumerate(modules):
        for name, table in tables_of(other).items():
            expect_bits(tables_of(module)[name].detach(), table.detach(), f"table {name} of module {place}")


@pytest.mark.clause("INBW-033")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("last", ["t", "u"])
def test_tables_that_were_looked_up_before(impl, last):
    """Each table is trained from when it gets an optimizer, also if that is after lookups."""
    module, other = collection(impl, None), collection(impl, "SGD", {"lr": 0.25})
    shown = dict(sorted(module.named_parameters(), key=lambda named: last in named[0].split(".")))
    for table in shown.values():
        module(jagged(BAGS))
        apply_in_backward(impl, torch.optim.SGD, [table])
    for one in (module, other):
        fit(one, jagged(BAGS), steps=2)
    expected = dict(other.named_parameters())
    for name, table in shown.items():
        expect_bits(table.detach(), expected[name].detach(), f"table {name}")


@pytest.mark.clause("INBW-035")
@pytest.mark.needs("EmbeddingBagCollection", "in_backward_optimizer_filter")
def test_filter_of_tables(impl):
    """A table has an optimizer from when one is applied, not before."""
    module = collection(impl, None)
    names = [name for name, _ in module.named_parameters()]
    for applied in range(len(names) + 1):
        halves = [
            [name for name, _ in impl.in_backward_optimizer_filter(module.named_parameters(), include)]
            for include in (True, False)
        ]
        expect_equal(halves, [names[:applied], names[applied:]], "those with an optimizer, and the others")
        apply_in_backward(impl, torch.optim.SGD, list(module.parameters())[applied : applied + 1])


@pytest.mark.clause("INBW-033")
@pytest.mark.needs("EmbeddingBagCollection")
def test_tables_with_rates_of_their_own(impl):
    """Each table is trained with its own learning rate."""
    module, rates = collection(impl, None), {"t": (6, 0.5), "u": (5, 0.0625)}
    for rows, rate in rates.values():
        chosen = [table for table in module.parameters() if len(table) == rows]
        apply_in_backward(impl, torch.optim.SGD, chosen, {"lr": rate})
    fit(module, jagged(BAGS), steps=2)
    for name, (_, rate) in rates.items():
        other = collection(impl, "SGD", {"lr": rate})
        fit(other, jagged(BAGS), steps=2)
        expect_bits(tables_of(module)[name].detach(), tables_of(other)[name].detach(), f"table {name}")


@pytest.mark.clause("INBW-033")
@pytest.mark.needs("EmbeddingBagCollection")
def test_some_tables(impl):
    """A table without an optimizer keeps its gradient, beside one that is trained."""
    module, other = collection(impl, None), collection(impl, "SGD", {"lr": 0.25})
    table, left = sorted(module.parameters(), key=len, reverse=True)
    before = left.detach().clone()
    apply_in_backward(impl, torch.optim.SGD, [table])
    fit(module, jagged(BAGS))
    fit(other, jagged(BAGS))
    expect_bits(table.detach(), tables_of(other)["t"].detach(), "the trained table")
    expect_bits(left.detach(), before, "the other table")
    grad = torch.zeros_like(left) if left.grad is None else left.grad.to_dense()
    moved = (before - tables_of(other)["u"].detach()).double()
    expect_close(grad * 0.25, moved, "its gradient, times the learning rate,", ulps=2**10)


#: Options other than the learning rate, for each optimizer.
WITH_OPTIONS = {
    "SGD": {"lr": 0.25, "momentum": 0.5},
    "Adagrad": {"lr": 0.25, "eps": 0.5, "initial_accumulator_value": 0.25},
    "Adam": {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.125},
}


@pytest.mark.clause("INBW-033")
@pytest.mark.needs("EmbeddingBagCollection", "{name}")
@pytest.mark.parametrize("name", ["Adam"] if INTERPRETED else list(WITH_OPTIONS))
def test_all_options(impl, name):
    """Tables are trained with every given option, not only the learning rate."""
    module, other = collection(impl, None), collection(impl, name, WITH_OPTIONS[name])
    apply_in_backward(impl, getattr(impl, name), module.parameters(), WITH_OPTIONS[name])
    for one in (module, other):
        fit(one, jagged(BAGS), steps=2)
    for table, weight in tables_of(module).items():
        expect_bits(weight.detach(), tables_of(other)[table].detach(), f"table {table}")


#: Options of a second call for `WITH_OPTIONS`.
LATER_OPTIONS = {
    "SGD": {"lr": 0.5, "momentum": 0.75},
    "Adagrad": {"lr": 0.5, "eps": 0.125, "initial_accumulator_value": 0.25},
    "Adam": {"lr": 0.5, "betas": (0.75, 0.5), "eps": 0.25},
}


@pytest.mark.clause("INBW-033")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("chosen", [["t"], ["u"], ["t", "u"]], ids="".join)
@pytest.mark.parametrize("steps", [0, 2])
def test_options_of_the_last_call(impl, steps, chosen):
    """After another call with the same optimizer class, tables are trained with the options of that call."""
    module = collection(impl, None)
    apply_in_backward(impl, torch.optim.SGD, module.parameters(), {"lr": 0.25})
    fit(module, jagged(BAGS), steps=steps)
    others = {}
    for name in ("t", "u"):
        others[name] = collection(impl, "SGD", {"lr": 0.5 if name in chosen else 0.25})
        with torch.no_grad():
            for key, table in tables_of(others[name]).items():
                table.copy_(tables_of(module)[key])
    tables = [table for name, table in tables_of(module).items() if name in chosen]
    if error_of(lambda: apply_in_backward(impl, torch.optim.SGD, tables, {"lr": 0.5})):
        return
    for one in (module, *others.values()):
        fit(one, jagged(BAGS), steps=2, seed=7)
    for name, other in others.items():
        expect_bits(tables_of(module)[name].detach(), tables_of(other)[name].detach(), f"table {name}")


@pytest.mark.clause("INBW-054")
@pytest.mark.needs("EmbeddingBagCollection", "{name}")
@pytest.mark.parametrize("name", ["Adam"] if INTERPRETED else list(WITH_OPTIONS))
@pytest.mark.parametrize("chosen", [["t"], ["u"], ["t", "u"]], ids="".join)
def test_state_after_another_call(impl, name, chosen):
    """Another call for tables that have trained sets their options and keeps their state, or raises."""
    kind, later = getattr(impl, name), LATER_OPTIONS[name]
    modules = [collection(impl, None) for _ in range(2)]
    for module in modules:
        # In groups of one table, whose options the case can set.
        for table in list(tables_of(module).values()):
            apply_in_backward(impl, kind, [table], WITH_OPTIONS[name])
        fit(module, jagged(BAGS), steps=2)
    module, other = modules
    tables = [table for key, table in tables_of(module).items() if key in chosen]
    before = snapshot(tables_and_state(module))
    if error_of(lambda: apply_in_backward(impl, kind, tables, later)):
        expect_unchanged(before, tables_and_state(module), "tables and state after an error")
        return
    expect_unchanged(before, tables_and_state(module), "tables and state after another call")
    expected = {id(tables_of(other)[key]) for key in chosen}
    groups = [
        group
        for group in other.fused_optimizer.param_groups
        if expected & {id(table) for table in group["params"]}
    ]
    if len(groups) != len(chosen):
        raise MissingName("tables have no groups of their own", name="EmbeddingBagCollection.groups")
    for group in groups:
        set_options(group, named(impl, name, later))
    for one in modules:
        fit(one, jagged(BAGS), steps=2, seed=7)
    for key, table in tables_of(module).items():
        expect_bits(table.detach(), tables_of(other)[key].detach(), f"table {key}")


@pytest.mark.clause("INBW-054")
@pytest.mark.plain_only("it counts groups")
@pytest.mark.needs("EmbeddingBagCollection", "SGD")
def test_groups_after_another_call(impl):
    """After another call for all tables each group has tables, and its options."""
    module = collection(impl, "SGD")
    tables = list(tables_of(module).values())
    if error_of(lambda: apply_in_backward(impl, torch.optim.SGD, tables, {"lr": 0.5})):
        return
    groups = list(module.fused_optimizer.param_groups)
    expect(all(group["params"] for group in groups), "tables in each group", groups)
    expect_equal({float(group["lr"]) for group in groups}, {0.5}, "rates of all groups")
