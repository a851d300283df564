"""The harness itself: how long imports and commands take."""

import subprocess
import sys
from typing import Any, ClassVar

from keyedopt.benchmarks.harness import COMMANDS, MODULES, command_job, import_job
from keyedopt.benchmarks.timing import CpuClock, Job, once

#: Runs of each job; a run takes seconds.
RUNS = 3


class Import:
    """Imports, each in a process of its own, without the time of `import torch`."""

    params: ClassVar[Any] = (MODULES,)
    param_names: ClassVar[tuple[str, ...]] = ("module",)

    def setup(self, module: str) -> None:
        """Leave out modules that the commit does not have."""
        _need(module)

    def track_seconds(self, module: str) -> Any:
        """Return the seconds of each run, as asv's samples."""
        return _samples(import_job(module))

    track_seconds.unit = "seconds"  # type: ignore[attr-defined]


class Command:
    """Commands, from the start of the process to its end."""

    params: ClassVar[Any] = (tuple(COMMANDS),)
    param_names: ClassVar[tuple[str, ...]] = ("command",)
    timeout: ClassVar[float] = 300.0

    def setup(self, command: str) -> None:
        """Leave out commits without a command line."""
        _need("keyedopt.cli.main")

    def track_seconds(self, command: str) -> Any:
        """Return the seconds of each run, as asv's samples."""
        return _samples(command_job(command))

    track_seconds.unit = "seconds"  # type: ignore[attr-defined]


def _samples(job: Job) -> dict[str, Any]:
    job.run()  # reads the files into memory
    return {"samples": [once(CpuClock(), job) for _ in range(RUNS)], "number": 1}


def _need(module: str) -> None:
    """Leave out a module that the commit does not have; this process has some of today's."""
    code = f"import importlib.util; assert importlib.util.find_spec({module!r})"
    if subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode:
        raise NotImplementedError(f"no {module}")
