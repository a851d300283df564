"""Faults that somebody wrote, planted by `keyedopt.tools.mutate`."""

import importlib
import json
from pathlib import Path

import pytest

from keyedopt import reference
from keyedopt.tools import mutate

FAULT = {"file": "rules/sgd.py", "old": "w = w - lr * (direction", "new": "w = w + lr * (direction"}


@pytest.fixture
def fault(tmp_path, monkeypatch):
    """Return a function that writes a fault of the reference, and reads it."""
    monkeypatch.setattr(mutate, "_CHOSEN", [Path(reference.__file__).parent])
    mutate._text.cache_clear()

    def read(**changed):
        path = tmp_path / "uphill.json"
        path.write_text(json.dumps({**FAULT, **changed}), encoding="utf-8")
        return mutate.Fault.read(path)

    yield read
    mutate._text.cache_clear()
    mutate._statements.cache_clear()


def test_a_fault_is_planted_in_the_functions_that_it_changes(fault):
    found, sgd = fault(), importlib.import_module("keyedopt.reference.rules.sgd").sgd
    sound = sgd.__code__
    assert str(found) == "rules/sgd.py: uphill"
    (changed,) = (line for number, line in enumerate(found.text.splitlines(), 1) if number in found.lines)
    assert changed.strip().startswith(FAULT["new"])
    try:
        mutate.grafted(found)()
        assert sgd.__code__ != sound
    finally:
        sgd.__code__ = sound


@pytest.mark.parametrize(
    "changed",
    [
        {"old": "momentum: float = 0.0,", "new": "momentum: float = 0.5,"},
        {"old": "def sgd(", "new": "def other() -> None: ...\n\n\ndef sgd("},
    ],
    ids=["a default", "one more function"],
)
def test_what_changes_more_than_bodies_of_functions_is_left_out(fault, changed):
    assert mutate.grafted(fault(**changed)) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"old": "no such text"}, "expected `old` once in rules/sgd.py, which has it 0 times"),
        ({"file": "rules/none.py"}, "expected JSON with file, old and new: FileNotFoundError"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_refused(fault, changed, message):
    with pytest.raises(SystemExit, match=message):
        fault(**changed)
