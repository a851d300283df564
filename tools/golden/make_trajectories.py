"""Make ``trajectories.json``: exact trajectories of the algorithms, and error budgets for rounding.

The oracle evaluates the published formulas (`formulas`) with mpmath at 60 digits, independent of torch and of
any implementation. A budget is derived from the errors of the same formulas in a dtype, in 64 random orders.
The file is only changed by this script::

    python -m keyedopt.tools.golden.make_trajectories
"""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

from keyedopt.tools.golden.arithmetic import FORMATS, Exact, Rounded
from keyedopt.tools.golden.formulas import DEFAULTS, FORMULAS, OF, VARIANTS

DATA = Path(__file__).parents[2] / "conformance" / "golden" / "trajectories.json"
Trajectory = dict[str, Any]
ROWS, STEPS, ORDERS = 4, 24, 64
RECORDED = (1, 2, 3, 8, 16, 24)

ABOUT = [
    "Trajectories of optimizers, made by make_trajectories.py with mpmath. Do not edit.",
    "weight and grads are integers, in units of 1/64 and of `unit`. rows of a step are [] for a dense",
    "gradient (one row of grads a row of the weight) or those of a sparse one, duplicates included.",
    "after: by step, then by name of the tensor, the exact values in row order. exponent: floor(log2) of",
    "the larger of the values before and after the step, at which a unit in the last place is taken; null",
    "for zero. worst: by dtype, step and tensor, the largest error in such units of 64 random orders of",
    "the same formula in that dtype.",
]


def start(algorithm: str, options: Trajectory, width: int) -> dict[str, list[float]]:
    """Return the state of a row before its first step."""
    o = {**DEFAULTS[algorithm], **options}
    if algorithm in ("Adagrad", "RowWiseAdagrad"):
        first = o.get("initial_accumulator_value", 0.0)
        return {"sum": [first] * (1 if algorithm == "RowWiseAdagrad" else width)}
    if algorithm in ("SGD", "LarsSGD"):
        return {"momentum_buffer": [0.0] * width} if o["momentum"] else {}
    second = 1 if algorithm.startswith("Partial") else width
    state = {"exp_avg": [0.0] * width, "exp_avg_sq": [0.0] * second}
    return state | ({"step": [0.0]} if o.get("bias_correction") == "per_row" else {})


def run(made: Trajectory, a: Any) -> list[dict[str, list[Any]]]:
    """Train; return the tensors before the first step and after each step."""
    formula, options = FORMULAS[made["algorithm"]], {**DEFAULTS[made["algorithm"]], **made["options"]}
    for word in made.get("variant", "").split():
        options |= VARIANTS[word]
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
    """Add the exact values, and the exponents of their units, to a trajectory and its variants."""
    for one in made.get("variants", {}).values():
        oracle(one)
    exact = run(made, Exact())
    made["after"] = {t: {name: [float(x) for x in row] for name, row in exact[t].items()} for t in RECORDED}
    made["exponent"] = {
        t: {
            name: [exponent(x, y) for x, y in zip(exact[t - 1][name], exact[t][name], strict=True)]
            for name in exact[t]
        }
        for t in RECORDED
    }
    return made


def budget(made: Trajectory, dtype: str, orders: int = ORDERS) -> dict[int, dict[str, float]] | None:
    """Return the worst errors by step and tensor, never decreasing over steps; None if unbounded."""
    worst = {t: dict.fromkeys(made["after"][t], 0.0) for t in RECORDED}
    exact = run(made, Exact())
    for order in range(orders):
        seen = run(made, Rounded(dtype, order))
        for t in RECORDED:
            for name, powers in made["exponent"][t].items():
                errors = map(error, seen[t][name], exact[t][name], powers, [dtype] * len(powers))
                worst[t][name] = max(worst[t][name], *errors)
    for before, t in itertools.pairwise(RECORDED):
        worst[t] = {name: max(value, worst[before][name]) for name, value in worst[t].items()}
    if not all(math.isfinite(value) for row in worst.values() for value in row.values()):
        return None
    return {t: {name: float(f"{value:.3g}") for name, value in row.items()} for t, row in worst.items()}


