"""The view of speed: ratios with their intervals, throughput against the roofline, memory, first step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from keyedopt.reports.page.figures import (
    BAND,
    INK,
    MARKERS,
    MUTED,
    SERIES,
    Picture,
    numbered,
    picture,
    thin,
)
from keyedopt.reports.tables import Frame, Tables

#: The largest number of rows of a plot. The table has all rows.
ROWS = 40

#: The heads of the table after the task, for cells with up to two values.
HEADS = (
    *("implementation", "peer", "threads", "ratio, 95 %", "noise", "time, of the peer"),
    *("throughput", "extra memory", "first step", "publishable"),
)


def view(tables: Tables, folder: Path | None) -> dict[str, Any]:
    """Return two plots and the table of each device."""
    name = numbered("speed")
    devices = []
    for (machine, device), rows in tables.speeds.groupby(["machine", "device"], sort=False, dropna=False):
        where = f"{machine} ({device})"
        drawn = rows.replace([np.inf, -np.inf], np.nan)
        devices.append(
            {
                "where": where,
                "ratios": _ratios(name(), where, drawn, folder),
                "roofline": _roofline(name(), where, drawn, folder),
                "bandwidth": rows["bandwidth"].max(),
                "rows": rows.to_dict("records"),
            }
        )
    return {"devices": devices, "heads": HEADS}


def _peers(rows: Frame) -> dict[tuple[str, str], tuple[str, str]]:
    """Return a colour and a marker for every pair of implementation and peer."""
    pairs = sorted(set(zip(rows["implementation"], rows["peer"], strict=True)))
    return {pair: (SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]) for i, pair in enumerate(pairs)}


def _label(pair: tuple[str, str]) -> str:
    return f" {pair[0]} against {pair[1]}"


def _places(rows: Frame) -> dict[tuple[str, str], int]:
    """Return the vertical place of each pair of task and workload, from the top."""
    keys = list(dict.fromkeys(zip(rows["task"], rows["workload"], strict=True)))
    return {key: -place for place, key in enumerate(thin(keys, ROWS))}


def _room(places: Mapping[tuple[str, str], int], entries: int, columns: int) -> tuple[Any, Any]:
    """Return the size of a plot and its margins: names of tasks at the left, the legend and numbers above."""
    above = 0.4 + 0.16 * -(-entries // columns)
    longest = max((len(name) for key in places for name in key), default=0)
    left = min(0.25 + 0.06 * longest, 3.0)  # letters of 7 pt
    return (6.3, 0.7 + above + 0.42 * len(places)), (left, 0.45, 0.15, above)


def _axis(axes: Axes, places: Mapping[tuple[str, str], int]) -> None:
    axes.set_yticks(list(places.values()), [f"{task}\n{workload}" for task, workload in places], fontsize=7)
    axes.set_ylim(min(places.values()) - 0.6, 0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labeltop=True)  # a plot may be higher than the window


def _legend(axes: Axes, columns: int) -> None:
    """Put the legend above the numbers of the axis."""
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        borderaxespad=2.2,
        frameon=False,
        fontsize=8,
        ncols=columns,
    )


def _ratios(name: str, where: str, rows: Frame, folder: Path | None) -> Picture:
    """Draw the ratios with their intervals; marks of ratios that must not be published are hollow."""
    pairs, places = _peers(rows), _places(rows)
    noise = float(rows["noise"].max())

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.axvspan(1 / (1 + noise), 1 + noise, color=BAND, lw=0, zorder=0)
        axes.axvline(1, color=MUTED, lw=1, zorder=1)
        for row in rows.itertuples():
            colour, marker = pairs[row.implementation, row.peer]
            if (row.task, row.workload) not in places:
                continue
            shift = 0.22 * (list(pairs).index((row.implementation, row.peer)) - (len(pairs) - 1) / 2)
            y = places[row.task, row.workload] - shift
            axes.plot([row.low, row.high], [y, y], color=colour, lw=1.6)
            fill = colour if row.publishable else "#ffffff"
            axes.plot(row.ratio, y, color=colour, marker=marker, mfc=fill, ms=5)
        for pair, (colour, marker) in pairs.items():
            axes.plot([], [], color=colour, marker=marker, label=_label(pair))
        _axis(axes, places)
        axes.set_xlabel("time of the peer over time of the implementation (right of 1: faster)")
        ends = rows[["low", "high"]].replace(0.0, np.nan)
        left, right = np.fmin(0.8, ends["low"].min() * 0.9), np.fmax(1.25, ends["high"].max() * 1.1)
        axes.set_xlim(left, right)
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50, 100) if left <= t <= right]
        axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
        _legend(axes, 2)

    best, least = rows["ratio"].max(), rows["ratio"].min()
    about = f"Ratios of {least:.2f} to {best:.2f}, with 95 % intervals; the band is the noise of the run."
    return picture(
        name, f"Speed against peers on {where}", about, draw, *_room(places, len(pairs), 2), folder
    )


def _roofline(name: str, where: str, rows: Frame, folder: Path | None) -> Picture:
    """Draw the throughput of each implementation and peer, and the measured bandwidth."""
    places = _places(rows)
    once = [(r.task, r.workload, r.implementation, r.bytes, r.seconds_median) for r in rows.itertuples()]
    once += [(r.task, r.workload, r.peer, r.bytes, r.peer_seconds_median) for r in rows.itertuples()]
    best: dict[tuple[str, str, str], float] = {}
    for task, workload, who, size, seconds in once:
        if (task, workload) in places and not pd.isna(size) and seconds and seconds > 0:
            speed = size / seconds / 1e9
            best[task, workload, who] = max(best.get((task, workload, who), 0.0), speed)
    names = list(dict.fromkeys(who for _, _, who in best))
    limit = float(rows["bandwidth"].max()) / 1e9

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.axvline(limit, color=INK, lw=1.4, ls=(0, (5, 2)))
        for (task, workload, who), speed in best.items():
            place = names.index(who)
            colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
            y = places[task, workload] - 0.14 * (place - (len(names) - 1) / 2)
            axes.plot(speed, y, color=colour, marker=marker, ms=5.5, ls="")
        for place, who in enumerate(names):
            colour, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
            axes.plot([], [], color=colour, marker=marker, ls="", label=f" {who}")
        axes.plot([], [], color=INK, ls=(0, (5, 2)), label=f"measured bandwidth, {limit:.3g} GB/s")
        _axis(axes, places)
        axes.set_xlabel("bytes that must move over the time, GB/s")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _legend(axes, 3)

    about = f"Throughput of each task against a measured memory bandwidth of {limit:.3g} GB/s."
    title = f"Throughput against the roofline on {where}"
    return picture(name, title, about, draw, *_room(places, len(names) + 1, 3), folder)
