"""Repeated checks name each case whose outcome differs from that of the first run."""

import pytest

from keyedopt.tools import repeat


def test_an_outcome_that_differs_is_named(monkeypatch):
    first = {"a": ("pass", ""), "b": ("fail", "2")}
    found = iter([first, first, {"a": ("fail", "3")}])
    started = []
    monkeypatch.setattr(repeat, "outcomes", lambda target, areas: next(found))
    monkeypatch.setattr(repeat.subprocess, "Popen", lambda command: started.append(command) or Stopped())
    assert repeat.repeat("acme", runs=3, beside=1) == [
        "acme, run 3: a: fail, first pass; seen: 3",
        "acme, run 3: b: not run, first fail; seen: 2",
    ]
    assert len(started) == repeat.BUSY


class Stopped:
    def kill(self):
        pass

    def wait(self):
        pass


@pytest.mark.complete
def test_checks_at_the_same_time_beside_busy_processes_have_the_same_outcomes():
    assert repeat.repeat("reference", runs=1, beside=1, areas=["warmup", "wrapper"], together=3) == []
