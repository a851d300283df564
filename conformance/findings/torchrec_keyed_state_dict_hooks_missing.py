"""Hooks of state_dict and load_state_dict cannot be registered, and would not be called.

The four dictionaries of hooks are never created, so registering raises AttributeError, and both methods
ignore hooks. Renaming keys on load, the documented use, has to be done manually.

Clauses: KEYED-067, KEYED-068, KEYED-069, KEYED-070, FUSED-018, COMB-037, COMB-044,
WRAP-027, SEMI-040.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

calls = []
param = torch.nn.Parameter(torch.ones(1))
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.SGD(params, lr=0.1))
expected = "a hook that is called"
try:
    optimizer.register_state_dict_post_hook(lambda own, state_dict: calls.append("called"))
    optimizer.state_dict()
    seen = f"calls {calls}"
except AttributeError as error:
    seen = f"AttributeError: {error}"
defect = calls != ["called"]
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
