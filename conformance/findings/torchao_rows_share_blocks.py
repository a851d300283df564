"""A NaN in the gradient of one row makes other rows NaN: blocks of 256 elements cross rows.

The state of a parameter with 4,096 elements and more is quantized by blocks, each with one scale.

Clauses: ALGO-100.
"""

import sys

import torch
from torchao.optim import Adam8bit

weight = torch.nn.Parameter(torch.ones(512, 16))
optimizer = Adam8bit([weight], lr=0.1)
for step in range(2):
    weight.grad = torch.ones_like(weight)
    if step == 0:
        weight.grad[0, 0] = float("nan")
    optimizer.step()
rows = int(weight.isnan().any(dim=1).sum())
print(f"{'fixed' if rows == 1 else 'defect'}: expected 1 row with NaN, seen {rows}")
sys.exit(0 if rows == 1 else 1)
