"""Invalid arguments raise errors that do not name the argument or describe a different problem.

A frozen parameter raises "'NoneType' object has no attribute 'next_functions'", (name, parameter) pairs
raise "'tuple' object has no attribute 'view_as'", and a single parameter raises "can't optimize a non-leaf
Tensor". None of these messages leads to the frozen parameter or the wrong type.

Clauses: INBW-014, INBW-015, INBW-048, INBW-049.
"""

import sys

import torch
from torch.distributed.optim import _apply_optimizer_in_backward

parameter = torch.nn.Parameter(torch.ones(2))
frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
calls = {
    "params, frozen": (torch.optim.SGD, [frozen], {"lr": 0.1}),
    "params, with names": (torch.optim.SGD, [("weight", parameter)], {"lr": 0.1}),
    "optimizer_class": (torch.nn.Linear, [parameter], {}),
    "optimizer_kwargs": (torch.optim.SGD, [parameter], [("lr", 0.1)]),
}
seen = []
for name, (kind, params, kwargs) in calls.items():
    try:
        _apply_optimizer_in_backward(kind, params, kwargs)
    except Exception as error:
        if name.partition(",")[0] not in str(error):
            seen.append(f"{type(error).__name__}: {error}")
    else:
        seen.append(f"no error for {name}")
defect = bool(seen)
print(f"{'defect' if defect else 'fixed'}: expected errors that name the argument, seen {seen}")
sys.exit(1 if defect else 0)
