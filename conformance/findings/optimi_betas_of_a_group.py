"""The betas of a parameter group are ignored: Adam keeps them as beta1 and beta2 of all groups.

Clauses: ALGO-082, ALGO-083, ALGO-092.
"""

import sys

import optimi
import torch

weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
grouped = optimi.Adam([{"params": [weights[0]], "betas": (0.5, 0.5)}], lr=0.1)
alone = optimi.Adam([weights[1]], lr=0.1, betas=(0.5, 0.5))
for grad in (1.0, -0.25, 0.5):
    for weight, optimizer in zip(weights, (grouped, alone), strict=True):
        weight.grad = torch.full((2,), grad)
        optimizer.step()
same = torch.equal(*(weight.detach() for weight in weights))
print(f"{'fixed' if same else 'defect'}: expected equal weights, seen {[w[0].item() for w in weights]}")
sys.exit(0 if same else 1)
