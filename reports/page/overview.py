"""The view of everything at once: a card for each implementation, and areas against implementations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from keyedopt.reports.page.figures import Look
from keyedopt.reports.page.frames import Frame
from keyedopt.reports.page.precision import subjects
from keyedopt.reports.tables import HELD, Clause, Tables

LEVELS = ("must", "should", "observe")


def view(tables: Tables, clauses: Mapping[str, Clause], looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return the cards and the table."""
    listed: Frame = tables.runs
    runs = [row for row in listed.to_dict("records") if row["run"] in looks]
    precision = _precision(tables)
    cards = [_card(run, tables, looks[run["run"]], precision) for run in runs]
    return {"cards": cards, "areas": _areas(tables, list(looks)), "levels": LEVELS}


def _card(run: dict[str, Any], tables: Tables, look: Look, precision: Mapping[str, Any]) -> dict[str, Any]:
    mine: Frame = tables.clauses[tables.clauses["run"] == run["run"]]
    tried = mine[mine["outcome"] != "unsupported"]
    bad = run.get("expectations")
    expected = [] if pd.isna(bad) or not bad else str(bad).split("\n")
    fresh = tried["outcome"].isin(["fail", "error"])
    musts = tried[(tried["level"] == "must") & ~tried["outcome"].isin(HELD)]
    conformant = run["conformant"]
    return {
        **run,
        "look": look,
        "verdict": "unknown" if pd.isna(conformant) else "conformant" if conformant else "not conformant",
        "levels": [(level, *_counts(tried[tried["level"] == level])) for level in LEVELS],
        "total": _counts(tried[tried["level"] != "observe"]),
        "new": int(fresh.sum()),
        "known": int((tried["outcome"] == "known").sum()),
        "unexpected": int((tried["outcome"] == "unexpected-pass").sum()),
        "unsupported": int((mine["outcome"] == "unsupported").sum()),
        "musts": len(musts),
        "expectations": expected,
        "expired": sum(line.startswith("expired") for line in expected),
        "precision": precision.get(run["run"]),
        "speed": _speed(tables.speeds, str(run["implementation"])),
    }


def _counts(rows: Frame) -> tuple[int, int]:
    return int(rows["outcome"].isin(HELD).sum()), len(rows)


def _precision(tables: Tables) -> dict[str, dict[str, Any]]:
    """Return for each run how much of its budget its worst error takes, and the median one."""
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
    """Return by peer and device the least and the largest ratio, of what may be published."""
    mine = speeds[(speeds["implementation"] == name) & speeds["publishable"].fillna(False)]
    return [
        (str(peer), str(device), float(rows["ratio"].min()), float(rows["ratio"].max()), len(rows))
        for (peer, device), rows in mine.groupby(["peer", "device"])
    ]


def _areas(tables: Tables, runs: list[str]) -> list[dict[str, Any]]:
    """Return, by area, what each run passed of what it was asked at each level."""
    frame: Frame = tables.clauses.dropna(subset=["area"])
    rows = []
    for area, some in frame.groupby("area", sort=False):
        cells = []
        for run in runs:
            mine = some[some["run"] == run]
            tried = mine[mine["outcome"] != "unsupported"]
            counts = {level: _counts(tried[tried["level"] == level]) for level in LEVELS}
            failed = int(tried["outcome"].isin(["fail", "error", "unexpected-pass"]).sum())
            known = int((tried["outcome"] == "known").sum())
            cells.append({"counts": counts, "tried": len(tried), "failed": failed, "known": known})
        rows.append({"area": area, "cells": cells})
    return rows
