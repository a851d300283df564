"""Sides of a comparison: processes that measure one build each, in turn, with today's benchmarks around it.

A side imports `keyedopt` from a tree of its own: `keyedopt.fused` and `keyedopt.reference` of the build that
it is to measure, all else of today. Sides run in turn, a few milliseconds each, on one thread, by processor
time, so that what the machine does meanwhile comes to all of them alike; of the times of each, the lower
quartile is kept, for interruptions make times longer, never shorter.

Sides ask for huge pages (glibc's malloc does so if told to). With small ones, where the pages of a table
happen to lie makes times of random accesses differ by a tenth from process to process.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: What is a build's; the rest is of today.
MEASURED = ("fused", "reference")
OF_TODAY = ("benchmarks", "conformance", "cli")
#: Where today's parts are.
TODAY = Path(__file__).resolve().parents[1]
#: What is put into the environment of a side: huge pages, and memory that is kept for the next job.
MALLOC = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
}
#: Turns at least and at most; seconds of the clock of two sides together, and of one of them in a turn.
LEAST, MOST, SECONDS, TURN = 9, 100, 1.0, 0.006
#: Seconds after which a side has hung.
PATIENCE = 600.0
#: The part of the runs that were faster than what is kept of them.
QUARTILE = 0.25


class SideError(Exception):
    """A process that measures broke down; the message says how."""


def tree(scratch: Path, parts: Mapping[str, Path]) -> Path:
    """Make a folder from which `keyedopt` can be imported, of the parts of a build and today's others.

    Args:
        scratch: where it is made.
        parts: folders of what is measured, by the names of `MEASURED`; one may be missing.
    """
    made = scratch / "tree"
    (made / "keyedopt").mkdir(parents=True)
    for name, folder in [*parts.items(), *((part, TODAY / part) for part in OF_TODAY)]:
        (made / "keyedopt" / name).symlink_to(folder)
    return made


class Side:
    """A process that holds a job and runs it when it is told to, see `keyedopt.benchmarks.worker`."""

    def __init__(self, tree: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keyedopt.benchmarks.worker", str(threads), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **MALLOC, "PYTHONPATH": str(tree)},
            cwd=tree,
        )

    def tell(self, *command: Any) -> None:
        """Give a command; `answer` has to be called before the next one."""
        assert self._process.stdin
        self._asked = command[:4]
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will be missing

    def answer(self) -> Any:
        """Return the answer to what it was told.

        Raises:
            SideError: the process ended, or hangs.
        """
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise SideError(f"a process that measures did not answer for {PATIENCE:g} s at {self._asked}")
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"a process that measures ended with {self._process.wait()} at {self._asked}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):  # of a command that it did not live to read
                    stream.close()


def start(sides: Sequence[Side], commands: Sequence[Sequence[Any]]) -> list[str]:
    """Let each side make its job, all at once; return of each why it cannot, empty if it can."""
    for side, command in zip(sides, commands, strict=True):
        side.tell("start", *command)
    return [side.answer() for side in sides]


def in_turn(sides: Sequence[Side]) -> list[list[float]]:
    """Return the seconds of each run of each side.

    The first two change places in each turn, so that each of them comes as often after the others; a third
    one always comes last.
    """
    times: list[list[float]] = [[] for _ in sides]
    turns = 0
    while turns < LEAST or (turns < MOST and sum(map(sum, times[:2])) < SECONDS):
        first, second, *others = range(len(sides))
        for index in (first, second, *others) if turns % 2 == 0 else (second, first, *others):
            sides[index].tell("time", TURN)
            answer = sides[index].answer()
            if isinstance(answer, str):
                raise SideError(answer)
            times[index].extend(answer)
        turns += 1
    return times


def kept(times: Sequence[float]) -> float:
    """Return what is kept of the times of a side.

    >>> kept([1.0, 1.0, 1.1, 9.0, 1.0])
    1.0
    """
    return float(np.quantile(times, QUARTILE))
