"""Processes that measure one build each, alternately, so that both builds see the same load of the machine.

A process imports the measured packages from the tree of its build (see `keyedopt.benchmarks.commit_builds`),
and everything else from the running keyedopt. The processes run alternately for a few milliseconds each, on
one thread, by CPU time, so that other work on the machine affects all of them alike. The lower quartile of
the times is kept: an interruption makes a run longer, never shorter.

The processes request huge pages through glibc. With small pages, random accesses to a table vary by 10 % from
process to process, depending on the placement of its pages.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keyedopt.conformance.results.errors import KeyedoptError

#: The environment of a process: huge pages, and freed memory is kept for the next job.
MALLOC = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
}
#: Bounds of the number of turns; seconds for the first two processes together; seconds of one turn.
LEAST, MOST, SECONDS, TURN = 9, 100, 1.0, 0.006
#: Seconds after which a process counts as hung.
PATIENCE = 600.0
#: The quantile of the times that is kept.
QUARTILE = 0.25


class ProcessError(KeyedoptError):
    """A measuring process ended or hung; the message says which command it was executing."""


class BuildProcess:
    """A process that holds one job and runs it on request; `keyedopt.benchmarks.worker` has the commands."""

    def __init__(self, tree: Path, threads: int) -> None:
        path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keyedopt.benchmarks.worker", str(threads), str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **MALLOC, "PYTHONPATH": path},
            cwd=tree,
        )

    def send(self, *command: Any) -> None:
        """Send a command; call `receive` before the next one."""
        assert self._process.stdin
        self._command = command[:4]
        with contextlib.suppress(BrokenPipeError):  # `receive` reports that the process ended
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the answer to the last command.

        Raises:
            ProcessError: the process ended, or did not answer in time.
        """
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise ProcessError(f"a measuring process did not answer for {PATIENCE:g} s at {self._command}")
        line = self._process.stdout.readline()
        if not line:
            raise ProcessError(f"a measuring process ended with {self._process.wait()} at {self._command}")
        return json.loads(line)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(BrokenPipeError):  # of a command that the process did not read
                    stream.close()


def start(processes: Sequence[BuildProcess], commands: Sequence[Sequence[Any]]) -> list[str]:
    """Let all processes make their jobs at once; return for each why it cannot, or an empty text."""
    for process, command in zip(processes, commands, strict=True):
        process.send("start", *command)
    return [process.receive() for process in processes]


def alternate(processes: Sequence[BuildProcess]) -> list[list[float]]:
    """Run two processes alternately, and return the seconds of each run of each; their order alternates too.

    Raises:
        ProcessError: a process ended, hung, or reports an error.
    """
    times: list[list[float]] = [[] for _ in processes]
    turns = 0
    while turns < LEAST or (turns < MOST and sum(map(sum, times)) < SECONDS):
        for index in (0, 1) if turns % 2 == 0 else (1, 0):
            processes[index].send("time", TURN)
            answer = processes[index].receive()
            if isinstance(answer, str):
                raise ProcessError(answer)
            times[index].extend(answer)
        turns += 1
    return times


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile of the times of a process.

    >>> lower_quartile([1.0, 1.0, 1.1, 9.0, 1.0])
    1.0
    """
    return float(np.quantile(times, QUARTILE))
