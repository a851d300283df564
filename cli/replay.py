"""``keyedopt replay``: a case of a result, as a script that a vendor can run without keyedopt."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from keyedopt.conformance import replay, result
from keyedopt.conformance.result import Case, Result
from keyedopt.conformance.verdict import FAILING, cases_of


def choose(run: Result, name: str) -> Case | None:
    """Return the case that ``CLAUSE``, ``CLAUSE[n]`` or a case's name stands for.

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


def write_replay(path: Path, name: str, output: Path | None, fail: Callable[[str], NoReturn]) -> None:
    """Write the script of a case to a file, or print it."""
    try:
        if output is not None:
            result.refuse_unwritable(output)
        run = result.read(path, partial=True)
        case = choose(run, name)
        if case is None:
            fail(f"{path} has no case {name!r}; a clause it has is written CLAUSE or CLAUSE[n]")
        text = replay.script(run, case)
    except (result.ResultError, replay.ReplayError) as error:
        fail(str(error))
    if output is None:
        print(text, end="")
    else:
        result.write_atomically(output, text)
        print(f"written: {output}; run it with python")
