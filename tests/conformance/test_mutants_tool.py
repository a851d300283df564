"""The tool that checks mutants: it credits the clauses that reject one, and shows the survivors."""

import ast
import dataclasses
import subprocess
import sys

import pytest

from keyedopt.conformance import mutants
from keyedopt.conformance.mutants import Change, MutantError, planting, rejection

REAL = min(mutants.mutants().values(), key=lambda mutant: len(mutant.rejected_by) or 100)

#: One real fault, one change without effect, and one package that cannot be imported.
TOOL = """\
import dataclasses, sys
from keyedopt.conformance import mutants
from keyedopt.conformance.mutants import Change, rejection
real = mutants.mutants()[{name!r}]
start = "from keyedopt.reference.sparse_adam import SparseAdam"
changes = {{
    "harmless": Change("__init__.py", start, start + "; 1", "<module>"),
    "hopeless": Change("__init__.py", start, "1 / 0", "<module>"),
}}
others = {{name: dataclasses.replace(real, name=name, changes=(changes[name],)) for name in changes}}
chosen = {{real.name: real, **others}}
rejection.mutants = lambda: chosen
assert set(rejection.survivors([real, chosen["harmless"]])) == {{"harmless"}}
sys.exit(rejection.main())
"""


def test_a_fault_is_rejected_and_what_is_no_fault_survives(tmp_path):
    code = TOOL.format(name=REAL.name)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1, done.stderr
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[:3])
    assert said[REAL.name] == "rejected"
    assert said["harmless"].startswith("NOT rejected by ")
    assert said["hopeless"].startswith("NOT rejected by ")
    assert "rejected 1 of 3 mutants" in done.stdout
    unproven = done.stdout.splitlines()[-1]
    assert not set(REAL.rejected_by) & set(unproven.replace(",", " ").split())


def test_a_clause_that_fails_without_a_fault_rejects_no_mutant(monkeypatch, capsys):
    clauses = ("CLIP-001", "CLIP-002")
    change = (Change("a.py", "a", "b"),)
    kinds = {"one": clauses[:1], "two": clauses[1:], "good": (), "bad": ()}
    chosen = {name: mutants.Mutant(name, "clipping", by, change, base="torch") for name, by in kinds.items()}
    found = {"torch without a fault": {"CLIP-001"}, "torch in clipping": {"CLIP-003"}, "good": {"CLIP-003"}}
    found |= {"one": set(clauses), "two": set(clauses), "bad": {"CLIP-004"}}

    def run(asked, report, everything=False):
        for mutant in reversed(asked):  # the bases end last
            report(mutant, found[mutant.name])

    monkeypatch.setattr(rejection, "run", run)
    monkeypatch.setattr(rejection, "mutants", lambda: chosen)
    assert rejection.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert dict(line.split(maxsplit=1) for line in lines if line.split()[0] in chosen) == {
        "one": "NOT rejected by CLIP-001",
        "two": "rejected",
        "good": "accepted",
        "bad": "REJECTED by CLIP-004",
    }
    assert "torch, mutants rejected: clipping 1/2" in lines
    assert "torch, sound variants accepted: clipping 1/2" in lines
    assert "CLIP-001" in lines[-1]
    assert "CLIP-002" not in lines[-1]
    assert rejection.survivors(list(chosen.values())) == {
        "torch without a fault": ("CLIP-001",),
        "one": ("CLIP-001",),
        "bad": ("CLIP-004",),
    }


#: A change of torch without effect, and a clause that torch does not meet.
KNOWN = """\
import dataclasses
from keyedopt.conformance import mutants
from keyedopt.conformance.mutants import Change, rejection
change = Change("optim/radam.py", "loss = closure()", "loss = closure() or None", "RAdam.step")
harmless = mutants.Mutant("harmless", "algorithms", ("ALGO-033",), (change,), base="torch")
print(rejection.survivors([harmless]))
"""


