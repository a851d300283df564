"""A step that raises because sizes disagree has already updated the parameters of the groups before.

A loop that catches the error has trained half of the model; the step cannot be repeated after the mistake is
mended.

Clauses: ALGO-105.
"""

import contextlib
import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

weights = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
optimizer = RowWiseAdagrad([{"params": [weight]} for weight in weights], lr=0.5)
for weight in weights:
    weight.grad = torch.ones(4, 3)
optimizer.step()
before = weights[0].detach().clone()
weights[1].data = torch.ones(8, 3)
with contextlib.suppress(RuntimeError):
    optimizer.step()
defect = not torch.equal(weights[0], before)
print(f"{'defect' if defect else 'fixed'}: expected unchanged weights, seen {weights[0][0].tolist()}")
sys.exit(1 if defect else 0)
