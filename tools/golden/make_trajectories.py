"""Make ``trajectories.json``: exact trajectories of the algorithms, and error budgets for rounding.

The oracle evaluates the published formulas (`formulas`) with mpmath at 60 digits, independent of torch and of
any implementation. A budget is derived from the errors of the same formulas in a dtype, in 64 random orders.
The file is only changed by this script::

    python -m keyedopt.tools.golden.make_trajectories
"""

import json
import random
from pathlib import Path
from typing import Any

from keyedopt.conformance.golden.formulas import DEFAULTS, FORMULAS
from keyedopt.conformance.golden.oracle import Trajectory, judged

DATA = Path(__file__).parents[2] / "conformance" / "golden" / "trajectories.json"
ROWS, STEPS = 4, 24

ABOUT = [
    "Trajectories of optimizers, made by make_trajectories.py with mpmath. Do not edit.",
    "weight and grads are integers, in units of 1/64 and of `unit`. rows of a step are [] for a dense",
    "gradient (one row of grads a row of the weight) or those of a sparse one, duplicates included.",
    "after: by step, then by name of the tensor, the exact values in row order. exponent: floor(log2) of",
    "the larger of the values before and after the step, at which a unit in the last place is taken; null",
    "for zero. worst: by dtype, step and tensor, the largest error in such units of 64 random orders of",
    "the same formula in that dtype. bound: by step and tensor, the largest error in such units of any order",
    "and contraction in any dtype, by the count of roundings.",
]


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


def drawn() -> dict[str, Trajectory]:
    """Draw every trajectory, named by its algorithm and its special property."""
    found: dict[str, Trajectory] = {}

    def add(algorithm: str, special: str, kind: str = "dense", **options: Any) -> None:
        unit = options.pop("unit", 1 / 64)
        made = trajectory(algorithm, kind, unit=unit, seed=len(found), **options)
        found[f"{algorithm}-{special}"] = made

    learning_rates = {"SGD": 0.05, "LarsSGD": 0.5, "LAMB": 0.02, "PartialRowWiseLAMB": 0.02}

    def add_all(name: str, **more: Any) -> None:
        rate: Trajectory = {"lr": learning_rates.get(name, 0.1), **more}
        add(name, "plain", **rate)
        add(name, "sparse", kind="sparse", **rate)
        add(name, "maximize", maximize=True, **rate)
        add(name, "decay", weight_decay=0.05, **rate)
        # SGD's steps grow with the gradient, and Ftrl subtracts roots that hardly differ.
        if name not in ("SGD", "Ftrl"):
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
        # The seed of a trajectory is the number of those before, so newer algorithms come later.
        if name not in ("AdamW", "SparseAdam", "Ftrl"):
            add_all(name)
    add("SGD", "momentum", lr=0.05, momentum=0.9)
    add("SGD", "momentum-sparse", kind="sparse", lr=0.05, momentum=0.9)
    add("SGD", "dampening", lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.01)
    add("SGD", "nesterov", lr=0.05, momentum=0.9, nesterov=True)
    add("LarsSGD", "momentum", lr=0.5, momentum=0.5, eta=0.01, weight_decay=0.01)
    add("Adam", "eps-placement", lr=0.1, eps=0.01, eps_placement="before_bias_correction")
    add("RowWiseAdagrad", "max-norm", lr=0.1, max_norm=1.0)
    add_all("AdamW")
    for name in ("Adam", "AdamW"):
        add(name, "amsgrad", lr=0.1, amsgrad=True, betas=[0.5, 0.75], weight_decay=0.05)
    start: Trajectory = {"initial_accumulator_value": 0.125}  # which every dtype represents
    add_all("Ftrl", **start)
    regularized: Trajectory = {"l1": 0.5, "l2": 0.25, "l2_shrinkage": 0.0625, "beta": 0.5}
    add("Ftrl", "regularized", lr=0.1, **regularized, **start)
    add("Ftrl", "lr-power", lr=0.1, lr_power=-0.75, **start)
    add("PartialRowWiseAdam", "max-norm", lr=0.1, max_norm=1.0)
    add("PartialRowWiseLAMB", "max-norm", lr=0.02, max_norm=1.0)
    return found


def main() -> None:
    """Write the file, with one trajectory per line."""
    made = {name: judged(one) for name, one in drawn().items()}
    lines = [f'  "{name}": {json.dumps(one, separators=(",", ":"))}' for name, one in made.items()]
    body = ",\n".join(lines)
    DATA.write_text(f'{{"about": {json.dumps(ABOUT, indent=2)},\n"trajectories": {{\n{body}\n}}}}\n', "utf-8")


if __name__ == "__main__":
    main()
