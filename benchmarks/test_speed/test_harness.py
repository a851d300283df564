"""What imports and commands of the harness take."""

import subprocess
import sys
from typing import Any

import pytest

from keyedopt.benchmarks.harness import COMMANDS, MODULES, run


@pytest.mark.parametrize("module", MODULES)
def test_import(benchmark: Any, module: str) -> None:
    """Import a module in a process of its own, torch included."""
    command = [sys.executable, "-c", f"import {module}"]
    done = benchmark.pedantic(subprocess.run, args=(command,), rounds=3)
    assert done.returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_command(benchmark: Any, command: str) -> None:
    """Run a command."""
    assert benchmark.pedantic(run, args=(command,), rounds=3)
