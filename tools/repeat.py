"""Check implementations again and again: each run must give every case the same outcome.

``python -m keyedopt.tools.repeat TARGET... [--runs N] [--busy N] [--together N] [--area AREA]`` checks each
target ten times, three of them beside eight processes that keep processors busy; with ``--together 3`` three
checks run at the same time. It prints a line for each case whose outcome differs from that of the first
check, with what was seen, and exits with 1 if there is one.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from keyedopt.conformance.results import model

#: The processes that keep processors busy.
BUSY = 8


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run so many processes that compute without end."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def outcomes(target: str, areas: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the outcome of each case of one check, as a user starts it, and what a failing one saw."""
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "keyedopt.cli.start", "check", target, "--output", str(file)]
        for area in areas:
            command += ["--area", area]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            raise RuntimeError(f"{target} got no result: {done.stdout}{done.stderr}")
        return {case.case: (case.outcome, case.seen) for case in model.read(file).cases}


def repeat(target: str, runs: int, beside: int, areas: Sequence[str] = (), together: int = 1) -> list[str]:
    """Check a target, the last times beside busy processes; return a line for each difference.

    Args:
        target: what is checked.
        runs: how many times.
        beside: how many of the runs are beside busy processes.
        areas: the areas that are checked; default: all.
        together: how many checks run at the same time in each run.
    """
    first: dict[str, tuple[str, str]] = {}
    different = []
    for number in range(runs):
        with busy(BUSY if number >= runs - beside else 0), ThreadPoolExecutor(together) as pool:
            every = list(pool.map(lambda _: outcomes(target, areas), range(together)))
        for found in every:
            first = first or found
            for case in sorted(first.keys() | found.keys()):
                (was, before), (now, seen) = (some.get(case, ("not run", "")) for some in (first, found))
                if was != now:
                    line = f"{target}, run {number + 1}: {case}: {now}, first {was}; seen: {seen or before}"
                    different.append(line)
    return different


def main() -> int:
    """Repeat checks; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Check targets again and again, and compare the outcomes.")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=3, help="how many of the runs are beside busy processes")
    parser.add_argument("--together", type=int, default=1, help="how many checks run at the same time")
    parser.add_argument("--area", action="append", default=[])
    asked = parser.parse_args()
    wrong = 0
    for target in asked.targets:
        different = repeat(target, asked.runs, asked.busy, asked.area, asked.together)
        wrong += len(different)
        checks = f"{asked.runs * asked.together} checks, {asked.together} at a time"
        print("\n".join([*different, f"{target}: {checks}, {len(different)} outcomes differ"]), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
