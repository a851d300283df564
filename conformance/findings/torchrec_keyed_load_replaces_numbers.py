"""A number in the state is replaced by any loaded value: a tensor, a mapping, a string or None.

Only tensors, dictionaries and stateful objects are checked; other values are overwritten without a check. A
step count that became a dictionary fails in a later step, far from the checkpoint that caused it; one that
became None or a tensor of three elements may not fail at all.

Clauses: KEYED-028, KEYED-036.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.zeros(2))
optimizer = KeyedOptimizer({"p": param}, {param: {"step": 3}}, [])
expected = "an error for a tensor of three elements for a number"
try:
    optimizer.load_state_dict({"state": {"p": {"step": torch.ones(3)}}})
    seen, defect = f"{optimizer.state_dict()['state']['p']}", True
except (ValueError, TypeError) as error:
    seen, defect = f"{type(error).__name__}: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
