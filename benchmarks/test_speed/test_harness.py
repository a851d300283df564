"""What imports and commands of the harness take."""

from typing import Any

import pytest

from keyedopt.benchmarks.harness import COMMANDS, MODULES, import_of, run


@pytest.mark.parametrize("module", MODULES)
def test_import(benchmark: Any, module: str) -> None:
    """Import a module in a process of its own, torch included."""
    assert benchmark.pedantic(import_of, args=(module,), rounds=3) == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_command(benchmark: Any, command: str) -> None:
    """Run a command."""
    assert benchmark.pedantic(run, args=(command,), rounds=3)
