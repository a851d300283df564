"""Clauses hold in the dimensions that they name: for the second of everything, not only for the first."""

import collections
import copy
import itertools

import pytest
import torch

from keyedopt.conformance import spec
from keyedopt.conformance.run import case_sources, runner
from keyedopt.conformance.run.variation import situations
from keyedopt.conformance.suite.support import inputs
from keyedopt.conformance.suite.support.assertions import Mismatch
from keyedopt.conformance.suite.support.embedding import ONE_TABLE, collection, fit, jagged
from keyedopt.conformance.suite.support.replicas import ScriptedManager
from keyedopt.conformance.suite.support.situations import among, in_situation, of_state
from keyedopt.conformance.targets.find import find

VARYING = {clause.id: clause for clause in spec.clauses().values() if clause.varies}


@pytest.fixture(scope="module")
def reference():
    return find("reference").surface()


def test_dimensions_are_described_and_used():
    assert {name for clause in VARYING.values() for name in clause.varies} == {*spec.dimensions()}
    assert {*spec.dimensions()} > spec.STRUCTURE


def test_each_clause_names_dimensions_or_says_why_not():
    judged = [clause for clause in spec.clauses().values() if clause.level != "recorded"]
    unlike = [one.id for one in judged if bool(one.varies) + bool(one.plain_only) + one.situations != 1]
    assert unlike == []
    assert {one.plain_only for one in judged if one.plain_only} == {*spec.reasons_plain_only()}


@pytest.mark.parametrize("clause", VARYING.values(), ids=VARYING)
def test_situations_have_every_dimension_of_the_clause(clause):
    chosen = [one.split("+") for one in situations(clause)]
    assert {name for one in chosen for name in one} == {*clause.varies}
    assert len(chosen) <= 5
    if spec.STRUCTURE.intersection(clause.varies):
        own_last = [one for one in chosen if (spec.STRUCTURE - {"last"}).issuperset(one)]
        assert own_last, "in no situation of the clause itself is the case the second of what it makes"
    assert spec.STRUCTURE.issuperset(clause.varies) or spec.clause_of_situations(clause.area)


@pytest.mark.parametrize("area", sorted({clause.area for clause in VARYING.values()}))
def test_pairs_of_dimensions_meet_in_the_cases_of_an_area(area):
    clauses = [clause for clause in VARYING.values() if clause.area == area]
    met = {pair for clause in clauses for one in situations(clause) for pair in _pairs(one.split("+"))}
    named = collections.Counter(pair for clause in clauses for pair in _pairs(clause.varies))
    apart = [
        {"group", "parameter"},
        {"layout", "parameter"},
        {"table", "feature"},
        {"frozen", "dtype"},
        {"frozen", "layout"},
    ]
    apart += [{"copy", "load"}, {"tensor-lr", "parameter"}, {"frozen", "feature"}]
    apart += [{"backend", one} for one in {*spec.dimensions()} - spec.STRUCTURE]
    missing = [pair for pair, count in named.items() if count >= 12 and pair not in met]
    assert [pair for pair in missing if {*pair} not in apart] == []


def _pairs(names):
    return set(itertools.combinations(sorted(names), 2))


def test_what_cases_built_is_what_their_clauses_name(on_reference):
    """Recorded in a run, not declared. The reference has one backend, so none runs on another one."""
    varied = [case for case in on_reference.cases if "situation" in case.inputs]
    assert any(case.built for case in varied)
    if on_reference.options["clauses"]:  # a sample: other clauses share its cases
        return
    in_vain = [case.case for case in varied if case.outcome == "pass" and not case.built]
    assert in_vain == []
    clauses = {f"{case.file}::{case.name}": case.clauses for case in case_sources.cases()}
    built: dict[str, set[str]] = collections.defaultdict(set)
    for case in varied:
        for clause in clauses[case.case.partition("[")[0]]:
            built[clause].update(filter(None, case.built.split("+")))
    lost = {name: {*VARYING[name].varies} - built[name] - {"backend"} for name in VARYING}
    assert {name: dimensions for name, dimensions in lost.items() if dimensions} == {}


def test_each_function_of_a_clause_runs_on_another_backend_in_each_dtype():
    here, there = (
        runner.run(one, runner.Options(clauses=("FUSED-086",))).cases for one in ("fused", "reference")
    )
    ran = collections.defaultdict(set)
    for case in here:
        if case.outcome == "pass":
            ran[case.inputs.get("situation") == "backend"].add((case.case.partition("[")[0], case.dtype))
    assert len(ran[True]) > 10
    assert ran[True] == ran[False]
    assert not [case.case for case in there if case.inputs.get("situation") == "backend"]


def test_the_second_group_is_unlike(reference):
    weight = inputs.parameter(4, 3)
    optimizer = among(reference, "group+tensor-lr").Adam([weight], lr=0.1)
    first, second = optimizer.param_groups
    assert second["params"] == [weight]
    assert second["lr"] == 0.1
    assert first["lr"] != 0.1
    assert isinstance(first["lr"], torch.Tensor)
    assert first["weight_decay"] != second["weight_decay"]


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("dimension", ["group", "parameter"])
def test_what_is_beside_a_parameter_does_not_change_it(reference, dimension, place):
    alone, beside = inputs.parameters(2), inputs.parameters(2)
    situation = dimension if place == "first" else f"{dimension}+last"
    inputs.train(inputs.adam(reference, alone), alone, 3)
    made = inputs.adam(among(reference, situation), beside)
    inputs.train(made, beside, 3)
    assert len(made.params) == 3
    assert list(made.params).index("beside_p0") == (0 if place == "first" else 2)
    for key, param in alone.items():
        torch.testing.assert_close(beside[key], param, rtol=0, atol=0)


