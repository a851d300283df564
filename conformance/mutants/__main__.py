"""``python -m keyedopt.conformance.mutants [AREA | NAME]...``: does the suite reject every mutant?

Prints a line a mutant, then the score, and the clauses that no mutant proves. With ``--all`` every case
of the suite is run on each mutant, so that every clause that rejects it is credited; without, only the
clauses that are said to notice. Exits with 1 if a mutant survives.
"""

import argparse
import contextlib
import gc
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from keyedopt.conformance import mutants, spec
from keyedopt.conformance.mutants import Mutant, MutantError
from keyedopt.conformance.results.verdict import FAILING
from keyedopt.conformance.run import protocol
from keyedopt.conformance.run.protocol import Writer
from keyedopt.conformance.run.runner import Options, pytest_arguments
from keyedopt.conformance.targets.implementation import find

#: Is given a mutant and the clauses that reject it.
Tell = Callable[[Mutant, set[str]], None]
#: Seconds that a case may take on a mutant; a fault that hangs is a fault that is noticed.
LIMIT = 20.0


def _run_suite(mutant: Mutant, folder: Path, session: pytest.Session, everything: bool) -> None:
    """Run cases on a mutant, in a process of its own that was forked when they were collected."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.chdir(folder)
    sys.path.append(str(folder))
    engine: Any = session.config.pluginmanager.get_plugin("keyedopt-engine")
    clauses = () if everything else mutant.rejected_by
    engine.turn_to(find(mutants.PACKAGE), Writer(folder, LIMIT), session, clauses, mutant.dtypes)
    engine.pytest_runtestloop(session)
    os._exit(0)


def _rejecting(folder: Path, process: ForkProcess) -> set[str]:
    """Return the clauses that failed in a process that has ended."""
    reader = protocol.Reader(folder, process.pid or 0)
    crash = reader.crash(f"crash: exit status {process.exitcode}")
    found = [*reader.new(), *filter(None, [crash])]
    return {clause for case in found if case["outcome"] in FAILING for clause in case["clauses"]}


class _Forks:
    """The plugin of pytest that, when the cases are collected, forks a process for each mutant."""

    def __init__(self, chosen: Sequence[Mutant], everything: bool, tell: Tell, scratch: Path) -> None:
        self._waiting = list(reversed(chosen))
        self._everything = everything
        self._tell = tell
        self._scratch = scratch

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        context = multiprocessing.get_context("fork")  # of a process that has started no threads
        gc.freeze()  # what is collected is shared, as long as nobody looks at it
        running: dict[int, tuple[Mutant, Path, ForkProcess]] = {}
        while self._waiting or running:
            while self._waiting and len(running) < len(os.sched_getaffinity(0)):
                mutant = self._waiting.pop()
                folder = self._scratch / mutant.name
                folder.mkdir()
                mutants.plant(mutant, folder)
                given = (mutant, folder, session, self._everything)
                process = context.Process(target=_run_suite, args=given, daemon=True)
                process.start()
                running[process.sentinel] = mutant, folder, process
            for sentinel in multiprocessing.connection.wait(list(running)):
                assert isinstance(sentinel, int)
                mutant, folder, process = running.pop(sentinel)
                process.join()
                self._tell(mutant, _rejecting(folder, process))
        return True


def run(chosen: Sequence[Mutant], tell: Tell, everything: bool = False) -> None:
    """Check mutants, one a processor at a time, and tell the clauses that reject each.

    Raises:
        MutantError: a mutant cannot be made, or the cases not be collected.
    """
    importlib.import_module("torch._dynamo")  # which the first optimizer of a process imports, for a second
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    clauses = () if everything else {clause for mutant in chosen for clause in mutant.rejected_by}
    dtypes = {dtype for mutant in chosen for dtype in mutant.dtypes}
    options = Options(clauses=tuple(sorted(clauses)), dtypes=tuple(sorted(dtypes)))
    with tempfile.TemporaryDirectory(prefix="keyedopt-", ignore_cleanup_errors=True) as scratch:
        arguments = pytest_arguments(mutants.SOUND, options, Path(scratch))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = pytest.main(arguments, [_Forks(chosen, everything, tell, Path(scratch))])
    if code != pytest.ExitCode.OK:
        raise MutantError(said.getvalue())


def survivors(chosen: Sequence[Mutant]) -> dict[str, tuple[str, ...]]:
    """Return the mutants that clauses named in ``rejected_by`` did not reject, with these clauses."""
    silent = {mutant.name: mutant.rejected_by for mutant in chosen}

    def tell(mutant: Mutant, found: set[str]) -> None:
        silent[mutant.name] = tuple(clause for clause in mutant.rejected_by if clause not in found)

    run(chosen, tell)
    return {name: clauses for name, clauses in silent.items() if clauses}


def main() -> int:
    """Run the mutants named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="areas or names of mutants; default: all")
    parser.add_argument("--all", action="store_true", help="run the whole suite on each")
    arguments = parser.parse_args()
    chosen = [
        mutant
        for mutant in mutants.mutants().values()
        if not arguments.names or {mutant.area, mutant.name} & set(arguments.names)
    ]
    if not chosen:
        parser.error(f"there is no area or mutant {' '.join(arguments.names)!r}")
    proven: set[str] = set()
    survived: list[Mutant] = []
    output = sys.stdout

    def tell(mutant: Mutant, found: set[str]) -> None:
        proven.update(found)
        silent = [clause for clause in mutant.rejected_by if clause not in found]
        survived.extend([mutant] if silent else [])
        said = f"NOT rejected by {silent}" if silent else "rejected"
        print(f"{mutant.name:45} {said}", flush=True, file=output)

    run(chosen, tell, arguments.all)
    print(f"rejected {len(chosen) - len(survived)} of {len(chosen)} mutants")
    areas = {mutant.area for mutant in chosen}
    unproven = [
        clause.id
        for clause in spec.clauses().values()
        if clause.area in areas and clause.level != "observe" and clause.id not in proven
    ]
    print(f"unproven clauses (no mutant is rejected by them): {', '.join(unproven) or 'none'}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
