"""The specification is complete and traceable: every clause, case, cell and source is accounted for."""

import pytest

from keyedopt.conformance import mutants, spec
from keyedopt.conformance.run import case_sources
from keyedopt.conformance.spec import sentences
from keyedopt.tools import spec_pages


@pytest.mark.parametrize("area", spec.areas())
def test_clause_ids_count_up_from_one_with_the_prefix_of_the_area(area):
    prefix = spec.areas()[area].prefix
    ids = [clause.id for clause in spec.areas()[area].clauses]
    assert ids == [f"{prefix}-{number:03}" for number in range(1, len(ids) + 1)]


@pytest.mark.parametrize("clause", spec.clauses().values(), ids=lambda clause: clause.id)
def test_every_clause_is_well_formed(clause):
    assert clause.level in spec.LEVELS
    assert spec.version_key(clause.since) <= spec.version_key(spec.SUITE_VERSION)
    assert clause.statement.strip().endswith(".")
    assert clause.covers
    assert set(clause.rules) <= set(sentences.rules())
    stated = sentences.by_clause().get(clause.id)
    if clause.level == "must":
        assert stated, "no sentence of a document says what this must asks"
    assert stated or clause.rationale, "a clause without a sentence needs its reason"


def test_every_clause_has_a_case():
    missing = set(spec.clauses()) - set(case_sources.cases_by_clause())
    assert missing == {clause.id for clause in spec.clauses().values() if clause.situations}


def test_every_case_names_clauses_that_exist_and_says_what_it_expects():
    for case in case_sources.cases():
        assert case.clauses, f"{case.file}::{case.name} names no clause"
        assert set(case.clauses) <= set(spec.clauses()), case
        assert case.expectation, f"{case.file}::{case.name} does not say what it expects"


def test_a_case_of_an_observe_clause_tests_nothing_else():
    for case in case_sources.cases():
        levels = {spec.clauses()[clause].level for clause in case.clauses}
        assert levels == {"recorded"} or "recorded" not in levels, case


@pytest.mark.parametrize("area", spec.areas())
def test_every_cell_of_the_matrix_has_clauses_or_a_reason_and_not_both(area):
    about = spec.areas()[area]
    assert about.methods
    for method in about.methods:
        for situation in spec.situations():
            covering, reasons = spec_pages.cell(about, method, situation)
            assert bool(covering) != bool(reasons), f"{method}/{situation}: {covering} {reasons}"


@pytest.mark.parametrize("area", spec.areas())
def test_the_matrix_speaks_of_its_own_methods_and_situations_only(area):
    about = spec.areas()[area]
    for clause in about.clauses:
        for covered in clause.covers:
            method, _, situation = covered.rpartition("/")
            assert method in about.methods, f"{clause.id}: {covered}"
            assert situation in spec.situations(), f"{clause.id}: {covered}"
    for entry in about.nothing:
        assert set(entry.methods) - {"*"} <= set(about.methods), entry
        assert set(entry.situations) - {"*"} <= set(spec.situations()), entry
        assert entry.reason.strip()


@pytest.mark.parametrize("path", spec_pages.PAGES, ids=lambda path: path.name)
def test_the_pages_are_those_that_the_data_makes(path):
    assert path.read_text(encoding="utf-8") == spec_pages.PAGES[path](), (
        "run `python -m keyedopt.tools.spec_pages`"
    )


def test_every_mutant_names_clauses_that_exist():
    for mutant in mutants.mutants().values():
        assert mutant.rejected_by or "-sound-" in mutant.name, mutant.name
        assert set(mutant.rejected_by) <= set(spec.clauses()), mutant.name
