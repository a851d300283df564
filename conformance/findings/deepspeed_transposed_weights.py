"""A weight that is not contiguous is updated at other elements than its gradient says, or not at all.

Clauses: ALGO-048.
"""

import sys

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

weight = torch.nn.Parameter(torch.zeros(3, 2).t())
weight.grad = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
DeepSpeedCPUAdam([weight], lr=0.1).step()
seen = weight.nonzero().tolist()
print(f"{'fixed' if seen == [[0, 1]] else 'defect'}: expected that [[0, 1]] moved, seen {seen}")
sys.exit(0 if seen == [[0, 1]] else 1)
