"""Make ``schedules.json``: the curves that warmup schedules must follow.

The curves are computed with mpmath at 60 digits, in plain loops, from the documented formulas
(conformance/spec/warmup.toml), independent of torch and of any implementation. The file is only changed by
this script::

    python -m keyedopt.tools.golden.make_schedules
"""

import json
from pathlib import Path
from typing import Any

from mpmath import cos, floor, mp, mpf, pi, sqrt

DATA = Path(__file__).parents[2] / "conformance" / "golden" / "schedules.json"
Stage = dict[str, Any]

ABOUT = [
    "Learning rates of warmup schedules, made by make_schedules.py with mpmath. Do not edit.",
    "A curve: the stages (fields that are left out have their defaults), the lr, and points",
    "[iteration, stage, rate, tolerance]. Iterations 0, 1, 2, ... are consecutive at first; later",
    "ones are samples. The stage is the number of stages that have ended. The tolerance is what",
    "double precision costs: 8 units of 2^-52, at the magnitude of the largest intermediate result.",
]


def stage_at(stages: list[Stage], i: int) -> int:
    """Return the number of completed stages: a stage includes iteration ``max_iters``."""
    ended = 0
    for stage in stages:
        if i > stage.get("max_iters", 1):
            ended += 1
    return ended


def shape_at(stage: Stage, i: int) -> tuple[Any, Any]:
    """Return the multiplier without ``lr_scale``, and the magnitude of its rounding errors."""
    policy = stage["policy"]
    value = mpf(stage.get("value", 1.0))
    max_iters = mpf(stage.get("max_iters", 1))
    if policy == "CONSTANT":
        return value, abs(value)
    if policy == "LINEAR":
        return value + (1 - value) * i / max_iters, max(abs(value), 1)
    if policy == "INTERPOLATE":
        start, end = mpf(stage["start_interpolating_iters"]), mpf(stage["end_value"])
        if i < start:
            return value, abs(value)
        return value + (end - value) * (i - start) / (max_iters - start), max(abs(value), abs(end))
    if policy == "POLY":
        decay = mpf(stage.get("decay_iters", -1))
        if decay <= 0:
            decay = max_iters
        left = 1 - i / decay
        if left <= 0:
            return mpf(value == 0), mpf(0)
        power = left**value
        return power, power * max(1, abs(value) / left)  # an error of 1 in `left`, passed on
    if policy == "STEP":
        decay = mpf(stage.get("decay_iters", -1))
        if decay <= 0:
            decay = mpf(1)
        power = value ** floor(i / decay)
        return power, abs(power)
    if policy == "INVSQRT":
        root = 1 / sqrt(mpf(i if i > 0 else 1))
        return root, root
    if policy == "COSINE_ANNEALING_WARM_RESTARTS":
        period = mpf(stage.get("sgdr_period", 1))
        since = i - period * floor(i / period)
        return value + (1 - value) * (1 + cos(pi * since / period)) / 2, max(abs(value), 1)
    if policy == "TRANSFORMER":
        s, peak = mpf(i + 1), mpf(stage["warmup_steps"])
        least = min(1 / sqrt(s), s / (peak * sqrt(peak)))
        return least, least
    assert policy == "NONE"
    return mpf(1), mpf(1)


def point(stages: list[Stage], lr: float, i: int) -> list[Any]:
    """Return one point of a curve."""
    ended = stage_at(stages, i)
    stage = stages[ended] if ended < len(stages) else {"policy": "NONE"}
    shape, magnitude = shape_at(stage, i)
    factor = mpf(lr) * mpf(stage.get("lr_scale", 1.0))
    tolerance = float(f"{float(8 * mpf(2) ** -52 * magnitude * abs(factor)):.2g}")
    return [i, ended, float(shape * factor), tolerance]


