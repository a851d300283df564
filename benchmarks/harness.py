"""The harness as something that is timed: imports and commands, each in a process of its own."""

import subprocess
import sys

#: Modules whose import is timed.
MODULES = ("keyedopt.cli.main", "keyedopt.fused", "keyedopt.reference", "keyedopt.conformance.runner")
#: Commands by name; a small area says what a verdict costs beside its cases.
COMMANDS = {
    "help": ("--help",),
    "list": ("list", "areas"),
    "explain": ("explain", "CLIP-001"),
    "check": ("check", "reference", "--area", "combined", "--dtype", "float32", "--workers", "1"),
}


def run(name: str) -> str:
    """Run a command of `COMMANDS`, and return what it printed.

    Raises:
        RuntimeError: it failed; the message has what it printed on stderr.
    """
    command = [sys.executable, "-m", "keyedopt.cli.main", *COMMANDS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"keyedopt {' '.join(COMMANDS[name])} ended with {done.returncode}: {done.stderr}")
    return done.stdout
