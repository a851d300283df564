"""The defects found in published libraries: there, or known to be fixed, and linked to by known failures."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import chosen

from keyedopt.conformance import expectations
from keyedopt.conformance.findings import MODULES, findings

FINDINGS = {finding.path.stem: finding for finding in findings()}
LIBRARIES = tuple(dict.fromkeys(finding.library for finding in FINDINGS.values()))
#: What need not be installed, but where it has to be (CI).
OPTIONAL = (
    *("torchrec", "torchft", "optimi", "bitsandbytes", "deepspeed", "pytorchoptimizer", "torchao"),
    "torchoptimizer",
)
ROOT = Path(__file__).parents[2]
#: The decisions on what the libraries of the panel fail.
PANEL = "conformance/PANEL.md"


def need(library):
    missing = library in OPTIONAL and importlib.util.find_spec(MODULES.get(library, library)) is None
    if missing and os.environ.get(f"KEYEDOPT_REQUIRE_{library.upper()}") != "1":
        pytest.skip(f"{library} is not installed: see the README")


@pytest.fixture(scope="module")
def reproduced(request):
    """Run the chosen reproducers of a library, once: exit status and output by name."""
    done, names = {}, chosen(request, "reproducer")

    def of(library):
        need(library)
        if library not in done:
            code = (
                "import json\n"
                "from keyedopt.conformance.findings import findings, run\n"
                f"here = [finding for finding in findings() if finding.library == {library!r}]\n"
                f"chosen = [finding for finding in here if finding.path.stem in {names!r}]\n"
                "print(json.dumps({f.path.stem: [code, text] for f, code, text in run(chosen)}))\n"
            )
            command = [sys.executable, "-c", code]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
            done[library] = json.loads(said.splitlines()[-1])
        return done[library]

    return of


@pytest.mark.complete(sample=4)
@pytest.mark.parametrize("reproducer", FINDINGS)
def test_a_finding_is_there_in_the_versions_that_it_names(reproducer, reproduced):
    """A reproducer exits with 1 where the defect is there, with 0 where its docstring says that it is not."""
    code, output = reproduced(FINDINGS[reproducer].library)[reproducer]
    wanted, word = (1, "defect") if FINDINGS[reproducer].there else (0, "fixed")
    assert code == wanted, output
    assert any(line.startswith(f"{word}: expected ") for line in output.splitlines()), output
    assert "Traceback" not in output


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_is_a_script_of_torch_and_the_library_alone(name):
    text = FINDINGS[name].path.read_text(encoding="utf-8")
    assert "keyedopt" not in text
    assert len(text.splitlines()) <= 80


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_finding_runs_as_a_script(library):
    need(library)
    finding = next(one for one in FINDINGS.values() if one.library == library and one.there)
    done = subprocess.run([sys.executable, finding.path], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_known_failure_links_to_a_reproducer_that_names_its_clause(library):
    name = MODULES[library] if library in ("pytorchoptimizer", "torchoptimizer") else library
    entries = expectations.read(expectations.find(name))
    by_link = {f"conformance/findings/{finding.path.name}": finding for finding in FINDINGS.values()}
    own = {link for link, finding in by_link.items() if finding.library == library}
    if library != "fbgemm":  # for some of its defects our target makes up
        assert {entry.link for entry in entries} >= own
    for entry in entries:
        if entry.link == PANEL:  # a defect of a panel's library: a row of the table says what happens
            rows = (ROOT / PANEL).read_text(encoding="utf-8").splitlines()
            own_rows = [row for row in rows if library in row.replace("-", "") or row.startswith("| all |")]
            assert any(entry.clause in row for row in own_rows), entry
        else:
            assert entry.clause in by_link[entry.link].clauses, entry
