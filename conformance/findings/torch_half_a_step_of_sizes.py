"""A step that raises because sizes disagree has already updated the parameters before, and counted the step.

A loop that catches the error has trained half of the model; the step cannot be repeated after the mistake is
mended.

Clauses: ALGO-105.
"""

import contextlib
import sys

import torch

seen = []
for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
    weights = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([{"params": [weight]} for weight in weights], lr=0.5, **options)
    for weight in weights:
        weight.grad = torch.ones(4, 3)
    optimizer.step()
    before = weights[0].detach().clone()
    weights[1].data = torch.ones(8, 3)
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    if not torch.equal(weights[0], before):
        seen.append(kind.__name__)
print(f"{'defect' if seen else 'fixed'}: expected unchanged weights, seen another group updated by {seen}")
sys.exit(1 if seen else 0)
