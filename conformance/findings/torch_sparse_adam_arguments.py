"""An infinite lr or eps is accepted, and so are three betas.

An infinite lr makes every updated row infinite, an infinite eps silently stops training, and the third beta
raises an error only in the first step.

Clauses: SPARSE-019, SPARSE-020.
"""

import math
import sys

import torch

seen = []
for options in ({"lr": math.inf}, {"eps": math.inf}, {"betas": (0.9, 0.99, 0.999)}):
    try:
        torch.optim.SparseAdam([torch.nn.Parameter(torch.ones(3, 2))], **options)
    except (ValueError, TypeError):
        continue
    seen.append(options)
defect = bool(seen)
print(f"{'defect' if defect else 'fixed'}: expected an error for each, {seen} accepted")
sys.exit(1 if defect else 0)
