"""What the command line says of a mistake, on one line, and how its help is shown."""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer

from keyedopt.conformance.results.errors import did_you_mean
from keyedopt.conformance.results.untrusted import one_line

#: What has to be installed for a report.
NEEDS_REPORTS = "install it with: pip install 'keyedopt[reports]'"


def say(message: str) -> int:
    """Print an error on one line of stderr; return its exit code, 2."""
    sys.stderr.write(f"keyedopt: {one_line(message)}\n")
    return 2


def fail(message: str) -> NoReturn:
    """Print an error on one line of stderr, and exit with 2."""
    raise typer.Exit(say(message))


@contextlib.contextmanager
def with_reports() -> Iterator[None]:
    """Print in one line what to install if a library for reports is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        fail(f"reports need {error.name}; {NEEDS_REPORTS}")


def usage(error: Any) -> str:
    """Return what is wrong with a command line, the nearest name, and the command that helps."""
    text = error.format_message().rstrip(".").replace("Value error, ", "")
    given, _, choices = text.partition(" is not one of ")
    text += did_you_mean(given.rpartition(" ")[2].strip("'"), re.findall(r"'([^']*)'", choices))
    place = error.ctx.command_path if getattr(error, "ctx", None) else "keyedopt"
    return f"{text}; see `{place} --help`"


def uncut(group: typer.Typer) -> None:
    """Show the first line of each verb's help as a whole: click cuts a line that it makes itself."""
    for command in group.registered_commands:
        lines = (command.callback.__doc__ or "").splitlines() if command.callback else []
        command.short_help = lines[0] if lines else None
    for found in group.registered_groups:
        if found.typer_instance is not None:
            uncut(found.typer_instance)
