"""The overview: the worst finding, areas against implementations, and a card for each implementation."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import FAILING, UNSUPPORTED, headline
from keyedopt.conformance.spec import LEVELS, areas
from keyedopt.reports.page.figures import Look
from keyedopt.reports.page.precision import subjects
from keyedopt.reports.tables import HELD, Clause, Frame, Tables, checked, held

#: The shares of clauses that do not hold from which a cell of the heat map has a stronger colour.
STRONGER = (0.05, 0.2)
#: How the text about a failure begins that an implementation reports itself, by an error.
LOUD = re.compile(r"(raises |raised )?[\w.]*(Error|Exception)\b")


def view(tables: Tables, clauses: Mapping[str, Clause], looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return the verdicts, the worst first, the worst finding, and the heat map of areas."""
    listed: Frame = tables.runs
    runs = [row for row in listed.to_dict("records") if row["run"] in looks]
    precision = _precision(tables)
    ranked = sorted((_card(run, tables, precision) for run in runs), key=_worst_first)
    order = [card["run"] for card in ranked]
    return {
        "ranked": ranked,
        "worst": _worst(tables, clauses, order),
        "areas": _areas(tables, order),
        "levels": LEVELS,
    }


def _worst_first(card: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the key by which the worst verdict comes first: musts, then the share of shoulds."""
    (musts, _), (missed, of) = (card["failing"][level] for level in ("must", "should"))
    return (-musts, -(missed / of if of else 0), card["state"] == "pass")


def _state(verdict: str, missed: int, precision: Mapping[str, Any] | None) -> str:
    """Return the colour of a verdict: amber, ``partly``, if it is conformant with a reservation."""
    exact = precision is None or np.isfinite(precision["error"])
    states = {"conformant": "partly" if missed or not exact else "pass", "partly checked": "partly"}
    return {**states, "not conformant": "fail", "could not be judged": "fail"}.get(verdict, "none")


def _card(run: dict[str, Any], tables: Tables, precision: Mapping[str, Any]) -> dict[str, Any]:
    mine: Frame = tables.clauses[tables.clauses["run"] == run["run"]]
    expected, limits, causes = (_lines(run.get(name)) for name in ("expectations", "restrictions", "causes"))
    counts = {level: held(mine[mine["level"] == level]) for level in LEVELS}
    failing = {level: (of - kept, of) for level, (kept, of) in counts.items()}
    outcomes = mine["outcome"]
    return {
        **run,
        "failing": failing,
        "state": _state(run["verdict"], failing["should"][0], precision.get(run["run"])),
        "headline": headline(run["verdict"], run["scope"]),
        "checked": checked(run),
        "new": int(outcomes.isin(FAILING).sum()),
        "known": int((outcomes == "known").sum()),
        "unexpected": int((outcomes == "unexpected-pass").sum()),
        "left_out": [(int((outcomes == word).sum()), word) for word in UNSUPPORTED],
        "expectations": expected,
        "restrictions": limits,
        "causes": causes,
        "expired": sum(line.startswith("expired") for line in expected),
        "precision": precision.get(run["run"]),
        "speed": _speed(tables.speeds, str(run["implementation"])),
    }


def _lines(text: Any) -> list[str]:
    """Return the lines of a cell, which may be empty or missing."""
    return [] if pd.isna(text) or not text else str(text).split("\n")


def _worst(tables: Tables, clauses: Mapping[str, Clause], order: Sequence[str]) -> dict[str, str] | None:
    """Return the worst finding and the command that repeats it, or None if nothing fails.

    A must comes before a should, a new failure before a known one, a wrong result without an error before an
    error, what several implementations do before what one does.
    """
    frame: Frame = tables.cases
    frame = frame[frame["outcome"].isin((*FAILING, "known")) & frame["run"].isin(order)]
    if not len(frame):
        return None
    levels: Frame = tables.clauses.drop_duplicates("clause").set_index("clause")["level"]
    frame = frame.assign(
        level=frame["clause"].map(levels).fillna("unknown"),
        expected_failure=frame["outcome"] == "known",
        loud=frame["seen"].fillna("").str.match(LOUD) | (frame["outcome"] == "error"),
        fewer=-frame.groupby("clause")["run"].transform("nunique"),
        place=frame["run"].map(order.index),
    )
    frame["first"] = frame["level"].map((*LEVELS, "unknown").index)
    row = frame.sort_values(["first", "expected_failure", "loud", "fewer", "place"], kind="stable").iloc[0]
    reason, link = (one_line("" if pd.isna(row[name]) else row[name], 300) for name in ("reason", "link"))
    script = PurePosixPath(link).stem
    about = clauses.get(row["clause"])
    found = any(script == name for _, name, _ in about.reproducers) if about else False
    expected, seen = ("" if pd.isna(row[name]) else one_line(row[name], 160) for name in ("expected", "seen"))
    promise = about.statement.rstrip(".") if about else f"expected {expected}"
    return {
        "run": row["run"],
        "clause": row["clause"],
        "level": row["level"],
        "why": reason or f"{promise}; seen: {seen.partition('; ')[0]}",
        "command": f"keyedopt findings {script}" if found else row["replay"],
    }


def _precision(tables: Tables) -> dict[str, dict[str, Any]]:
    """Return for each run the worst error relative to its budget, and how many errors are above theirs."""
    frame: Frame = subjects(tables)
    frame = frame[(frame["budget"] > 0) & (frame["unit"] == "ULP")]
    frame = frame.assign(share=frame["error"] / frame["budget"])
    found = {}
    for run, rows in frame.groupby("run"):
        worst = rows.loc[rows["share"].fillna(np.inf).idxmax()]
        found[run] = {
            **{key: worst[key] for key in ("share", "error", "budget", "subject", "dtype")},
            "count": len(rows),
            "over": int((rows["share"] > 1).sum()),
        }
    return found


def _speed(speeds: Frame, name: str) -> list[tuple[str, str, float, float, int]]:
    """Return the smallest and the largest publishable ratio, by peer and device."""
    mine = speeds[(speeds["implementation"] == name) & speeds["publishable"].fillna(False)]
    return [
        (str(peer), str(device), float(rows["ratio"].min()), float(rows["ratio"].max()), len(rows))
        for (peer, device), rows in mine.groupby(["peer", "device"])
    ]


def _areas(tables: Tables, runs: Sequence[str]) -> list[dict[str, Any]]:
    """Return, by area and run, how many of the checked clauses do not hold."""
    frame: Frame = tables.clauses.dropna(subset=["area"])
    cells: dict[str, dict[str, list[tuple[str, str]]]] = {}
    order = [*areas(), *frame["area"].unique()]
    for area, run, level, outcome in frame[["area", "run", "level", "outcome"]].itertuples(index=False):
        cells.setdefault(area, {}).setdefault(run, []).append((level, outcome))
    return [
        {"area": area, "cells": [{"run": run, **_cell(found.get(run, []))} for run in runs]}
        for area, found in sorted(cells.items(), key=lambda cell: order.index(cell[0]))
    ]


def _cell(outcomes: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the counts of a cell of the heat map, and its colour: ``heat``, from 0 to 3."""
    tried = [(level, outcome) for level, outcome in outcomes if outcome not in UNSUPPORTED]
    failing = [level for level, outcome in tried if outcome not in HELD]
    counts = [(failing.count(level), level) for level in LEVELS if level in failing]
    share = len(failing) / len(tried) if tried else 0.0
    seen = {outcome for _, outcome in outcomes}
    return {
        "tried": len(tried),
        "failing": counts,
        "must": "must" in failing,
        "heat": sum(share > limit for limit in (0.0, *STRONGER)),
        "lost": next((word for word in UNSUPPORTED if word in seen), "not run"),
    }
