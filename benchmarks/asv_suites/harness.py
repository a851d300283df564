"""The harness itself: how long imports and commands take."""

import importlib.util
from typing import Any, ClassVar

from keyedopt.benchmarks.harness import COMMANDS, MODULES, run


class Import:
    """Imports, each in a process of its own, after torch."""

    params: ClassVar[Any] = (MODULES,)
    param_names: ClassVar[tuple[str, ...]] = ("module",)
    number: ClassVar[int] = 1
    repeat: ClassVar[int] = 3
    rounds: ClassVar[int] = 1
    warmup_time: ClassVar[float] = 0.0

    def setup(self, module: str) -> None:
        """Leave out what a commit has not."""
        _need(module)

    def timeraw_import(self, module: str) -> tuple[str, str]:
        """Return what is timed, and what comes before."""
        return f"import {module}", "import torch"


class Command:
    """Commands, from the start of the process to its end."""

    params: ClassVar[Any] = (tuple(COMMANDS),)
    param_names: ClassVar[tuple[str, ...]] = ("command",)
    number: ClassVar[int] = 1
    repeat: ClassVar[int] = 3
    warmup_time: ClassVar[float] = 0.0
    timeout: ClassVar[float] = 300.0

    def setup(self, command: str) -> None:
        """Leave out what a commit has not."""
        _need("keyedopt.cli.main")

    def time_command(self, command: str) -> None:
        """Run it."""
        run(command)


def _need(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    if found is None:
        raise NotImplementedError(f"no {module}")
