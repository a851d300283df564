"""Step hooks can be registered but are not called.

The constructor creates the lists of hooks but never patches `step` to call them, as torch's constructor
does. Hooks start to work, for all instances of the class at once, when any instance is copied or unpickled,
or (in subclasses that do not override it) when zero_grad is called. Until then, logging, clipping and
profiling hooks are silently skipped.

Clauses: KEYED-065, KEYED-118, KEYED-123, COMB-036, WRAP-027.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

calls = []
param = torch.nn.Parameter(torch.ones(1))
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.SGD(params, lr=0.1))
optimizer.register_step_pre_hook(lambda *given: calls.append("before"))
optimizer.register_step_post_hook(lambda *given: calls.append("after"))
optimizer.step()
expected = ["before", "after"]
seen = calls
defect = seen != expected
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
