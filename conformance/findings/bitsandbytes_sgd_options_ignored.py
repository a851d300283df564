"""SGD ignores the momentum of a group, and dampening.

Clauses: ALGO-002, ALGO-082, ALGO-083, ALGO-092.
"""

import sys

import torch
from bitsandbytes.optim import SGD32bit

weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
groups = [{"params": [weights[0]], "momentum": 0.1}, {"params": [weights[1]], "momentum": 0.9}]
optimizer = SGD32bit(groups, lr=0.1, momentum=0.5)
for _ in range(3):
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
seen = [round(weight[0].item(), 3) for weight in weights]
wanted = [1 - 0.1 * (1 + 1.1 + 1.11), 1 - 0.1 * (1 + 1.9 + 2.71)]
same = all(abs(one - other) < 1e-3 for one, other in zip(seen, wanted, strict=True))
print(f"{'fixed' if same else 'defect'}: expected {[round(one, 3) for one in wanted]}, seen {seen}")
sys.exit(0 if same else 1)
