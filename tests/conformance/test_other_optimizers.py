"""Optimizers whose formula the suite does not know are judged by what torch promises of every optimizer."""

import pytest
import torch
from making import TARGETS

from keyedopt.conformance.results.verdict import NOT_CLAIMED, PARTLY, judge, shown_outcomes
from keyedopt.conformance.run import runner
from keyedopt.conformance.suite.support.algorithms import OTHER
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import TargetError
from keyedopt.conformance.targets.proposal import propose

slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)
#: What torch's documents say of every optimizer, as far as one without a formula can be judged by it.
MUSTS = ("ALGO-031", "ALGO-041", "ALGO-050", "ALGO-051", "ALGO-052", "ALGO-066", "ALGO-069", "ALGO-072")
MUSTS += ("ALGO-073", "ALGO-077", "ALGO-081", "ALGO-082", "ALGO-083", "ALGO-088")
#: Classes of torch that have none of the public names, and the musts that they break.
OF_TORCH: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Adafactor", "Adamax", "ASGD", "RAdam", "RMSprop", "Rprop"), ()),
    "NAdam": ("ALGO-072",),  # a load converts the product of its momentums to float16
}
OF_TORCH |= {"Muon": ()} if hasattr(torch.optim, "Muon") else {}
#: Faults, each with the clauses that reject it.
FAULTS = {
    "LosesOption": ("ALGO-073",),
    "IgnoresClosure": ("ALGO-050",),
    "CopySharesState": ("ALGO-081",),
    "StepsMissing": ("ALGO-031",),
    "DecaysGradient": ("ALGO-041",),
    "GroupsShareTheFirst": ("ALGO-083", "ALGO-092"),
    "IgnoresRate": ("ALGO-088",),
    "TrainsFirstGroup": ("ALGO-082",),
    "DividesByZero": ("ALGO-032",),
    "StateByPosition": ("ALGO-072",),
}


def failing(target, clauses=()):
    result = runner.run(target, runner.Options(areas=("algorithms",), clauses=clauses), path=[TARGETS])
    return result, {
        clause for case in result.cases if case.outcome in ("fail", "error") for clause in case.clauses
    }


@slow
@pytest.mark.parametrize("name", OF_TORCH)
def test_a_class_of_torch_fails_only_the_musts_that_it_breaks(name):
    result, bad = failing(f"torch.optim:{name}", MUSTS)
    assert bad == set(OF_TORCH[name]), [case.seen for case in result.cases if case.outcome == "fail"]
    assert {case.clauses[0] for case in result.cases if case.outcome == "pass"} >= set(MUSTS) - bad


@slow
def test_formulas_are_not_claimed():
    result, bad = failing("other:Lion")
    outcomes = shown_outcomes(result)
    assert not bad & set(MUSTS).union(*FAULTS.values())
    assert {outcomes[clause] for clause in ("ALGO-001", "ALGO-010", "ALGO-034", "ALGO-070")} == {NOT_CLAIMED}
    assert {outcomes[clause] for clause in MUSTS} == {"pass"}
    assert judge(result).word == PARTLY


@slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_rejected(name):
    _, bad = failing(f"other:{name}", FAULTS[name])
    assert bad == set(FAULTS[name])


@slow
@pytest.mark.parametrize("name", ["Estimating", "WithoutDecay", "WithoutRate"])
def test_what_a_class_cannot_be_asked_is_not_claimed(name):
    result, bad = failing(f"other:{name}", (*MUSTS, "ALGO-092", "ALGO-099"))
    assert bad == set(), [case.seen for case in result.cases if case.outcome == "fail"]
    assert sum(case.outcome == "pass" for case in result.cases) > 8


@slow
def test_an_optimizer_of_ours_is_sound_as_any_other(tmp_path):
    (tmp_path / "ours.py").write_text(
        "from keyedopt.conformance.targets.implementation import Implementation\n"
        f"ADAM = Implementation('ours', 'keyedopt.reference', {{{OTHER!r}: 'keyedopt.reference:Adam'}},\n"
        "    areas=('algorithms',), absent=('[!O]*',))\n",
        encoding="utf-8",
    )
    result = runner.run("ours:ADAM", runner.Options(areas=("algorithms",)), path=[str(tmp_path)])
    assert [f"{case.case}: {case.seen}" for case in result.cases if case.outcome in ("fail", "error")] == []
    assert sum(case.outcome == "pass" for case in result.cases) > 60


def test_a_proposal_names_it_and_says_how_the_others_are_judged(monkeypatch):
    monkeypatch.syspath_prepend(TARGETS)
    found = propose("other", by_words=True)
    assert (found.names, found.areas) == ({OTHER: "other:Lion"}, ("algorithms",))
    assert any("`keyedopt check other:LosesOption` judges it" in note for note in found.notes)
    assert any("other:Lion is judged as OtherOptimizer" in note for note in found.notes)
    assert propose(f"{OTHER}=other:Line", by_words=True).names == {}
    assert propose("other:WithoutRate").fixed_options == {f"{OTHER}.lr": 0.1}
    assert propose("other:Lion", "torch.optim:Adam").names == {
        OTHER: "other:Lion",
        "Adam": "torch.optim:Adam",
    }


def test_an_optimizer_that_requires_a_closure_is_refused_with_the_reason(monkeypatch):
    monkeypatch.syspath_prepend(TARGETS)
    for target in ("other:Line", "torch.optim:LBFGS"):
        with pytest.raises(TargetError, match="requires a closure"):
            find(target)
