"""The harness as something that is timed: imports and commands, each in a process of its own.

What they take says little on another machine, so each is measured beside ``import torch`` alone, in pairs.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from keyedopt.benchmarks import timing
from keyedopt.benchmarks.timing import Budget, Clock, Job

#: Modules whose import is timed.
MODULES = ("keyedopt.cli.main", "keyedopt.fused", "keyedopt.reference", "keyedopt.conformance.run.runner")
#: Commands by name; a small area says what a verdict costs beside its cases.
COMMANDS = {
    "help": ("--help",),
    "list": ("list", "areas"),
    "explain": ("explain", "CLIP-001"),
    "check": ("check", "reference", "--area", "combined", "--dtype", "float32", "--workers", "1"),
}
#: What all are compared with.
BASE = (sys.executable, "-c", "import torch")


def run(name: str) -> str:
    """Run a command of `COMMANDS`, and return what it printed.

    Raises:
        RuntimeError: it failed; the message has the last line of what it printed on stderr.
    """
    return _run([sys.executable, "-m", "keyedopt.cli.main", *COMMANDS[name]], f"keyedopt {name}")


def import_of(module: str) -> str:
    """Import a module in a new process.

    Raises:
        RuntimeError: it cannot be imported.
    """
    return _run([sys.executable, "-c", f"import {module}"], f"import {module}")


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{what} ended with {done.returncode}: {said}")
    return done.stdout


@dataclass(frozen=True)
class Took:
    """What an import or a command took.

    Args:
        name: the command line, or the import.
        seconds: median, and what a tenth and nine tenths of the runs are below.
        ratio, low, high: how many times as long it takes as ``import torch``; the interval holds it at 95 %.
        samples, base_samples: the seconds of each run of it, and of ``import torch``.
    """

    name: str
    seconds: dict[str, float]
    ratio: float
    low: float
    high: float
    samples: list[float]
    base_samples: list[float]


def measure(
    clock: Clock,
    budget: Budget,
    progress: Callable[[str, int, int], object] = lambda text, done, total: None,
) -> list[Took]:
    """Time each import and each command, in pairs with ``import torch``.

    Raises:
        RuntimeError: one of them failed.
    """
    calls: dict[str, Callable[[], object]] = {
        f"import {module}": lambda module=module: import_of(module)  # type: ignore[misc]
        for module in MODULES
    }
    for name, words in COMMANDS.items():
        calls[f"keyedopt {' '.join(words)}"] = lambda name=name: run(name)  # type: ignore[misc]
    base = Job(run=lambda: _run(list(BASE), "import torch"), results=dict)
    found = []
    for done, (name, call) in enumerate(calls.items()):
        progress(name, done, len(calls))
        call()  # so that what it reads is in memory
        theirs, ours = timing.measure(clock, base, Job(run=call, results=dict), budget)
        ratio = timing.ratio(theirs, ours)
        seconds = timing.quantiles(ours)
        found.append(Took(name, seconds, ratio.value, ratio.low, ratio.high, ours, theirs))
    return found