def curve(stages: list[Stage], lr: float = 0.1, dense: int = 0, then: tuple[int, ...] = ()) -> Any:
    """Compute the iterations from 0 to well past the last stage (or to ``dense``), and samples."""
    last = dense or max([stage.get("max_iters", 1) for stage in stages], default=0) + 8
    iterations = sorted({*range(last + 1), *then, 1000, 10**6, 2**40})
    return {"stages": stages, "lr": lr, "points": [point(stages, lr, i) for i in iterations]}


def around(*ends: int) -> tuple[int, ...]:
    """Return the iterations on both sides of some boundaries."""
    found = []
    for end in ends:
        found += [end - 1, end, end + 1]
    return tuple(found)


def stage(policy: str, max_iters: int, **fields: Any) -> Stage:
    """Return a stage as JSON data."""
    return {"policy": policy, "max_iters": max_iters, **fields}


def make() -> dict[str, dict[str, Any]]:
    """Compute every curve, by group: plain ones, those at the edges of a formula, later policies."""
    restarts = "COSINE_ANNEALING_WARM_RESTARTS"
    plain = {
        "no-stages": curve([], 0.3),
        "defaults": curve([{"policy": "LINEAR"}]),
        "none": curve([stage("NONE", 5)], 0.7),
        "none-scaled": curve([stage("NONE", 5, lr_scale=0.3)], 0.7),
        "constant": curve([stage("CONSTANT", 6, value=0.25, lr_scale=3.0)]),
        "constant-zero": curve([stage("CONSTANT", 3, value=0.0), stage("LINEAR", 8, value=0.0)]),
        "linear": curve([stage("LINEAR", 10, value=0.01)]),
        "linear-from-0": curve([stage("LINEAR", 7, value=0.0)], 24.0),
        "linear-down": curve([stage("LINEAR", 9, value=3.0, lr_scale=0.5)], 0.02),
        "linear-twice": curve([stage("LINEAR", 6, value=0.1), stage("LINEAR", 15, value=0.4)]),
        "linear-decay-ignored": curve([stage("LINEAR", 8, value=0.2, decay_iters=3)]),
        "poly": curve([stage("POLY", 12, value=2.0)]),
        "poly-root": curve([stage("POLY", 12, value=0.5, lr_scale=2.0)]),
        "poly-power-0": curve([stage("POLY", 4, value=0.0)]),
        "poly-decay": curve([stage("POLY", 12, value=1.5, decay_iters=30)]),
        "poly-decay-0": curve([stage("POLY", 9, value=1.0, decay_iters=0)]),
        "poly-later": curve([stage("LINEAR", 5, value=0.1), stage("POLY", 14, value=2.0)]),
        "step": curve([stage("STEP", 6, value=0.5)]),
        "step-decay": curve([stage("STEP", 23, value=0.9, decay_iters=7, lr_scale=1.5)]),
        "step-decay-0": curve([stage("STEP", 5, value=0.8, decay_iters=0)]),
        "step-up": curve([stage("STEP", 12, value=1.25, decay_iters=4)]),
        "step-later": curve([stage("CONSTANT", 5), stage("STEP", 16, value=0.5, decay_iters=3)]),
        "inv-sqrt": curve([stage("LINEAR", 4, value=0.0, lr_scale=0.5), stage("INVSQRT", 16)]),
        "inv-sqrt-scaled": curve([stage("NONE", 1), stage("INVSQRT", 9, value=7.0, lr_scale=4.0)]),
        "cosine": curve([stage(restarts, 20, value=0.1, sgdr_period=8)]),
        "cosine-to-0": curve([stage(restarts, 14, value=0.0, sgdr_period=7, lr_scale=2.0)]),
        "cosine-period-1": curve([stage(restarts, 4, value=0.2)]),
        "cosine-long": curve([stage(restarts, 10, value=0.25, sgdr_period=1000)]),
        "cosine-later": curve([stage("LINEAR", 6), stage(restarts, 18, value=0.5, sgdr_period=5)]),
        "interpolate": curve(
            [stage("INTERPOLATE", 10, value=0.2, start_interpolating_iters=0, end_value=2.0)]
        ),
        "interpolate-later": curve(
            [
                stage("CONSTANT", 4, value=0.3),
                stage("INTERPOLATE", 15, value=1.0, start_interpolating_iters=5, end_value=0.1),
            ],
            0.4,
        ),
        "interpolate-earlier": curve(
            [
                stage("CONSTANT", 6, value=0.3),
                stage("INTERPOLATE", 12, value=1.0, start_interpolating_iters=2, end_value=0.0),
            ]
        ),
        "one-by-one": curve([stage("CONSTANT", end, value=0.5**end, lr_scale=1.5) for end in (1, 2, 3, 5)]),
        "every-policy": curve(
            [
                stage("NONE", 2, lr_scale=0.1),
                stage("CONSTANT", 4, value=0.2),
                stage("LINEAR", 9, value=0.2),
                stage("INVSQRT", 13, lr_scale=3.0),
                stage("POLY", 18, value=1.2, decay_iters=40),
                stage("STEP", 25, value=0.7, decay_iters=11),
                stage(restarts, 36, value=0.1, sgdr_period=6),
                stage("INTERPOLATE", 44, value=0.8, start_interpolating_iters=37, end_value=0.05),
            ],
            2.0,
        ),
        "years": curve(
            [
                stage("LINEAR", 2750, value=0.0),
                stage("CONSTANT", 49315),
                stage("POLY", 77087, value=2.0, decay_iters=100000),
                stage("INVSQRT", 10**12, lr_scale=100.0),
                stage("STEP", 10**15, value=0.5, decay_iters=10**13),
            ],
            24.0,
            dense=12,
            then=(*around(2750, 49315, 77087), 10**6, 10**11, *around(10**12), 10**14, *around(10**15)),
        ),
    }
    edges = {
        "inv-sqrt-from-0": curve([stage("INVSQRT", 9, lr_scale=2.0)]),
        "poly-past-decay": curve([stage("POLY", 12, value=1.0, decay_iters=5)]),
        "poly-past-decay-even": curve([stage("POLY", 12, value=2.0, decay_iters=5)]),
        "poly-past-decay-root": curve([stage("POLY", 12, value=0.5, decay_iters=5)]),
        "poly-long-past": curve([stage("LINEAR", 6), stage("POLY", 14, value=1.0, decay_iters=3)]),
        "interpolate-before": curve(
            [stage("INTERPOLATE", 14, value=0.1, start_interpolating_iters=6, end_value=1.0)]
        ),
        "interpolate-before-later": curve(
            [
                stage("NONE", 3),
                stage("INTERPOLATE", 14, value=1.0, start_interpolating_iters=9, end_value=0.2),
            ]
        ),
    }
    later = {
        "transformer": curve([stage("TRANSFORMER", 30, warmup_steps=10)]),
        "transformer-defaults": curve([stage("TRANSFORMER", 6, warmup_steps=1, lr_scale=0.5)]),
        "transformer-4000": curve(
            [stage("TRANSFORMER", 10000, warmup_steps=4000)],
            0.001,
            dense=12,
            then=(*around(3999), 7999, *around(10000)),
        ),
    }
    return {"plain": plain, "edges": edges, "later": later}


def text() -> str:
    """Return the curves as readable JSON: one stage per line, three points per line."""
    with mp.workdps(60):
        groups = make()
    lines = ["{", f'"about": {json.dumps(ABOUT, indent=0)},']
    for group, curves in groups.items():
        lines.append(f'"{group}": {{')
        for name, entry in curves.items():
            stages = ",\n    ".join(json.dumps(item) for item in entry["stages"])
            points = [json.dumps(item) for item in entry["points"]]
            rows = [", ".join(points[start : start + 3]) for start in range(0, len(points), 3)]
            lines.append(f'"{name}": {{"lr": {entry["lr"]}, "stages": [')
            lines.append(f"    {stages}],")
            lines.append('  "points": [\n    ' + ",\n    ".join(rows) + "]},")
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("},")
    lines[-1] = "}"
    return "\n".join([*lines, "}", ""])


if __name__ == "__main__":
    DATA.write_text(text(), encoding="utf-8")
