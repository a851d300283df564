"""Make ``aggregation.json``: the error of summing many gradients of one row in float32, by several methods.

``python -m keyedopt.tools.golden.make_aggregation`` writes, for each number of gradients and each method of
summation, the error divided by the sum of the magnitudes. The gradients are given by formulas; their exact
sum is computed with integers.
"""

import json
import sys
from pathlib import Path

import torch

from keyedopt.conformance.targets.find import find

FILE = Path(__file__).parents[2] / "conformance" / "golden" / "aggregation.json"
COUNTS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000)
#: Gradients are integers in units of 2⁻²⁷, so float32 holds each exactly, and Python their sum.
UNIT = 2.0**-27
KINDS = ("equal", "random", "signed")


def gradients(count: int, kind: str) -> torch.Tensor:
    """Return fixed integers of up to 24 bits: all equal to 0.1 in float32, or random with either sign."""
    if kind == "equal":
        return torch.full((count,), 13_421_773, dtype=torch.int64)
    generator = torch.Generator().manual_seed(count)
    low = -(2**24) if kind == "signed" else 0
    return torch.randint(low, 2**24, (count,), generator=generator, dtype=torch.int64)


def one_by_one(grads: torch.Tensor) -> float:
    """Add up in float32, one after the other."""
    return float(torch.zeros(1).index_add_(0, torch.zeros(len(grads), dtype=torch.int64), grads)[0])


def pairwise(grads: torch.Tensor) -> float:
    """Add up in float32 in a tree, as torch does."""
    return float(grads.sum())


def accumulated(grads: torch.Tensor) -> float:
    """Add up as the reference does: duplicates of a row, over a window of four steps."""
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    kind = find("reference").surface().AccumulateSGD
    optimizer = kind([weight], lr=1.0, use_accumulate=True, accumulate_step=4)
    for part in torch.tensor_split(grads, 4):
        rows = torch.zeros(1, len(part), dtype=torch.int64)
        weight.grad = torch.sparse_coo_tensor(rows, part[:, None], (1, 1), check_invariants=False)
        optimizer.step()
    return -float(weight.detach())


WAYS = {"one by one": one_by_one, "pairwise": pairwise, "reference": accumulated}


def curve(kind: str) -> dict[str, list[float]]:
    """Return the error of each method of summation for each count."""
    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    for count in COUNTS:
        exact = gradients(count, kind)
        total, sizes = int(exact.sum()), int(exact.abs().sum())
        grads = (exact.double() * UNIT).float()
        for way, add in WAYS.items():
            error = abs(round(add(grads) / UNIT) - total) / sizes
            errors[way].append(float(f"{error:.2e}"))
    return errors


def made() -> str:
    """Return the contents of the file."""
    data = {
        "about": [
            "Error of the sum of so many float32 gradients of one row, divided by the sum of their sizes.",
            "Made by make_aggregation.py. Do not edit.",
        ],
        "counts": list(COUNTS),
        **{kind: curve(kind) for kind in KINDS},
    }
    rows = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(rows) + "\n}" + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)  # another number of threads sums in another order
    FILE.write_text(made(), encoding="utf-8")
    sys.stdout.write(FILE.read_text(encoding="utf-8"))
