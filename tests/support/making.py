"""Shared by the tests: which cases to run, and results made by hand."""

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.run import case_sources
from keyedopt.conformance.run.case_sources import cases_by_clause

TARGETS = str(Path(__file__).parents[1] / "targets")
#: The clauses that are asked of a run on the CPU.
ON_CPU = {clause.id for clause in spec.clauses().values() if not clause.accelerator}
#: The clauses whose cases need torchrec.
OF_TORCHREC = ("SHARD-025", "SHARD-026", "SHARD-027", "SHARD-028", "FUSED-095", "FUSED-102")

CLAUSE = "KEYED-001"

#: Whatever an error message of a stranger may hold.
NASTY = [
    "\x00\x1b[31m\x07\x0b\r red \x9b",
    "\ud800 \udfff",
    "\ufffe \uffff \u2028 \u2029 \x85 \u202egnp.exe \u2066<b>\u2069 \u200b",
    "]]> <b>&amp;</b> <!-- --> &#0; &",
    "[bold red]x[/] [link=https://example.com]y[/link] :smile:",
    "| a | `b` ![i](https://example.com/i.png) <img src=x> @someone #1 \\| \\",
    "two\nlines\r\nand\ttabs",
    "x" * 100_000,
    "",
]


@functools.cache
def functions():
    """Return every case with its function."""
    return {
        case: getattr(
            importlib.import_module(f"keyedopt.conformance.suite.{case.area}.{case.file}"), case.name
        )
        for case in case_sources.cases()
    }


def takes(case, *parameters):
    """Whether a case takes just these parameters, besides the implementation, and draws none."""
    function = functions()[case]
    return list(inspect.signature(function).parameters) == ["impl", *parameters] and not drawn(case)


def drawn(case):
    return hasattr(functions()[case], "hypothesis")


def reasons(verdict, result):
    """Return why a verdict is not green.

    A sample of clauses may contain no must that the target claims: that reason is left out for a sample.
    """
    if not result.options["clauses"]:
        return list(verdict.reasons)
    return [reason for reason in verdict.reasons if "none of its musts was checked" not in reason]


def plain_cases():
    """Return cases on the CPU that take nothing, make an optimizer, and alone have their name and clause."""
    names = Counter(case.name for case in functions())
    makers = ("sgd(", "adam(", "recording(", "KeyedOptimizerWrapper(")
    return [
        case
        for case, function in functions().items()
        if takes(case)
        and names[case.name] == 1
        and len(case.clauses) == 1
        and len(cases_by_clause()[case.clauses[0]]) == 1
        and any(maker in inspect.getsource(function) for maker in makers)
        and "compile" not in case.name  # takes seconds
        and level(case) != "recorded"
        and not spec.clauses()[case.clauses[0]].accelerator
    ]


def level(case):
    return spec.clauses()[case.clauses[0]].level


def without_torchrec(result):
    """Return what `left_out` returns of a sound implementation where torchrec is not installed."""
    return {
        (clause, "unsupported") for case in result.cases for clause in case.clauses if clause in OF_TORCHREC
    }


#: Why cases of what only some targets have are unsupported.
OF_SOME_TARGETS = (
    "not claimed: OtherOptimizer",
    "not claimed: FusedCollection has no argument rounding_seed",
)


def left_out(result):
    """Return the clauses of cases that have not held, each with what came of it.

    Cases of what only some targets have are left out: an optimizer of another formula than ours, and a
    seed of stochastic rounding.
    """
    others = [case for case in result.cases if case.outcome not in ("pass", "observed")]
    bad = [case for case in others if not case.seen.startswith(OF_SOME_TARGETS)]
    return {(clause, case.outcome) for case in bad for clause in case.clauses}


def observing_case():
    return next(case for case in functions() if level(case) == "recorded")


def case_with(*parameters, area=""):
    """Return a case, of one area if it is given, that takes just these parameters."""
    return next(case for case in functions() if takes(case, *parameters) and case.area.startswith(area))


def drawn_case():
    """Return a case whose inputs are drawn."""
    return next(case for case in functions() if drawn(case))


def result(*listed, **changes):
    """Make a result by hand; a case is given as a dictionary of what is not usual."""
    usual = {"case": "test_keyed_load::test_a", "clauses": (CLAUSE,), "outcome": "pass", "device": "cpu"}
    made = Result(
        implementation={
            "name": "acme",
            "target": "acme.optim",
            "version": "1.2.3",
            "versions": {"acme-optim": "1.2.3"},
            "areas": list(spec.areas()),
            "places": {},
        },
        environment={"python": "3.11", "torch": "2.13.0+cpu", "keyedopt": "0.1.0", "device": "cpu"},
        suite={"version": spec.SUITE_VERSION, "hash": "0"},
        options={"level": "should", "clauses": [CLAUSE]},
        started="2026-01-01T00:00:00+00:00",
        seconds=1.0,
        complete=True,
        cases=tuple(Case(**{**usual, **case}) for case in listed),
    )
    return Result(**{**{name: getattr(made, name) for name in made.__dataclass_fields__}, **changes})


def module(folder, name, source):
    """Write a module."""
    path = Path(folder).joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return path


def command(*arguments):
    """Return a command line of keyedopt."""
    return [sys.executable, "-m", "keyedopt.cli.start", *map(str, arguments)]


def keyedopt(*arguments, **options):
    """Run the command line in a process of its own; what it returns has no progress on stderr."""
    options = {"capture_output": True, "text": True, "check": False, "timeout": 120, **options}
    done = subprocess.run(command(*arguments), **options)
    if isinstance(done.stderr, str):
        done.stderr = without_progress(done.stderr)
    return done


def refused(done):
    """Check that bad input is refused as documented, and return the line that says so."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    said = without_progress(done.stderr)
    assert said.count("\n") == 1, done.stderr
    assert said.startswith("keyedopt: ")
    return said


def without_progress(stderr):
    """Return what a command wrote to stderr without the progress of a run of ten seconds or more."""
    return re.sub(r"^.*: \d+% after \d+ s.*\n", "", stderr, flags=re.M)


def valid(path):
    """Read a JSON file strictly."""
    return json.loads(Path(path).read_text("utf-8"), parse_constant=lambda name: 1 / 0)


def mark(name):
    """Return what to put into the environment of processes, to know them among those of other runs."""
    return {"MARKER": f"{name}-{os.getpid()}"}


def alive(name):
    """Return the command lines of the marked processes that live; the dead have no environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"MARKER={name}-{os.getpid()}\0".encode() in path.read_bytes():
                found.append(path.with_name("cmdline").read_text().replace("\0", " ")[:300])
    return found


def left_behind(name):
    """Return the marked processes that live longer than two seconds of a processor that is not shared."""
    end = time.monotonic() + 2 * max(1.0, os.getloadavg()[0] / os.cpu_count())
    while alive(name) and time.monotonic() < end:
        time.sleep(0.05)
    return alive(name)
