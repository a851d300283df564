"""Exact trajectories of the published formulas, and how far rounding may lead away from them."""

import itertools
import math
from typing import Any

from keyedopt.conformance.golden.arithmetic import FORMATS, Bounded, Exact, Rounded
from keyedopt.conformance.golden.formulas import DEFAULTS, FORMULAS, VARIANTS

Trajectory = dict[str, Any]
Errors = dict[str, dict[str, float]]  # in units in the last place, by step and tensor
ORDERS = 64
RECORDED = (1, 2, 3, 8, 16, 24)


def start(algorithm: str, options: Trajectory, width: int) -> dict[str, list[float]]:
    """Return the state of a row before its first step."""
    o = {**DEFAULTS[algorithm], **options}
    if algorithm in ("Adagrad", "RowWiseAdagrad"):
        first = o.get("initial_accumulator_value", 0.0)
        return {"sum": [first] * (1 if algorithm == "RowWiseAdagrad" else width)}
    if algorithm == "Ftrl":
        return {"accumulator": [o["initial_accumulator_value"]] * width, "linear": [0.0] * width}
    if algorithm in ("SGD", "LarsSGD"):
        return {"momentum_buffer": [0.0] * width} if o["momentum"] else {}
    second = 1 if algorithm.startswith("Partial") else width
    state = {"exp_avg": [0.0] * width, "exp_avg_sq": [0.0] * second}
    if o.get("amsgrad"):
        state["max_exp_avg_sq"] = [0.0] * second
    return state | ({"step": [0.0]} if o.get("bias_correction") == "per_row" else {})


def run(made: Trajectory, a: Any) -> list[dict[str, list[Any]]]:
    """Train; return the tensors before the first step and after each step."""
    formula, options = FORMULAS[made["algorithm"]], dict(DEFAULTS[made["algorithm"]])
    for word in made.get("variant", "").split():
        options |= VARIANTS[word]
    options |= made["options"]
    if options.get("norms") == "tensor":  # to the formula, the table is one row
        steps = [{"rows": [], "grads": _one_row(step["grads"])} for step in made["steps"]]
        return _run({**made, "weight": _one_row(made["weight"]), "steps": steps}, a, formula, options)
    return _run(made, a, formula, options)


def _one_row(table: list[list[Any]]) -> list[list[Any]]:
    return [[x for row in table for x in row]]


def _run(made: Trajectory, a: Any, formula: Any, options: Trajectory) -> list[dict[str, list[Any]]]:
    width = len(made["weight"][0])
    weight = [[a.number(x / 64) for x in row] for row in made["weight"]]
    fresh = start(made["algorithm"], made["options"], width)
    states = [{name: [a.number(x) for x in row] for name, row in fresh.items()} for _ in weight]
    seen = [flat(weight, states)]
    for t, step in enumerate(made["steps"], 1):
        listed = step["rows"] or range(len(weight))
        for row in sorted(set(listed)):
            alike = [g for place, g in zip(listed, step["grads"], strict=True) if place == row]
            g = [a.total([a.number(x * made["unit"]) for x in column]) for column in zip(*alike, strict=True)]
            weight[row] = formula(a, weight[row], g, states[row], t, options)
        seen.append(flat(weight, states))
    return seen


def flat(weight: list[Any], states: list[Any]) -> dict[str, list[Any]]:
    """Return the tensors as flat lists in row order."""
    found = {"weight": [x for row in weight for x in row]}
    for name in states[0]:
        found[name] = [x for state in states for x in state[name]]
    return found


def exponent(before: Any, after: Any) -> int | None:
    """Return floor(log2) of the larger magnitude."""
    larger = max(abs(before), abs(after))
    return math.frexp(float(larger))[1] - 1 if larger else None


def error(seen: float, exact: Any, power: int | None, dtype: str) -> float:
    """Return an error in units in the last place."""
    bits, least, _ = FORMATS[dtype]
    if not math.isfinite(seen):
        return math.inf
    unit = math.ldexp(1.0, max(least if power is None else power, least) - bits + 1)
    return float(abs(float(seen) - exact) / unit)  # a Number would round the exact value


def oracle(made: Trajectory) -> Trajectory:
    """Return a trajectory with the exact values, and the exponents of their units."""
    exact = run(made, Exact())
    after = {str(t): {name: [float(x) for x in row] for name, row in exact[t].items()} for t in RECORDED}
    powers = {
        str(t): {
            name: [exponent(x, y) for x, y in zip(exact[t - 1][name], exact[t][name], strict=True)]
            for name in exact[t]
        }
        for t in RECORDED
    }
    return {**made, "after": after, "exponent": powers}


def budget(made: Trajectory, dtype: str, orders: int = ORDERS) -> Errors | None:
    """Return the worst errors of a trajectory with an oracle, never decreasing; None if unbounded."""
    worst = {t: dict.fromkeys(made["after"][str(t)], 0.0) for t in RECORDED}
    exact = run(made, Exact())
    for order in range(orders):
        seen = run(made, Rounded(dtype, order))
        for t in RECORDED:
            for name, powers in made["exponent"][str(t)].items():
                errors = map(error, seen[t][name], exact[t][name], powers, [dtype] * len(powers))
                worst[t][name] = max(worst[t][name], *errors)
    for before, t in itertools.pairwise(RECORDED):
        worst[t] = {name: max(value, worst[before][name]) for name, value in worst[t].items()}
    if not all(math.isfinite(value) for row in worst.values() for value in row.values()):
        return None
    return _short(worst)


def bound(made: Trajectory) -> Errors:
    """Return the errors of a trajectory with an oracle that no order of the formula exceeds in any dtype."""
    most = {t: dict.fromkeys(made["after"][str(t)], 0.0) for t in RECORDED}
    for first in itertools.product((False, True), repeat=len(Bounded.PLACES)):
        seen = run(made, Bounded(set(itertools.compress(Bounded.PLACES, first))))
        for t in RECORDED:
            for name, powers in made["exponent"][str(t)].items():
                # an operation is wrong by at most half a unit
                errors = [
                    x.error / 2.0 ** (power + 1)
                    for x, power in zip(seen[t][name], powers, strict=True)
                    if power is not None
                ]
                most[t][name] = max([most[t][name], *errors])
    return _short(most)


def _short(errors: dict[int, dict[str, float]]) -> Errors:
    return {str(t): {name: float(f"{one:.3g}") for name, one in row.items()} for t, row in errors.items()}


def judged(made: Trajectory) -> Trajectory:
    """Return a trajectory with everything that the suite compares with; its ``dtypes`` get budgets."""
    made = oracle(made)
    found = {dtype: budget(made, dtype) for dtype in made.pop("dtypes")}
    worst = {dtype: one for dtype, one in found.items() if one is not None}
    return {**made, "worst": worst, "bound": bound(made)}
