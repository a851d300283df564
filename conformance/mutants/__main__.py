"""``python -m keyedopt.conformance.mutants [AREA | NAME]...``: does the suite reject every mutant?

Prints a line a mutant, then the score, and the clauses that no mutant proves. With ``--all`` every case
of the suite is run on each mutant, so that every clause that rejects it is credited; without, only the
clauses that are said to notice. Exits with 1 if a mutant survives.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keyedopt.conformance import mutants, records, spec
from keyedopt.conformance.mutants import Mutant
from keyedopt.conformance.verdict import FAILING

#: Seconds that a case may take on a mutant; a fault that hangs is a fault that is noticed.
LIMIT = 20.0


def _run_suite(name: str, folder: str, clauses: Sequence[str]) -> None:
    """Run cases on a mutant, in a process of its own that was forked with torch already imported."""
    import pytest

    sys.path.insert(0, folder)
    (Path(folder) / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(folder)
    arguments = ["-c", "pytest.ini", "--rootdir", folder, "--noconftest", "-q", "--tb=no", "-W", "ignore"]
    arguments += ["-p", "keyedopt.conformance.plugin", "-p", "no:faulthandler", "-p", "no:cacheprovider"]
    arguments += ["--pyargs", "keyedopt.conformance.suite", "--implementation", name]
    arguments += ["--keyedopt-records", folder, "--keyedopt-limit", str(LIMIT), "--keyedopt-dtype", "float32"]
    arguments += [part for clause in clauses for part in ("--keyedopt-clause", clause)]
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        pytest.main(arguments)
    os._exit(0)


def rejecting(mutant: Mutant, everything: bool = False) -> set[str]:
    """Return the clauses that reject a mutant."""
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        name = mutants.plant(mutant, Path(folder))
        context = multiprocessing.get_context("fork")
        arguments = (name, folder, () if everything else mutant.rejected_by)
        process = context.Process(target=_run_suite, args=arguments)
        process.start()
        process.join()
        reader = records.Reader(Path(folder), process.pid or 0)
        crash = reader.crash(f"crash: exit status {process.exitcode}")
        found = [*reader.new(), *filter(None, [crash])]
    return {clause for case in found if case["outcome"] in FAILING for clause in case["clauses"]}


def run(chosen: Sequence[Mutant], everything: bool = False) -> Iterator[tuple[Mutant, set[str]]]:
    """Check mutants, one a processor at a time, and yield the clauses that reject each."""
    import torch

    import keyedopt.conformance.suite.support  # noqa: F401 - imported before the fork, not in each child

    torch.set_num_threads(1)  # a process that has started threads must not be forked
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        yield from zip(chosen, pool.map(lambda mutant: rejecting(mutant, everything), chosen), strict=True)


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
