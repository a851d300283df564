"""A load silently drops nested state that the optimizer does not have.

The number of entries is compared at the top level only. In nested dictionaries, which Shampoo and others
use, entries that the optimizer lacks are dropped: a checkpoint of another configuration appears to fit.

Clauses: KEYED-027.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.zeros(2))
optimizer = KeyedOptimizer({"p": param}, {param: {"factors": {"left": torch.zeros(2)}}}, [])
given = {"factors": {"left": torch.ones(2), "right": torch.ones(2)}}
expected = "an error for the entry 'right'"
try:
    optimizer.load_state_dict({"state": {"p": given}})
    seen, defect = f"no error, and state {optimizer.state_dict()['state']['p']}", True
except (ValueError, KeyError) as error:
    seen, defect = f"{type(error).__name__}: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
