"""A stage of a first run on a GPU: ``python -m keyedopt.benchmarks.gpu.stage NAME FILE [OPTIONS]`` runs one.

`first_light` calls it, with a limit and in a process of its own. A stage writes FILE after each item, so
a kill loses only the running item. If FILE is there already, from a stage that was killed, the new file
keeps it under ``interrupted``.
"""

import argparse
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keyedopt.conformance.results.model import write_atomically
from keyedopt.conformance.results.untrusted import error_text

#: Seconds that a stage leaves unused at the end of its limit, to write its file.
MARGIN = 4.0


@dataclass(frozen=True)
class Stage:
    """A stage.

    Args:
        number, name: of its result file.
        seconds: its limit.
        module: has a function `run`, which gets a `Context`.
    """

    number: int
    name: str
    seconds: float
    module: str

    @property
    def file(self) -> str:
        """The name of the result file."""
        return f"{self.number}-{self.name}.json"


#: All stages, in rising value and cost.
STAGES = (
    Stage(1, "environment", 60, "keyedopt.benchmarks.gpu.machine_report"),
    Stage(2, "kernels", 90, "keyedopt.tools.compare_kernels"),
    Stage(3, "conformance", 200, "keyedopt.benchmarks.gpu.conformance_runs"),
    Stage(4, "checks", 60, "keyedopt.benchmarks.gpu.checks_and_sanitizer"),
    Stage(5, "speed", 120, "keyedopt.benchmarks.gpu.speed"),
    Stage(6, "counters", 60, "keyedopt.benchmarks.gpu.counters"),
    Stage(7, "asv", 100, "keyedopt.benchmarks.gpu.asv_runs"),
)


@dataclass
class Context:
    """What a stage gets.

    Args:
        file: the result file.
        device: on which it runs.
        small: whether to take the smallest problems, for a rehearsal without a GPU.
        seconds: the limit.
        work: a folder for files that are not results.
        save: writes the result file.
        begin: the time of the start.
    """

    file: Path
    device: str
    small: bool
    seconds: float
    work: Path
    save: Callable[[dict[str, Any]], None]
    begin: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the seconds that are left for new work."""
        return self.begin + self.seconds - MARGIN - time.monotonic()

    def start(self, command: Sequence[str], output: Path, **environment: str) -> "subprocess.Popen[bytes]":
        """Start a command that ends with this process, with its output in a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                list(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                preexec_fn=end_with_parent,
            )

    def command(
        self, command: Sequence[str], name: str, seconds: float | None = None, **environment: str
    ) -> tuple[int | None, str]:
        """Run a command; return its exit code, or None at its limit, and its output."""
        output = self.work / f"{name}.txt"
        process = self.start(command, output, **environment)
        code = finish(process, min(self.left(), seconds or self.left()))
        return code, output.read_text(encoding="utf-8", errors="replace")


def finish(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Wait for a process; at the limit end it and return None, else its exit code."""
    try:
        return process.wait(max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def end_with_parent() -> None:
    """Have the system kill this process if its parent dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def saver(file: Path, head: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that writes a result file with this head, whole or not at all."""
    before = None
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        before.pop("interrupted", None)
    kept = {} if before is None else {"interrupted": before}

    def save(result: dict[str, Any]) -> None:
        write_atomically(file, json.dumps({**head, **result, **kept}) + "\n")

    return save


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stage of the command line; return 1 if it raised, after its error is in the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="a stage, or the module of one")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--work", type=Path, required=True, help="a folder for files that are not results")
    given = parser.parse_args(arguments)
    end_with_parent()
    for module in given.imports:
        importlib.import_module(module)
    given.work.mkdir(parents=True, exist_ok=True)
    module = next((one.module for one in STAGES if one.name == given.name), given.name)
    last: dict[str, Any] = {}
    head = {"kind": "keyedopt-first-light", "stage": given.name, "device": given.device}
    write = saver(given.file, head)

    def save(result: dict[str, Any]) -> None:
        last.clear()
        last.update(result)
        write({**result, "complete": False})

    save({})
    context = Context(given.file, given.device, given.small, given.seconds, given.work, save)
    try:
        importlib.import_module(module).run(context)
    except Exception as error:
        write({**last, "complete": False, "error": error_text(error)})
        raise
    write({**last, "complete": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
