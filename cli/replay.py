"""``keyedopt replay``: write a case of a result as a script that runs without keyedopt."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from keyedopt.conformance.results import model
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.verdict import FAILING, cases_of
from keyedopt.conformance.run import replay


def choose(run: Result, name: str) -> Case | None:
    """Return the case that ``CLAUSE``, ``CLAUSE[n]`` or the name of a case selects.

    ``CLAUSE[n]`` is the n-th case of the clause, from 1; ``CLAUSE`` its first failing one, or its first.
    """
    exact = [case for case in run.cases if case.case == name]
    if exact:
        return exact[0]
    match = re.fullmatch(r"([A-Za-z_]+-\d+)(?:\[(\d+)\])?", name)
    cases = cases_of(run, match[1].upper()) if match else []
    if not match or not cases:
        return None
    if match[2]:
        number = int(match[2])
        return cases[number - 1] if 1 <= number <= len(cases) else None
    return next((case for case in cases if case.outcome in FAILING), cases[0])


def replay_case(
    path: Path, name: str, output: Path | None, run: bool, fail: Callable[[str], NoReturn]
) -> int:
    """Write the script of a case to a file, or print it, or run it; return 0, or 1 if it ran and fails."""
    if output is not None:
        model.refuse_unwritable(output)
    found = model.read(path, partial=True)
    case = choose(found, name)
    if case is None:
        fail(f"{path} has no case {name!r}: give a clause as CLAUSE or CLAUSE[n], or the name of a case")
    text = replay.script(found, case)
    if output is not None:
        model.write_atomically(output, text)
        print(f"written: {output}" if run else f"written: {output}; run it with python", flush=True)
    elif not run:
        print(text, end="")
    return _run(text) if run else 0


def _run(text: str) -> int:
    """Run a script; like ``keyedopt check``, it imports modules from the current folder last."""
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        script = Path(folder) / "again.py"
        script.write_text(text, encoding="utf-8")
        places = [*filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        return 1 if subprocess.run([sys.executable, script], env=environment, check=False).returncode else 0
