"""State that the optimizer has no place for is dropped, if it is nested.

The number of entries is compared at the top level only. Nested dictionaries, which Shampoo and
others use, lose what the optimizer does not have: a checkpoint of another configuration seems to
fit.

Clauses: KEYED-027.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.zeros(2))
optimizer = KeyedOptimizer({"p": param}, {param: {"factors": {"left": torch.zeros(2)}}}, [])
given = {"factors": {"left": torch.ones(2), "right": torch.ones(2)}}
expected = "a refusal of the entry 'right'"
try:
    optimizer.load_state_dict({"state": {"p": given}})
    seen, defect = f"no error, and state {optimizer.state_dict()['state']['p']}", True
except (ValueError, KeyError) as error:
    seen, defect = f"{type(error).__name__}: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