def test_a_copy_and_a_reload_train_the_given_parameters(reference):
    params, plain = inputs.parameters(), inputs.parameters()
    made = among(reference, "parameter+copy+load")
    inputs.train(inputs.adam(made, params), params, 3)
    inputs.train(inputs.adam(reference, plain), plain, 3)
    assert {*made.built} == {"parameter", "copy", "load"}
    for key, param in plain.items():
        torch.testing.assert_close(params[key], param, rtol=0, atol=0)


@pytest.mark.parametrize("situation", ["group", "group+last", "parameter+dtype", "parameter+nesting"])
def test_an_optimizer_of_given_state_hides_what_is_beside(reference, situation):
    param = inputs.parameter(3)
    made = among(reference, situation)
    optimizer = made.KeyedOptimizer(
        {"p": param}, {param: {"m": torch.ones(3)}}, [{"params": [param], "lr": 0.5}]
    )
    optimizer.save_param_groups(True)
    assert isinstance(optimizer, reference.KeyedOptimizer)
    assert {*situation.split("+")} <= {*made.built}
    assert [*optimizer.params] == ["p"]
    saved = optimizer.state_dict()
    assert [*saved["state"]] == ["p"]
    assert [group["params"] for group in saved["param_groups"]] == [["p"]]
    groups = [{"params": ["p"], "lr": 0.25}]
    optimizer.load_state_dict({"state": {"p": {"m": torch.zeros(3)}}, "param_groups": groups})
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
    torch.testing.assert_close(optimizer.state[param]["m"], torch.zeros(3))


@pytest.mark.parametrize(("part", "situation"), [("state", "parameter"), ("param_groups", "group+last")])
def test_what_is_not_loaded_beside_is_noticed(reference, part, situation):
    class Forgetful(reference.KeyedOptimizer):
        def load_state_dict(self, state_dict):
            super().load_state_dict({**state_dict, part: self.state_dict()[part]})

    param = inputs.parameter(3)
    groups = [{"params": [param], "lr": 0.5}]
    state = {param: {"m": torch.ones(3)}}
    optimizer = of_state(among(reference, situation), Forgetful, {"p": param}, state, groups)
    optimizer.save_param_groups(True)
    with pytest.raises(Mismatch, match="beside the others, after a load"):
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("situation", ["group", "group+last", "parameter", "parameter+last"])
def test_a_parameter_beside_is_in_the_backward_pass(reference, situation):
    param = inputs.parameter(3)
    made = among(reference, situation)
    made.apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
    ((beside, _),) = [(one, before) for _, one, before in made._unmoved]
    assert beside._in_backward_optimizers[0].param_groups[0]["lr"] == (
        0.5 if "parameter" in situation else 0.34375
    )
    param.sum().backward()
    made.check()
    beside.sum().backward()
    with pytest.raises(Mismatch, match="a parameter without gradient beside"):
        made.check()


@pytest.mark.parametrize("situation", ["group", "group+last", "parameter", "parameter+last"])
def test_an_optimizer_of_torch_in_a_fault_tolerant_one_has_more(reference, situation):
    param = inputs.parameter(3)
    inner = torch.optim.SGD([param], lr=0.5)
    among(reference, situation).FaultTolerantOptimizer(ScriptedManager(), inner)
    listed = [one for group in inner.param_groups for one in group["params"]]
    assert len(listed) == 2
    assert listed[0 if "last" in situation else 1] is param
    assert len(inner.param_groups) == (1 if "parameter" in situation else 2)


@pytest.mark.parametrize("situation", ["table", "table+last", "feature", "feature+last"])
def test_the_other_table_has_a_gradient_of_its_own(reference, situation):
    alone, made = (
        collection(reference, tables=ONE_TABLE),
        collection(among(reference, situation), tables=ONE_TABLE),
    )
    before = {name: table.detach().clone() for name, table in made.fused_optimizer.params.items()}
    for module in (alone, made):
        fit(module, jagged({"f": [[0, 1], [5]]}), steps=2)
    tables = made.fused_optimizer.params
    torch.testing.assert_close(tables["t.weight"], alone.fused_optimizer.params["t.weight"], rtol=0, atol=0)
    if "beside.weight" in tables:  # two lookups of row 2 and one of row 0, in two steps
        moved = (before["beside.weight"] - tables["beside.weight"]) / 0.125
        torch.testing.assert_close(moved[:, 0].detach(), torch.tensor([2.0, 0.0, 4.0]))


def test_a_frozen_table_that_is_trained_is_noticed(reference):
    def case(impl):
        module = collection(impl, tables=ONE_TABLE)
        fit(module, jagged({"f": [[0]]}))
        if broken:
            module.fused_optimizer.params["beside.weight"].detach().add_(1.0)

    broken = False
    in_situation(case, reference, "table+frozen")
    broken = True
    with pytest.raises(Mismatch, match="a frozen table beside"):
        in_situation(case, reference, "table+frozen")


def test_classes_in_a_situation_are_still_classes(reference):
    made = among(reference, "group")
    adam = made.Adam([inputs.parameter(2, 2)])
    assert isinstance(adam, reference.Adam)
    assert isinstance(adam, made.Adam)

    class Mine(made.KeyedOptimizer):
        pass

    assert issubclass(Mine, reference.KeyedOptimizer)
    assert isinstance(copy.deepcopy(adam), reference.Adam)
