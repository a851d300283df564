"""The suite rejects every implementation that is wrong on purpose."""

import pytest
from keyedopt.conformance import mutants
from keyedopt.conformance.mutants import __main__ as tool


def test_there_are_mutants_of_every_area_with_clauses():
    from keyedopt.conformance import spec

    assert {mutant.area for mutant in mutants.mutants().values()} == set(spec.areas())


@pytest.mark.parametrize("name", mutants.mutants())
def test_a_mutant_can_be_planted(name, tmp_path):
    package = tmp_path / mutants.plant(mutants.mutants()[name], tmp_path)
    assert (package / "__init__.py").exists()


def test_every_mutant_is_rejected_by_the_clauses_named(capsys):
    survivors = tool.survivors(list(mutants.mutants().values()))
    assert survivors == {}
