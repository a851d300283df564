"""The view of schedules: the specified curves, and the measured learning rates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from keyedopt.reports.page.figures import INK, Look, above, line, numbered, picture
from keyedopt.reports.tables import Frame, Tables

#: Policies in the order of the documents; other policies come last.
ORDER = ("NONE", "CONSTANT", "LINEAR", "POLY", "STEP", "INVSQRT", "COSINE_ANNEALING_WARM_RESTARTS")
SEVERAL = "several stages"
#: The largest difference of a correct learning rate, relative to the largest rate of the curve.
CLOSE = 1e-12


def view(tables: Tables, looks: Mapping[str, Look], folder: Path | None) -> dict[str, Any]:
    """Return the curves that a run departs from, the worst first, and the others by policy, with plots."""
    frame: Frame = tables.schedules
    groups: dict[str, list[dict[str, Any]]] = {}
    name = numbered("schedule")
    frame = frame.assign(curve=frame["case"].str.extract(r"\[(.*)\]$", expand=False).fillna(frame["case"]))
    for (policy, curve), rows in frame.groupby(["policy", "curve"], sort=False):
        group = policy if policy and ", " not in policy else SEVERAL if policy else "no stage"
        broken = _broken(tables, rows, looks)
        groups.setdefault(group, []).append(_curve(name(), curve, policy, rows, broken, looks, folder))
    order = [*ORDER, *sorted(set(groups) - {*ORDER, SEVERAL}), SEVERAL]
    curves = [curve for group in groups.values() for curve in group]
    found = {run: sum(run in dict(curve["depart"]) for curve in curves) for run in looks}
    departures = [(run, count, len(curves)) for run, count in found.items() if count]
    followed = {
        policy: [curve for curve in groups[policy] if not curve["depart"]]
        for policy in order
        if policy in groups
    }
    return {
        "runs": [run for run in looks if run in set(frame["run"])],
        "departing": sorted((curve for curve in curves if curve["depart"]), key=lambda curve: curve["rank"]),
        "followed": {policy: some for policy, some in followed.items() if some},
        "departures": sorted(departures, key=lambda one: -one[1]),
    }


def _broken(tables: Tables, rows: Frame, looks: Mapping[str, Look]) -> list[str]:
    """Return the runs without learning rates for a curve, as its cases failed before they measured one."""
    cases: Frame = tables.cases
    cases = cases[cases["case"].isin(rows["case"].unique())]
    bad = set(cases[cases["outcome"].isin(["fail", "error", "known"])]["run"])
    return [run for run in looks if run in bad - set(rows["run"])]


def _curve(
    name: str,
    curve: str,
    policy: str,
    rows: Frame,
    broken: list[str],
    looks: Mapping[str, Look],
    folder: Path | None,
) -> dict[str, Any]:
    """Draw one curve: the specification, one mark for all runs that follow it, a line for each other run."""
    series = {run: _consecutive(some) for run, some in rows.groupby("run", sort=False)}
    series = {run: series[run] for run in looks if run in series}
    longest = max(series.values(), key=len)
    x, wanted = longest["iteration"].to_numpy(int), longest["specified"].to_numpy(float)
    follow, depart = [], {}
    for run, some in series.items():
        where = _departs(some)
        if where is None and len(some) == len(longest):
            follow.append(run)
        else:
            depart[run] = where
    notes = [(run, _note(series[run], where)) for run, where in depart.items()]
    notes += [(run, "fails before a learning rate is measured") for run in broken]

    def draw(axes: Axes) -> None:
        axes.plot(x, wanted, color=INK, lw=1.1, zorder=2)
        if follow:
            axes.plot(x, wanted, color=INK, ls="", marker="o", ms=3, mfc="#ffffff", mew=0.8, zorder=3)
        for run in depart:
            some = series[run]
            measured = some["measured"].to_numpy(float)
            finite = np.where(np.isfinite(measured), measured, np.nan)
            at = some["iteration"].to_numpy(int)
            line(axes, at, finite, looks[run])
        axes.set_xlabel("iteration")
        above(axes, "learning rate")
        if np.fmin.reduce(wanted) >= 0 and not depart:
            axes.set_ylim(bottom=0)

    said = "; ".join(f"{run} {note}" for run, note in notes)
    about = f"The specified learning rate by iteration. {len(follow)} implementations follow it. {said}"
    title = f"{curve} ({policy})" if policy else curve
    key = [(run, looks[run]) for run in depart]
    return {
        "picture": picture(name, title, about, draw, folder=folder, key=key),
        "title": curve,
        "stages": policy,
        "follow": follow,
        "depart": notes,
        "rank": _rank(depart, series),
        "clauses": sorted(set(rows["clause"])),
    }


def _rank(departing: Mapping[str, int | None], series: Mapping[str, Frame]) -> tuple[bool, float]:
    """Return the key by which curves with a negative learning rate come first, then early departures."""
    measured = [series[run]["measured"].to_numpy(float) for run in departing]
    lowest = min((float(np.fmin.reduce(some, initial=0.0)) for some in measured), default=0.0)
    return lowest >= 0, min((at for at in departing.values() if at is not None), default=np.inf)


def _consecutive(rows: Frame) -> Frame:
    """Return iterations 0, 1, 2, … of one run; if there are none, all of its iterations."""
    rows = rows.drop_duplicates("iteration").sort_values("iteration")
    at = rows["iteration"].to_numpy(int)
    first = at == np.arange(len(at))
    return rows[first] if first.any() else rows


def _departs(rows: Frame) -> int | None:
    """Return the first iteration at which a run does not have the specified learning rate."""
    wanted, seen = rows["specified"].to_numpy(float), rows["measured"].to_numpy(float)
    room = CLOSE * max(float(np.abs(wanted).max(initial=0.0)), 1e-300)
    with np.errstate(invalid="ignore"):
        wrong = ~((np.abs(seen - wanted) <= room) | (seen == wanted))
    return int(rows["iteration"].iloc[int(np.argmax(wrong))]) if wrong.any() else None


def _note(rows: Frame, where: int | None) -> str:
    if where is None:
        return f"stops after iteration {len(rows) - 1}"
    row = rows[rows["iteration"] == where].iloc[0]
    seen = "no number" if pd.isna(row["measured"]) else f"{row['measured']:.4g}"
    return f"from iteration {where}: {seen} instead of {row['specified']:.4g}"
