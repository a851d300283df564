"""The suite rejects every mutant."""

import json
import subprocess
import sys

from keyedopt.conformance import mutants


def test_there_are_mutants_of_every_area_with_clauses():
    from keyedopt.conformance import spec

    assert {mutant.area for mutant in mutants.mutants().values()} == set(spec.areas())


def test_there_are_mutants_of_every_base():
    planted = [mutant.base for mutant in mutants.mutants().values() if mutant.rejected_by]
    assert set(planted) == {mutants.SOUND, *mutants.PACKAGES}
    assert sum(base != mutants.SOUND for base in planted) >= 150
    assert sum(not mutant.rejected_by for mutant in mutants.mutants().values()) >= 30


def test_every_clause_with_a_verdict_rejects_a_mutant():
    from keyedopt.conformance import spec

    judged = {clause.id for clause in spec.clauses().values() if clause.level != "observe"}
    assert judged <= {clause for mutant in mutants.mutants().values() for clause in mutant.rejected_by}


def test_every_mutant_is_planted_and_rejected_by_the_clauses_named():
    """In a process of its own: it forks, which a process that has run torch must not."""
    code = (
        "import importlib.util, json\n"
        "from keyedopt.conformance import mutants\n"
        "from keyedopt.conformance.mutants.rejection import survivors\n"
        "here = [one for one in mutants.mutants().values()\n"
        "        if importlib.util.find_spec(mutants.PACKAGES.get(one.base, 'keyedopt'))]\n"
        "print(json.dumps(survivors(here)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}
