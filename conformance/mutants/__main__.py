"""``python -m keyedopt.conformance.mutants [AREA | NAME]...``: does the suite reject every mutant?

Prints a line a mutant, then the score, and the clauses that no mutant proves. With ``--all`` every case
of the suite is run on each mutant, so that every clause that rejects it is credited; without, only the
clauses that are said to notice. Exits with 1 if a mutant survives.
"""

import argparse
import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

from keyedopt.conformance import cases, mutants, records, spec
from keyedopt.conformance.implementation import find
from keyedopt.conformance.mutants import Mutant
from keyedopt.conformance.runner import Options, pytest_arguments
from keyedopt.conformance.verdict import FAILING

#: Seconds that a case may take on a mutant; a fault that hangs is a fault that is noticed.
LIMIT = 20.0


def _run_suite(mutant: Mutant, folder: Path, everything: bool) -> None:
    """Run cases on a mutant, in a process of its own that was forked with torch already imported."""
    import pytest

    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(folder)
    sys.path.append(str(folder))
    options = Options(clauses=() if everything else mutant.rejected_by, dtypes=mutant.dtypes)
    arguments = pytest_arguments(mutants.package_name(mutant), options, folder)
    pytest.main([*arguments, "--keyedopt-records", str(folder), "--keyedopt-limit", str(LIMIT)])
    os._exit(0)


def _rejecting(folder: Path, process: ForkProcess) -> set[str]:
    """Return the clauses that failed in a process that has ended."""
    reader = records.Reader(folder, process.pid or 0)
    crash = reader.crash(f"crash: exit status {process.exitcode}")
    found = [*reader.new(), *filter(None, [crash])]
    return {clause for case in found if case["outcome"] in FAILING for clause in case["clauses"]}


def run(chosen: Sequence[Mutant], everything: bool = False) -> Iterator[tuple[Mutant, set[str]]]:
    """Check mutants, one a processor at a time, and yield the clauses that reject each."""
    for module in cases.modules():  # before the fork, not in each child
        importlib.import_module(module)
    importlib.import_module("torch._dynamo")  # which the first optimizer of a process imports, for a second
    find(mutants.SOUND).surface().claimed()
    context = multiprocessing.get_context("fork")  # of a process that has started no threads
    waiting = list(reversed(chosen))
    running: dict[int, tuple[Mutant, Path, ForkProcess]] = {}
    with tempfile.TemporaryDirectory(prefix="keyedopt-", ignore_cleanup_errors=True) as scratch:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                mutant = waiting.pop()
                folder = Path(scratch) / mutant.name
                folder.mkdir()
                mutants.plant(mutant, folder)
                process = context.Process(target=_run_suite, args=(mutant, folder, everything), daemon=True)
                process.start()
                running[process.sentinel] = mutant, folder, process
            for sentinel in multiprocessing.connection.wait(list(running)):
                assert isinstance(sentinel, int)
                mutant, folder, process = running.pop(sentinel)
                process.join()
                yield mutant, _rejecting(folder, process)


def survivors(chosen: Sequence[Mutant]) -> dict[str, tuple[str, ...]]:
    """Return the mutants that clauses named in ``rejected_by`` did not reject, with these clauses."""
    silent = {
        mutant.name: tuple(clause for clause in mutant.rejected_by if clause not in found)
        for mutant, found in run(chosen)
    }
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
    survived = 0
    for mutant, found in run(chosen, arguments.all):
        proven |= found
        silent = [clause for clause in mutant.rejected_by if clause not in found]
        survived += bool(silent)
        print(f"{mutant.name:45} {f'NOT rejected by {silent}' if silent else 'rejected'}", flush=True)
    print(f"rejected {len(chosen) - survived} of {len(chosen)} mutants")
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
