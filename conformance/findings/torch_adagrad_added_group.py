"""Adagrad cannot step a parameter from add_param_group, or one without state in the loaded checkpoint.

Only the constructor creates the sums, so the next step raises KeyError: 'sum'. Reported as pytorch#53712.

Clauses: ALGO-080, ALGO-082. Seen in: <2.12.
"""

import sys

import torch

first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
optimizer = torch.optim.Adagrad([first], lr=0.1)
optimizer.add_param_group({"params": [second]})
second.grad = torch.ones(2)
try:
    optimizer.step()
    seen = second.tolist()
except KeyError as error:
    seen = repr(error)
defect = isinstance(seen, str)
print(f"{'defect' if defect else 'fixed'}: expected a step of the parameter, seen {seen}")
sys.exit(1 if defect else 0)
