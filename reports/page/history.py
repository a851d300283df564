"""The view of history: measurements over commits, with the steps that were detected."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from keyedopt.reports.page.figures import BAND, INK, MUTED, SERIES, above, numbered, picture
from keyedopt.reports.tables import Frame, Tables

#: The largest number of series that are drawn; those with the largest steps come first. The table has all.
DRAWN = 24
#: The smallest step that is shown, relative to the level before.
LEAST = 0.02
#: Units in which a step up is an alarm: bytes, and a ratio to a peer in the same process.
ALARMS = ("B", "of peer")


def detect(values: NDArray[np.float64]) -> list[int]:
    """Return the places at which the level of a series changes: the first place of each new level.

    The levels minimize the sum of absolute distances to the median of their level, plus a price for each
    level. The price grows with the noise, which is estimated from differences of neighbours. A level has at
    least two points, so that a single outlier is not a step.

    >>> detect(np.array([1.0, 1.01, 0.99, 1.0, 1.5, 1.51, 1.49, 1.5]))
    [4]
    >>> detect(np.array([1.0, 1.0, 9.0, 1.0, 1.0]))
    []
    """
    count = len(values)
    if count < 4:
        return []
    noise = float(np.median(np.abs(np.diff(values)))) / np.sqrt(2)
    price = 4 * max(noise, LEAST / 4 * float(np.median(np.abs(values)))) * np.log(max(count, 3))
    best = np.full(count + 1, np.inf)
    best[0] = -price
    before = np.zeros(count + 1, dtype=int)
    for end in range(2, count + 1):
        for start in range(end - 1):
            level = values[start:end]
            cost = best[start] + price + float(np.abs(level - np.median(level)).sum())
            if cost < best[end] - 1e-12:
                best[end], before[end] = cost, start
    found, end = [], count
    while end:
        end = int(before[end])
        found.append(end)
    return found[-2::-1]  # without 0, where the first level begins


def view(tables: Tables, commit_url: str, folder: Path | None) -> dict[str, Any]:
    """Return every series of measurements with its steps, and plots of those with the largest steps."""
    keys = ["benchmark", "parameters", "machine"]
    series = []
    measured = tables.history[np.isfinite(tables.history["value"])]
    for (benchmark, parameters, machine), rows in measured.groupby(keys, sort=True, dropna=False):
        rows = rows.sort_values("date", kind="stable").tail(300)
        values = rows["value"].to_numpy(float)
        cuts = detect(values)
        edges = [0, *cuts, len(values)]
        levels = [float(np.median(values[a:b])) for a, b in itertools.pairwise(edges)]
        unit = rows["unit"].iloc[-1]
        unit = "" if pd.isna(unit) else str(unit)
        higher = unit.endswith("/s")
        steps = [
            _step(rows.iloc[cut], levels[index], levels[index + 1], higher, commit_url)
            for index, cut in enumerate(cuts)
            if abs(levels[index + 1] / levels[index] - 1) >= LEAST
        ]
        series.append(
            {
                "benchmark": benchmark,
                "parameters": parameters,
                "machine": machine,
                "rows": rows,
                "edges": edges,
                "levels": levels,
                "steps": steps,
                "unit": unit,
                "higher": higher,
                "alarms": unit in ALARMS,
                "points": len(rows),
                "last": values[-1],
                "picture": None,
            }
        )
    largest = {id(one): max((abs(step["change"]) for step in one["steps"]), default=0.0) for one in series}
    series.sort(key=lambda one: (not (one["alarms"] and one["steps"]), -largest[id(one)]))
    name = numbered("history")
    for one in series[:DRAWN]:
        one["picture"] = _draw(name(), one, folder)
    over_commits = tables.runs["kind"].isin(["asv", "pytest-benchmark"])
    gpu = bool(tables.runs["gpu"][over_commits].notna().any())
    return {"series": series, "drawn": min(DRAWN, len(series)), "gpu": gpu}


def _step(row: Frame, before: float, after: float, higher: bool, commit_url: str) -> dict[str, Any]:
    commit = str(row["commit"])
    return {
        "commit": commit,
        "link": commit_url.replace("{commit}", commit) if commit_url else "",
        "date": row["date"],
        "before": before,
        "after": after,
        "change": after / before - 1,
        "worse": (after > before) != higher,
    }


def _draw(name: str, one: dict[str, Any], folder: Path | None) -> Any:
    rows = one["rows"]
    x = np.arange(len(rows))
    unit, scale = _unit(one["unit"], float(rows["value"].abs().max()))

    def draw(axes: Axes) -> None:
        low, high = (rows[end].to_numpy(float) / scale for end in ("low", "high"))
        known = np.isfinite(low) & np.isfinite(high)
        if known.any():
            axes.fill_between(
                x, np.where(known, low, np.nan), np.where(known, high, np.nan), color=BAND, lw=0
            )
        axes.plot(
            x, rows["value"] / scale, color=SERIES[0], marker="o" if len(x) < 40 else "", ms=2.5, lw=0.8
        )
        for a, b, level in zip(one["edges"][:-1], one["edges"][1:], one["levels"], strict=True):
            axes.plot([a, b - 1], [level / scale] * 2, color=INK, lw=1.6)
        for cut in one["edges"][1:-1]:
            axes.axvline(cut - 0.5, color=MUTED, lw=1, ls=(0, (2, 2)))
        marks = sorted({0, len(rows) - 1, *one["edges"][1:-1]})
        marks = [m for i, m in enumerate(marks) if i == 0 or m - marks[i - 1] > len(rows) / 6]
        axes.set_xticks(marks, [str(rows["commit"].iloc[m])[:7] for m in marks])
        axes.set_xlabel("commit")
        above(axes, unit or "value")
        axes.set_ylim(bottom=0)

    said = "; ".join(f"{step['change']:+.1%} at {step['commit'][:10]}" for step in one["steps"])
    about = f"{len(rows)} commits on {one['machine']}. " + (f"Steps: {said}." if said else "No step.")
    title = " ".join(part for part in (one["benchmark"], one["parameters"]) if part)
    return picture(name, title, about, draw, (3.6, 2.1), (0.5, 0.42, 0.28, 0.24), folder=folder)


def _unit(unit: str, largest: float) -> tuple[str, float]:
    """Return the unit in which a series is drawn, and its size in the unit of the series.

    >>> _unit("s", 0.02)
    ('ms', 0.001)
    """
    scales = {"s": (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)),
              "B": (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))}.get(unit, ((unit, 1.0),))  # fmt: skip
    return next((scale for scale in scales if largest >= scale[1]), scales[-1])