def trajectory(
    algorithm: str, kind: str = "dense", width: int = 3, seed: int = 0, unit: float = 1 / 64, **options: Any
) -> Trajectory:
    """Draw a trajectory: in a sparse one, row 2 is rare, and row 3 is never updated and starts at zero.

    In a dense trajectory, row 1 starts at zero and row 3 never has a gradient. In an extreme one, gradients
    have very different magnitudes.
    """
    draw = random.Random(f"{algorithm} {kind} {seed}")

    def row() -> list[int]:
        return [draw.choice((-1, 1)) * draw.randint(4, 96) for _ in range(width)]

    weight = [row() for _ in range(ROWS)]
    weight[3 if kind == "sparse" else 1] = [0] * width
    steps = []
    for t in range(STEPS):
        if kind == "sparse":
            rows = [draw.choice((0, 1)) for _ in range(draw.randint(0, 4))] + ([2, 2] if t in (9, 20) else [])
            draw.shuffle(rows)
            rows = rows or [0]
            steps.append({"rows": rows, "grads": [row() for _ in rows]})
            continue
        grads = [row() for _ in range(ROWS)]
        grads[2] = grads[2] if t in (9, 20) else [0] * width
        grads[3] = [0] * width
        if kind == "extreme":
            grads = [[x * 2 ** draw.choice((0, 10, 40, 60)) for x in line] for line in grads]
        steps.append({"rows": [], "grads": grads})
    dtypes = ["float32"] if kind == "extreme" else ["float32", "bfloat16", "float16"]
    return {
        "algorithm": algorithm, "kind": kind, "options": options, "unit": unit, "dtypes": dtypes,
        "weight": weight, "steps": steps,
    }  # fmt: skip


#: The trajectories that are made in each variant too.
IN_VARIANTS = ("plain", "decay", "betas", "momentum", "lr-decay")


def drawn() -> dict[str, Trajectory]:
    """Draw every trajectory, named by its algorithm and its special property."""
    found: dict[str, Trajectory] = {}

    def add(algorithm: str, special: str, kind: str = "dense", **options: Any) -> None:
        unit = options.pop("unit", 1 / 64)
        made = trajectory(algorithm, kind, unit=unit, seed=len(found), **options)
        found[f"{algorithm}-{special}"] = made

    learning_rates = {"SGD": 0.05, "LarsSGD": 0.5, "LAMB": 0.02, "PartialRowWiseLAMB": 0.02}

    def add_all(name: str) -> None:
        rate: Trajectory = {"lr": learning_rates.get(name, 0.1)}
        add(name, "plain", **rate)
        add(name, "sparse", kind="sparse", **rate)
        add(name, "maximize", maximize=True, **rate)
        add(name, "decay", weight_decay=0.05, **rate)
        if name != "SGD":  # its steps grow with the gradient
            add(name, "extreme", kind="extreme", unit=2.0**-40, **rate)
        if "decay" in DEFAULTS[name] and name != "AdamW":  # which has no such argument
            other = "l2" if DEFAULTS[name]["decay"] == "decoupled" else "decoupled"
            add(name, f"decay-{other}", weight_decay=0.05, decay=other, **rate)
        if "betas" in DEFAULTS[name]:
            add(name, "betas", betas=[0.5, 0.9], eps=0.01, **rate)
            add(name, "per-row", kind="sparse", bias_correction="per_row", **rate)
        if name in ("Adagrad", "RowWiseAdagrad"):
            add(name, "lr-decay", lr_decay=0.1, initial_accumulator_value=0.25, eps=0.01, **rate)

    for name in FORMULAS:
        if name != "AdamW":  # the seed of a trajectory is the number of those before
            add_all(name)
    add("SGD", "momentum", lr=0.05, momentum=0.9)
    add("SGD", "momentum-sparse", kind="sparse", lr=0.05, momentum=0.9)
    add("SGD", "dampening", lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01)
    add("SGD", "nesterov", lr=0.05, momentum=0.9, nesterov=True)
    add("LarsSGD", "momentum", lr=0.5, momentum=0.5, eta=0.01, weight_decay=0.01)
    add("Adam", "eps-placement", lr=0.1, eps=0.01, eps_placement="before_bias_correction")
    add("RowWiseAdagrad", "max-norm", lr=0.1, max_norm=1.0)
    add_all("AdamW")
    for name, made in found.items():
        algorithm, _, special = name.partition("-")
        if algorithm in OF and special in IN_VARIANTS:
            made["variants"] = {word: {**made, "variant": word} for word in OF[algorithm]}
    return found


def make() -> dict[str, Trajectory]:
    """Compute every trajectory."""
    return {name: oracle(made) for name, made in drawn().items()}


def main() -> None:
    """Write the file, with one trajectory per line."""
    made = make()
    for one in made.values():
        for each in (one, *one.get("variants", {}).values()):
            found = {dtype: budget(each, dtype) for dtype in each.pop("dtypes")}
            each["worst"] = {dtype: worst for dtype, worst in found.items() if worst is not None}
    lines = [f'  "{name}": {json.dumps(one, separators=(",", ":"))}' for name, one in made.items()]
    body = ",\n".join(lines)
    DATA.write_text(f'{{"about": {json.dumps(ABOUT, indent=2)},\n"trajectories": {{\n{body}\n}}}}\n', "utf-8")


if __name__ == "__main__":
    main()
