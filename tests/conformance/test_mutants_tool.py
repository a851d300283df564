"""The tool that tries the mutants: it credits what rejects one, and shows the ones that survive."""

import dataclasses
import subprocess
import sys

import pytest

from keyedopt.conformance import mutants
from keyedopt.conformance.mutants import MutantError

REAL = min(mutants.mutants().values(), key=lambda mutant: len(mutant.rejected_by))

#: One real fault, one change without effect, and one library that cannot be imported.
TOOL = """\
import dataclasses, sys
from keyedopt.conformance import mutants
from keyedopt.conformance.mutants import __main__ as tool
real = mutants.mutants()[{name!r}]
harmless = dataclasses.replace(real, name="harmless", new=real.old)
hopeless = dataclasses.replace(real, name="hopeless")
hopeless = dataclasses.replace(hopeless, file="__init__.py", old={first!r}, new="1 / 0\\n" + {first!r})
chosen = {{mutant.name: mutant for mutant in (real, harmless, hopeless)}}
mutants.mutants = lambda: chosen
assert set(tool.survivors([real, harmless])) == {{"harmless"}}
sys.exit(tool.main())
"""


def test_a_fault_is_rejected_and_what_is_no_fault_survives(tmp_path):
    folder = tmp_path / mutants.plant(REAL, tmp_path)
    first = (folder / "__init__.py").read_text(encoding="utf-8").splitlines()[0]
    code = TOOL.format(name=REAL.name, first=first)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1, done.stderr
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:3])
    assert said[REAL.name] == "rejected"
    assert said["harmless"].startswith("NOT rejected by ")
    assert said["hopeless"].startswith("NOT rejected by ")
    assert "rejected 1 of 3 mutants" in done.stdout
    unproven = done.stdout.splitlines()[-1]
    assert not set(REAL.rejected_by) & set(unproven.replace(",", " ").split())


def test_an_unknown_mutant_is_refused():
    command = [sys.executable, "-m", "keyedopt.conformance.mutants", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no area or mutant 'nothing'" in done.stderr


def test_a_mutant_is_a_copy_that_shares_nothing_with_the_sound_one(tmp_path):
    package = tmp_path / mutants.plant(REAL, tmp_path)
    for path in package.rglob("*.py"):
        assert "keyedopt.reference" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("old", ["text that is not there", "\n"])
def test_a_text_that_does_not_occur_once_is_refused(tmp_path, old):
    with pytest.raises(MutantError, match="not once"):
        mutants.plant(dataclasses.replace(REAL, old=old), tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(MutantError, match=r"occurs 0 times in gone\.py"):
        mutants.plant(dataclasses.replace(REAL, file="gone.py"), tmp_path)
