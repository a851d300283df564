"""Check implementations again and again: each run must give every case the same outcome.

``python -m keyedopt.tools.repeat TARGET... [--runs N] [--busy N] [--area AREA]`` checks each target ten
times, three of them beside eight processes that keep processors busy. It prints a line for each case whose
outcome differs from that of the first run, and exits with 1 if there is one.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from keyedopt.conformance.run import runner

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


def outcomes(target: str, areas: tuple[str, ...]) -> dict[str, str]:
    """Return the outcome of each case of one run."""
    return {case.case: case.outcome for case in runner.run(target, runner.Options(areas=areas)).cases}


def repeat(target: str, runs: int, beside: int, areas: tuple[str, ...] = ()) -> list[str]:
    """Check a target, the last times beside busy processes; return a line for each difference."""
    first: dict[str, str] = {}
    different = []
    for number in range(runs):
        with busy(BUSY if number >= runs - beside else 0):
            found = outcomes(target, areas)
        first = first or found
        for case in sorted(first.keys() | found.keys()):
            was, now = first.get(case), found.get(case)
            if was != now:
                different.append(f"{target}, run {number + 1}: {case}: {now}, first {was}")
    return different


def main() -> int:
    """Repeat checks; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Check targets again and again, and compare the outcomes.")
    parser.add_argument("targets", nargs="+", metavar="TARGET")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=3, help="how many of the runs are beside busy processes")
    parser.add_argument("--area", action="append", default=[])
    asked = parser.parse_args()
    wrong = 0
    for target in asked.targets:
        different = repeat(target, asked.runs, asked.busy, tuple(asked.area))
        wrong += len(different)
        print(
            "\n".join([*different, f"{target}: {asked.runs} runs, {len(different)} outcomes differ"]),
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
