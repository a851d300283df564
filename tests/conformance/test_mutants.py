"""The suite rejects every mutant: in the everyday set two of each area and base, in the complete set all."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest
from making import OF_TORCHREC
from sampling import PARTS, rank

from keyedopt.conformance import mutants, spec
from keyedopt.conformance.mutants import rejection

#: In a process of its own: it forks, which a process that has run torch must not.
SURVIVORS = """
import json, sys
from keyedopt.conformance import mutants
from keyedopt.conformance.mutants.rejection import survivors
print(json.dumps(survivors([mutants.mutants()[name] for name in json.load(sys.stdin)])))
"""


def test_there_are_mutants_of_every_area_with_clauses():
    assert {mutant.area for mutant in mutants.mutants().values()} == set(spec.areas())


def test_there_are_mutants_of_every_base():
    planted = [mutant.base for mutant in mutants.mutants().values() if mutant.rejected_by]
    assert set(planted) == {mutants.SOUND, *mutants.PACKAGES}
    assert sum(base != mutants.SOUND for base in planted) >= 150
    assert sum(not mutant.rejected_by for mutant in mutants.mutants().values()) >= 30


def test_every_clause_with_a_verdict_rejects_a_mutant():
    judged = {clause.id for clause in spec.clauses().values() if clause.level != "recorded"}
    assert judged <= {clause for mutant in mutants.mutants().values() for clause in mutant.rejected_by}


def test_every_mutant_can_be_planted():
    assert len(rejection.plant_all(here())) == len(here())


def test_a_sample_of_mutants_is_rejected_by_the_clauses_named(sample):
    everyday = dataclasses.replace(sample, complete=False)
    chosen = everyday.choose(here(), 2, name=lambda one: one.name, group=lambda one: (one.area, one.base))
    assert survivors(chosen) == {}


@pytest.mark.complete(spread=True)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_mutant_is_planted_and_rejected_by_the_clauses_named(part):
    assert survivors(one for one in here() if int(rank("", one.name), 16) % PARTS == part) == {}


def here():
    """Return the mutants whose base is installed, and torchrec if their clauses need it."""
    unasked = () if importlib.util.find_spec("torchrec") else OF_TORCHREC
    return [
        mutant
        for mutant in mutants.mutants().values()
        if importlib.util.find_spec(mutants.PACKAGES.get(mutant.base, "keyedopt"))
        and not {*mutant.rejected_by}.intersection(unasked)
    ]


def survivors(chosen):
    names = json.dumps([mutant.name for mutant in chosen])
    command = [sys.executable, "-c", SURVIVORS]
    done = subprocess.run(command, input=names, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