def test_the_cases_that_fail_on_a_mutant_run_on_its_base():
    done = subprocess.run([sys.executable, "-c", KNOWN], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {
        "torch without a fault": ("ALGO-033",),
        "harmless": ("ALGO-033",),
    }


def test_an_unknown_mutant_raises():
    with pytest.raises(MutantError, match="there is no area or mutant 'nothing'"):
        rejection.main([REAL.area, "nothing"])


def test_all_mutants_that_cannot_be_planted_are_named_before_cases_are_collected():
    broken = [dataclasses.replace(REAL, name=name, changes=(Change("gone.py", "a", "b"),)) for name in "xy"]
    with pytest.raises(MutantError, match=r"(?s)mutant x, gone\.py.*mutant y, gone\.py"):
        rejection.run([REAL, *broken], lambda mutant, clauses: None)


def test_a_mutant_shares_nothing_with_the_sound_package():
    for source in planting.sources().values():
        assert "keyedopt.reference" not in source.text


SOURCE = '''\
"""A module."""

LIMIT = 1


def scale(value, factor=2):
    """Return a multiple."""
    if value:
        return value * factor  # as documented
    return value * factor


class Table:
    """Rows."""

    rows: int = 4

    @property
    def width(self):
        """Return the width."""
        return self._width

    @width.setter
    def width(self, width):
        with self.lock():
            self._width = width
            self.changed()
'''


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Let the sound package be one small module; return a function that changes it, and gives its code."""
    monkeypatch.setattr(planting, "sources", lambda: {"m.py": given["source"]})
    given = {"source": planting.Source(tmp_path / "m.py", "m", SOURCE)}

    def changed(function, old, new, occurrence=None, source=SOURCE):
        given["source"] = planting.Source(tmp_path / "m.py", "m", source)
        change = Change("m.py", old, new, function, occurrence)
        return planting.plant(dataclasses.replace(REAL, name="m", changes=(change,)))["m"]

    return changed


def value_of(code, expression):
    names = {}
    exec(code, names)
    return eval(expression, names)


@pytest.mark.parametrize(
    ("function", "old", "new", "expression", "expected"),
    [
        ("<module>", "LIMIT = 1", "LIMIT = 3", "LIMIT", 3),
        ("scale", "2", "5", "scale(1)", 5),
        ("scale", "if value: ...", "if not value: ...\nelse:\n    return 7", "scale(1)", 7),
        ("scale", "if value: ...", "", "scale(3)", 6),
        ("scale", "if value: ...", "return -1\n...", "scale(3)", -1),
        ("scale", "def scale(value, factor=2): ...", "def scale(value, factor=9): ...", "scale(1)", 9),
        ("scale", "if value: ...\nreturn value * factor", "return 8", "scale(1)", 8),
        ("Table", "4", "6", "Table.rows", 6),
        ("Table", "rows: int = 4", "", "hasattr(Table, 'rows')", False),
        ("Table.width", "self._width", "12", "Table().width", 12),
    ],
)  # fmt: skip
def test_a_fragment_is_replaced(package, function, old, new, expression, expected):
    assert value_of(package(function, old, new), expression) == expected


def test_an_occurrence_is_chosen(package):
    assert value_of(package("scale", "value * factor", "11", 1), "scale(1), scale(0)") == (11, 0)
    assert value_of(package("scale", "value * factor", "11", 2), "scale(1), scale(0)") == (2, 11)


@pytest.mark.parametrize(
    ("function", "old", "new", "occurrence", "message"),
    [
        ("scale", "value + factor", "0", None, r"mutant m, m\.py, scale: `old` does not occur"),
        ("scale", "LIMIT", "0", None, "does not occur"),
        ("Table", "self._width", "0", None, "does not occur"),
        ("scale", "value * factor", "0", None, r"occurs 2 times \(lines 9, 10\).*`occurrence`"),
        ("scale", "value * factor", "0", 3, "`occurrence` is 3, but `old` occurs 2 times"),
        ("skale", "value", "0", None, "no function or class 'skale': did you mean scale"),
        ("scale", "if value: ...", "if  value:\n    ...", None, "the same code"),
        ("scale", "value *", "0", None, "`old` is not valid Python"),
        ("scale", "if value: ...", "if value", None, "`new` is not valid Python"),
        ("<module>", "LIMIT = 1", "return 1", None, "the changed code is not valid Python"),
        ("scale", "# nothing", "0", None, "`old` is empty"),
        ("scale", "...", "0", None, "`old` is empty"),
        (None, "value * factor", "0", None, "occurs 2 times, not once"),
        (None, "# as documented", "# as it is", None, "the same code"),
        (None, "LIMIT = 1", "LIMIT = ", None, "not valid Python"),
    ],
)
def test_a_change_that_cannot_be_made_raises(package, function, old, new, occurrence, message):
    with pytest.raises(MutantError, match=f"(?s){message}"):
        package(function, old, new, occurrence)


def test_formatting_does_not_matter(package):
    source = SOURCE.replace("with self.lock():", "with (\n            self . lock( ) ,\n        ):  # taken")
    source = source.replace("self._width = width", "'''set'''; self._width = (\n                width\n)")
    assert source != SOURCE
    for text in (SOURCE, source):
        code = package("Table.width", "with self.lock(): ...", "...", source=text)
        assert value_of(code, "Table").width.fset.__code__.co_names.count("lock") == 0


@pytest.mark.complete
def test_every_mutant_can_be_planted_when_the_reference_is_formatted_otherwise(monkeypatch):
    import ast

    sources = planting.sources()
    formatted = {
        file: dataclasses.replace(source, text=ast.unparse(ast.parse(source.text)))
        for file, source in sources.items()
    }
    monkeypatch.setattr(planting, "sources", lambda: formatted)
    for mutant in mutants.mutants().values():
        if all(change.function for change in mutant.changes):
            planting.plant(mutant)


def test_an_unknown_key_raises():
    with pytest.raises(MutantError, match=r"mutant x in wrapper\.toml: .*'occurence'"):
        mutants.parsed("wrapper", {"name": "x", "rejected_by": [], "at": "a", "occurence": 1})
