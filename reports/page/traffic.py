"""The view of traffic: the messages and bytes that a rank sends, by the number of ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from keyedopt.reports.page.figures import Look, Picture, above, line, numbered, picture
from keyedopt.reports.tables import Frame, Tables

#: The clause whose records are drawn, and the names of these records.
CLAUSE = "SHARD-029"
RECORD = (
    r"^(?P<what>[a-z_]+)/(?P<ranks>\d{1,9}) ranks, (?P<parameters>\d{1,9}) parameters/"
    r"(?P<quantity>messages|bytes)$"
)


def view(tables: Tables, looks: Mapping[str, Look], folder: Path | None) -> dict[str, Any]:
    """Return a plot of the bytes by ranks for each operation, and all numbers as a table."""
    frame: Frame = tables.records[tables.records["clause"] == CLAUSE]
    frame = frame.join(frame["name"].str.extract(RECORD)).dropna(subset=["what", "value"])
    frame = frame.astype({"ranks": int, "parameters": int}).sort_values(["ranks", "parameters"])
    runs = [run for run in looks if run in set(frame["run"])]
    name = numbered("traffic")
    largest = frame[frame["parameters"] == frame["parameters"].max()]
    sizes = largest[largest["quantity"] == "bytes"].groupby("what", sort=False)
    rows = []
    for (what, ranks, parameters), some in frame.groupby(["what", "ranks", "parameters"]):
        numbers = some.drop_duplicates(["run", "quantity"]).set_index(["run", "quantity"])["value"]
        rows.append(
            {
                "what": what,
                "at": f"{ranks:,} ranks, {_counted(parameters, 'parameter')}",
                "cells": [_said(numbers.get((run, "messages")), numbers.get((run, "bytes"))) for run in runs],
            }
        )
    return {
        "runs": runs,
        "pictures": [_by_ranks(name(), str(what), some, looks, folder) for what, some in sizes],
        "rows": rows,
    }


def _said(messages: float | None, size: float | None) -> str:
    if messages is None or size is None:
        return "–"
    return f"{_counted(messages, 'message')}, {_counted(size, 'byte')}"


def _counted(number: float, noun: str) -> str:
    """Return a number with its noun.

    >>> _counted(1, "byte"), _counted(1000, "byte")
    ('1 byte', '1,000 bytes')
    """
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def _by_ranks(name: str, what: str, rows: Frame, looks: Mapping[str, Look], folder: Path | None) -> Picture:
    series = {run: some for run in looks if len(some := rows[rows["run"] == run])}

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_yscale("symlog", linthresh=10)
        points = {run: (some["ranks"].to_list(), some["value"].to_list()) for run, some in series.items()}
        for run, (x, y) in points.items():
            later = list(points)[list(points).index(run) + 1 :]
            line(axes, x, y, looks[run], sum(points[other] == (x, y) for other in later))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ticks: list[float] = []
        for value in sorted({float(some["value"].iloc[-1]) for some in series.values()}, reverse=True):
            if not ticks or value <= ticks[-1] / 2:  # closer labels would overlap
                ticks.append(value)
        axes.set_yticks(ticks)
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_xlabel("ranks")
        above(axes, "bytes that a rank sends")

    parameters = int(rows["parameters"].iloc[0])
    said = "; ".join(f"{run} {some['value'].iloc[-1]:,.0f}" for run, some in series.items())
    about = f"Bytes that a rank sends for {parameters:,} parameters by ranks; with the most ranks: {said}."
    title = f"{what}, {parameters:,} parameters"
    key = [(run, looks[run]) for run in series]
    return picture(name, title, about, draw, folder=folder, key=key)
