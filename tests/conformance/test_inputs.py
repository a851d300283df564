"""Inputs that Hypothesis draws do not depend on what else a process has imported."""

import importlib
import sys

import hypothesis
from hypothesis import strategies

from keyedopt.conformance.run.inputs import fix_draws


def test_constants_of_other_modules_are_not_drawn(tmp_path, monkeypatch):
    fix_draws()
    seen = []

    @hypothesis.given(strategies.lists(strategies.floats(), min_size=50))
    def draw(numbers):
        seen.append(numbers)

    draw()
    usual = seen.copy()
    seen.clear()
    lines = [f"number_{index} = {index + 0.123}" for index in range(100)]
    (tmp_path / "full_of_constants.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_constants")
    draw()
    del sys.modules["full_of_constants"]
    assert repr(seen) == repr(usual)
