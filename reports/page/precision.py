"""The view of precision: measured errors against steps and against aggregated rows, with their budgets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from keyedopt.reports.page.figures import MUTED, Look, Picture, above, line, numbered, peaks, picture
from keyedopt.reports.tables import Frame, Tables

#: The order of dtypes; other dtypes come last.
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: The largest number of pictures of a dtype, and of pictures against rows. The table below has every case.
PICTURES = 24
#: The smallest error that the logarithmic axis shows, by unit; smaller errors are drawn there.
FLOOR = {"ULP": 0.05, "relative": 1e-9}


def view(tables: Tables, looks: Mapping[str, Look], folder: Path | None) -> dict[str, Any]:
    """Return the plots against steps, by dtype, those against rows, and the worst errors as a table."""
    frame: Frame = subjects(tables)
    name = numbered("precision")
    steps = frame[frame["steps"].notna() & (frame["unit"] == "ULP")]
    weights = steps[steps["quantity"] == "weight"]
    by_dtype: dict[str, list[Picture]] = {}
    left_out: dict[str, int] = {}
    for (dtype, subject), rows in (weights if len(weights) else steps).groupby(["dtype", "subject"]):
        drawn = by_dtype.setdefault(dtype, [])
        if len(drawn) < PICTURES:
            drawn.append(_against(name(), "steps", subject, dtype, _most_common(rows), looks, folder))
        else:
            left_out[dtype] = left_out.get(dtype, 0) + 1
    order = [*(d for d in DTYPES if d in by_dtype), *sorted(set(by_dtype) - set(DTYPES))]
    many = frame[frame["rows"] > 0]
    groups = list(many.groupby(["unit", "subject", "dtype"], sort=False))
    rows_plots = [
        _against(name(), "rows", subject, dtype, rows, looks, folder)
        for (_, subject, dtype), rows in groups[:PICTURES]
    ]
    runs = [run for run in looks if run in set(frame["run"])]
    worst = _worst(frame, runs)
    return {
        "above": _above(worst, runs),
        "steps": [(dtype, by_dtype[dtype], left_out.get(dtype, 0)) for dtype in order],
        "rows": rows_plots,
        "rows_left_out": len(groups) - len(rows_plots),
        "runs": runs,
        "worst": worst,
        "measurements": len(frame),
    }


def subjects(tables: Tables) -> Frame:
    """Return the errors with a readable subject: the algorithm, the area, or both."""
    frame: Frame = tables.errors
    areas: Frame = tables.clauses.drop_duplicates("clause").set_index("clause")["area"]
    area = frame["clause"].map(areas).fillna(frame["clause"])
    subject = frame["subject"].fillna("")
    place = {"fused": "embedding module", "accumulate": "accumulating"}
    named = area.map(lambda text: place.get(text, text))
    plain = area.isin(["algorithms", "sparse"]) & (subject != "")
    both = (named + ": " + subject).where(subject != "", named)
    return frame.assign(subject=subject.where(plain, both), dtype=frame["dtype"].fillna("unknown dtype"))


def _most_common(rows: Frame) -> Frame:
    """Return the rows of the case that most runs have; several cases would have several budgets."""
    counts = rows.groupby("case")["run"].nunique()
    first = min(counts.index, key=lambda case: (-counts[case], len(case), case))
    return rows[rows["case"] == first]


def _against(
    name: str,
    axis: str,
    subject: str,
    dtype: str,
    rows: Frame,
    looks: Mapping[str, Look],
    folder: Path | None,
) -> Picture:
    """Draw the error of each run against the number of steps or rows, and its budget."""
    unit = str(rows["unit"].iloc[0])
    floor = FLOOR.get(unit, 1e-12)
    budget = rows.groupby(axis)["budget"].min()
    budget = budget[np.isfinite(budget)]
    runs = [run for run in looks if run in set(rows["run"])]
    series = {run: rows[rows["run"] == run].groupby(axis)["error"].max() for run in runs}
    largest = max((some[np.isfinite(some)].max() for some in series.values()), default=1.0)
    ceiling = 3 * max(float(np.nan_to_num(largest)), float(budget.max()) if len(budget) else 1.0, floor)

    def draw(axes: Axes) -> None:
        axes.set_yscale("log")
        if axis == "rows":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: _count(value))
        if len(budget):
            alone = "_" if len(budget) == 1 else ""
            axes.plot(
                budget.index, budget, color=MUTED, lw=2.2, ls=(0, (1, 1)), marker=alone, ms=12, zorder=1
            )
            axes.annotate("budget", (budget.index[-1], budget.iloc[-1]), (0, 3), textcoords="offset points",
                          ha="right", va="bottom", fontsize=8, color=MUTED)  # fmt: skip
        for run, some in series.items():
            points = peaks(list(some.items()))
            line(axes, [at for at, _ in points], np.clip([y for _, y in points], floor, ceiling), looks[run])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("steps" if axis == "steps" else "gradients of one row")
        above(axes, "error of the weight, ULP" if axis == "steps" else f"error, {unit}")
        axes.set_ylim(floor * 0.7, ceiling * 1.2)

    over = [run for run, some in series.items() if (some > budget.reindex(some.index)).any()]
    said = f"Above the budget: {', '.join(over)}." if over else "None is above the budget."
    what = "steps" if axis == "steps" else "gradients added up in one row"
    about = f"Error in {unit} against the number of {what}, {dtype}. {said}"
    key = [(run, looks[run]) for run in runs]
    return picture(name, f"{subject}, {dtype}", about, draw, folder=folder, key=key)


def _count(value: float) -> str:
    """Write a large number briefly, for an axis.

    >>> _count(100_000)
    '100 k'
    """
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g} {letter}"
    return f"{value:g}"


def _worst(frame: Frame, runs: list[str]) -> list[dict[str, Any]]:
    """Return each run's worst error as a share of its budget by subject and dtype, those above it first."""
    judged = frame[frame["budget"] > 0]
    judged = judged.assign(share=judged["error"] / judged["budget"]).sort_values("share", kind="stable")
    last = judged.groupby(["subject", "dtype", "run"], sort=True).tail(1)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in last.sort_values(["subject", "dtype"]).itertuples():
        found.setdefault((row.subject, row.dtype), {})[row.run] = {
            "share": row.share,
            "error": row.error,
            "budget": row.budget,
            "unit": row.unit,
        }
    listed = [
        {"subject": subject, "dtype": dtype, "cells": [cells.get(run) for run in runs]}
        for (subject, dtype), cells in found.items()
    ]
    return sorted(listed, key=lambda row: not any(map(_is_above, row["cells"])))


def _is_above(cell: Mapping[str, Any] | None) -> bool:
    """Return whether an error is above its budget, or not finite."""
    return cell is not None and not cell["share"] <= 1


def _above(worst: list[dict[str, Any]], runs: list[str]) -> list[tuple[str, int, int, list[str]]]:
    """Return the runs with errors above the budget: how many rows of the table, of how many, and which."""
    found = []
    for index, run in enumerate(runs):
        mine = [row for row in worst if row["cells"][index] is not None]
        bad = [f"{row['subject']} {row['dtype']}" for row in mine if _is_above(row["cells"][index])]
        if bad:
            found.append((run, len(bad), len(mine), bad))
    return found
