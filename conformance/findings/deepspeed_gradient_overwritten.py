"""A step of Adagrad overwrites the gradients of the elements that do not fill a vector register.

Clauses: ALGO-041.
"""

import sys

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
DeepSpeedCPUAdagrad([weight], lr=0.1).step()
seen = sorted(set(weight.grad.tolist()))
print(f"{'fixed' if seen == [1.0] else 'defect'}: expected a gradient of ones, seen {seen}")
sys.exit(0 if seen == [1.0] else 1)
