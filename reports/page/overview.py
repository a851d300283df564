"""The overview: a card for each implementation, and a table of areas and implementations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from keyedopt.conformance.results.verdict import FAILING, UNSUPPORTED, headline
from keyedopt.conformance.spec import LEVELS
from keyedopt.reports.page.figures import Look
from keyedopt.reports.page.precision import subjects
from keyedopt.reports.tables import HELD, Frame, Tables, checked, held


def view(tables: Tables, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return the cards, the worst first, and the table of areas."""
    listed: Frame = tables.runs
    runs = [row for row in listed.to_dict("records") if row["run"] in looks]
    precision = _precision(tables)
    ranked = sorted((_card(run, tables, precision) for run in runs), key=_worst_first)
    return {"ranked": ranked, "areas": _areas(tables, list(looks)), "levels": LEVELS}


def _worst_first(card: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the key by which the worst verdict comes first: musts, then the share of shoulds."""
    missed, of = card["shoulds"]
    return (-card["musts"], -(missed / of if of else 0), card["state"] == "pass")


def _state(verdict: str, missed: int, precision: Mapping[str, Any] | None) -> str:
    """Return the colour of a verdict: amber, ``partly``, if it is conformant with a reservation."""
    exact = precision is None or np.isfinite(precision["worst"]["error"])
    states = {"conformant": "partly" if missed or not exact else "pass", "partly checked": "partly"}
    return {**states, "not conformant": "fail", "could not be judged": "fail"}.get(verdict, "none")


def _card(run: dict[str, Any], tables: Tables, precision: Mapping[str, Any]) -> dict[str, Any]:
    mine: Frame = tables.clauses[tables.clauses["run"] == run["run"]]
    tried = mine[~mine["outcome"].isin(UNSUPPORTED)]
    expected, limits, causes = (_lines(run.get(name)) for name in ("expectations", "restrictions", "causes"))
    fresh = tried["outcome"].isin(["fail", "error"])
    musts = tried[(tried["level"] == "must") & ~tried["outcome"].isin(HELD)]
    kept, of = held(tried[tried["level"] == "should"])
    return {
        **run,
        "shoulds": (of - kept, of),
        "state": _state(run["verdict"], of - kept, precision.get(run["run"])),
        "headline": headline(run["verdict"], run["scope"]),
        "checked": checked(run),
        "levels": [(level, *held(tried[tried["level"] == level])) for level in LEVELS],
        "total": held(tried[tried["level"] != "recorded"]),
        "new": int(fresh.sum()),
        "known": int((tried["outcome"] == "known").sum()),
        "unexpected": int((tried["outcome"] == "unexpected-pass").sum()),
        "unsupported": [(word, int((mine["outcome"] == word).sum())) for word in UNSUPPORTED],
        "musts": len(musts),
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


def _precision(tables: Tables) -> dict[str, dict[str, Any]]:
    """Return for each run the worst error as a share of its budget, and the median error."""
    frame: Frame = subjects(tables)
    frame = frame[(frame["budget"] > 0) & (frame["unit"] == "ULP")]
    frame = frame.assign(share=frame["error"] / frame["budget"])
    found = {}
    for run, rows in frame.groupby("run"):
        worst = rows.loc[rows["share"].fillna(np.inf).idxmax()]
        found[run] = {
            "count": len(rows),
            "over": int((rows["share"] > 1).sum()),
            "median": float(rows["error"].median()),
            "worst": {key: worst[key] for key in ("error", "budget", "subject", "dtype")},
        }
    return found


def _speed(speeds: Frame, name: str) -> list[tuple[str, str, float, float, int]]:
    """Return the smallest and the largest publishable ratio, by peer and device."""
    mine = speeds[(speeds["implementation"] == name) & speeds["publishable"].fillna(False)]
    return [
        (str(peer), str(device), float(rows["ratio"].min()), float(rows["ratio"].max()), len(rows))
        for (peer, device), rows in mine.groupby(["peer", "device"])
    ]


def _areas(tables: Tables, runs: list[str]) -> list[dict[str, Any]]:
    """Return, by area and run, how many of the checked clauses of each level held, and how many failed."""
    frame: Frame = tables.clauses.dropna(subset=["area"])
    outcomes: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for area, run, level, outcome in frame[["area", "run", "level", "outcome"]].itertuples(index=False):
        cells = outcomes.setdefault(area, {})
        if outcome not in UNSUPPORTED:
            cells.setdefault(run, []).append((level, outcome))
    return [
        {"area": area, "cells": [_cell(cells.get(run, [])) for run in runs]}
        for area, cells in outcomes.items()
    ]


def _cell(outcomes: list[tuple[str, str]]) -> dict[str, Any]:
    by_level = {level: [outcome for at, outcome in outcomes if at == level] for level in LEVELS}
    seen = [outcome for _, outcome in outcomes]
    return {
        "counts": {level: (sum(one in HELD for one in some), len(some)) for level, some in by_level.items()},
        "tried": len(seen),
        "failed": sum(one in (*FAILING, "unexpected-pass") for one in seen),
        "known": seen.count("known"),
    }
