"""The time of imports and commands of the harness."""

from typing import Any

import pytest

from keyedopt.benchmarks.harness import COMMANDS, MODULES, command_job, import_job
from keyedopt.benchmarks.timing import CpuClock


@pytest.mark.parametrize("module", MODULES)
def test_import(measure: Any, module: str) -> None:
    """Import a module in a process of its own, including torch."""
    measure(CpuClock(), import_job(module, without_torch=False), 3)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(measure: Any, command: str) -> None:
    """Run a command."""
    measure(CpuClock(), command_job(command), 3)
