"""The speed of the harness itself: imports and commands, each in a process of its own.

Their seconds mean little on another machine, so each is measured in pairs with ``import torch``.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from keyedopt.benchmarks import timing
from keyedopt.benchmarks.timing import Budget, Clock, Job
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.untrusted import one_line

#: Modules whose import is timed.
MODULES = ("keyedopt.cli.main", "keyedopt.fused", "keyedopt.reference", "keyedopt.conformance.run.runner")
#: Commands by name; the small area shows what a verdict costs besides its cases.
COMMANDS = {
    "help": ("--help",),
    "list": ("list", "areas"),
    "explain": ("explain", "CLIP-001"),
    "check": ("check", "reference", "--area", "combined", "--dtype", "float32", "--workers", "1"),
}
#: The process that all others are compared with.
BASE = (sys.executable, "-c", "import torch")


class HarnessError(KeyedoptError):
    """An import or a command failed; the message has the last line of its stderr."""


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HarnessError(f"{what} ended with {done.returncode}: {one_line(last, 300)}")
    return done.stdout


def _import_torch() -> str:
    return _run(list(BASE), "import torch")


def command_job(name: str) -> Job:
    """Return the job of running a command of `COMMANDS`, which raises HarnessError if it fails."""
    command = [sys.executable, "-m", "keyedopt.cli.main", *COMMANDS[name]]
    return Job(run=lambda: _run(command, f"keyedopt {name}"), results=dict)


def import_job(module: str, without_torch: bool = True) -> Job:
    """Return the job of importing a module in a new process, which raises HarnessError if it fails.

    Args:
        module: its name.
        without_torch: whether the time of ``import torch`` is subtracted.
    """
    command = [sys.executable, "-c", f"import {module}"]
    less = _import_torch if without_torch else None
    return Job(run=lambda: _run(command, f"import {module}"), results=dict, less=less)


@dataclass(frozen=True)
class Took:
    """How long an import or a command took.

    Args:
        name: the command line, or the import statement.
        seconds: the median, the 10th and the 90th percentile.
        ratio, low, high: the ratio to ``import torch``, with its 95 % confidence interval.
        samples, base_samples: the seconds of each run, and of each ``import torch``.
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
    """Time each import and each command in pairs with ``import torch``.

    Raises:
        HarnessError: one of them failed.
    """
    jobs = {f"import {module}": import_job(module, without_torch=False) for module in MODULES}
    jobs |= {f"keyedopt {' '.join(words)}": command_job(name) for name, words in COMMANDS.items()}
    base = Job(run=_import_torch, results=dict)
    found = []
    for done, (name, job) in enumerate(jobs.items()):
        progress(name, done, len(jobs))
        job.run()  # reads the files into memory
        theirs, ours = timing.measure(clock, base, job, budget)
        ratio = timing.ratio(theirs, ours)
        seconds = timing.quantiles(ours)
        found.append(Took(name, seconds, ratio.value, ratio.low, ratio.high, ours, theirs))
    return found
