"""The choices of options, and the options that several verbs have."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer


class Level(StrEnum):
    """Which clauses a gate covers."""

    must = "must"
    should = "should"


class What(StrEnum):
    """What `keyedopt list` can list."""

    targets = "targets"
    clauses = "clauses"
    areas = "areas"
    devices = "devices"


class Form(StrEnum):
    """What a report can be."""

    html = "html"
    csv = "csv"
    parquet = "parquet"
    markdown = "markdown"
    json = "json"
    badge = "badge"


class DiffForm(StrEnum):
    """How a difference can be shown."""

    text = "text"
    markdown = "markdown"
    json = "json"


TimeLimit = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Seconds that a case may take, of CPU time or asleep; raises the other limits too.",
        min=0.1,
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module first, such as torch_npu, which registers a device; repeatable.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def names(values: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names in repeated options, each of which may have several, separated by commas.

    >>> names(["keyed, combined", "wrapper"])
    ('keyed', 'combined', 'wrapper')
    """
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())
