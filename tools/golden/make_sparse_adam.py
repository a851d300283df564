"""Make ``sparse_adam.json``: exact trajectories of SparseAdam, and error budgets for rounding.

The script applies Adam's published formula to the rows that a gradient lists, with the method and the format
of `make_trajectories`. The placement of eps matters only in the trajectory ``eps``: in the others eps is far
below the last place. The file is only changed by this script::

    python -m keyedopt.tools.golden.make_sparse_adam
"""

import json
import random
from pathlib import Path
from typing import Any

from keyedopt.conformance.golden.oracle import Trajectory, judged
from keyedopt.tools.golden.make_trajectories import trajectory

DATA = Path(__file__).parents[2] / "conformance" / "golden" / "sparse_adam.json"
ABOUT = ["SparseAdam, made by make_sparse_adam.py with mpmath; see trajectories.json. Do not edit."]
TINY = 2.0**-70


def drawn() -> dict[str, Trajectory]:
    """Draw every trajectory, named by its special property."""
    rate: dict[str, Any] = {"lr": 0.125, "eps": TINY}
    made = {
        "plain": trajectory("Adam", "sparse", seed=0, **rate),
        "betas": trajectory("Adam", "sparse", seed=1, betas=[0.5, 0.875], **rate),
        "maximize": trajectory("Adam", "sparse", seed=2, maximize=True, **rate),
        "eps": trajectory("Adam", "sparse", seed=3, lr=0.125, eps=0.0625),
        "extreme": trajectory("Adam", "sparse", seed=4, unit=2.0**-40, **rate),
    }
    draw = random.Random("extreme")
    for step in made["extreme"]["steps"]:
        step["grads"] = [[x * 2 ** draw.choice((0, 10, 40, 60)) for x in row] for row in step["grads"]]
    made["extreme"]["dtypes"] = ["float32"]
    for one in made.values():
        one["algorithm"] = "SparseAdam"
    return made


def text() -> str:
    """Return the contents of the file, with one trajectory per line."""
    made = {name: judged(one) for name, one in drawn().items()}
    lines = [f'  "{name}": {json.dumps(one, separators=(",", ":"))}' for name, one in made.items()]
    body = ",\n".join(lines)
    return f'{{"about": {json.dumps(ABOUT)},\n"trajectories": {{\n{body}\n}}}}\n'


def main() -> None:
    """Write the file."""
    DATA.write_text(text(), "utf-8")


if __name__ == "__main__":
    main()
