"""SGDW subtracts lr · weight_decay from every weight, instead of lr · weight_decay · weight.

Weights of 0 and negative weights move away from 0.

Clauses: ALGO-002, ALGO-003.
"""

import sys

import torch
from torch_optimizer import SGDW

weight = torch.nn.Parameter(torch.tensor([-1.0, 0.0, 1.0]))
weight.grad = torch.zeros(3)
SGDW([weight], lr=0.1, weight_decay=0.5).step()
seen = [round(value, 3) for value in weight.tolist()]
wanted = [-0.95, 0.0, 0.95]
print(f"{'fixed' if seen == wanted else 'defect'}: expected {wanted} after the step, seen {seen}")
sys.exit(0 if seen == wanted else 1)
