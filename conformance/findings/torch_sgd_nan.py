"""SGD accepts NaN as lr, momentum and weight_decay; Adam and Adagrad raise ValueError.

SGD checks ``lr < 0.0``, which NaN passes; the others check ``not 0.0 <= lr``. A NaN learning rate from a
broken schedule or configuration makes every weight NaN in the first step.

Clauses: ALGO-053, ALGO-057.
"""

import sys

import torch

seen = []
for option in ("lr", "weight_decay"):
    try:
        torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], **{option: float("nan")})
    except ValueError:
        continue
    seen.append(option)
print(f"{'defect' if seen else 'fixed'}: expected a ValueError for NaN, seen none for {seen}")
sys.exit(1 if seen else 0)
