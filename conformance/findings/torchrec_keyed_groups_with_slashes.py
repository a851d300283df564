"""A slash in a key makes two different groups count as the same group.

Groups are identified by the keys of their parameters joined with slashes: the group of the parameter `a/b`
has the same name as the group of `a` and `b`. One of the two silently keeps stale options. Table names are
free text.

Clauses: KEYED-047.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a/b", "a", "b")}
groups = [
    {"params": [params["a/b"]], "lr": 0.1},
    {"params": [params["a"], params["b"]], "lr": 0.2},
]
optimizer = KeyedOptimizer(params, {}, groups)
optimizer.save_param_groups(True)
saved = optimizer.state_dict()
for group in groups:
    group["lr"] = 0.0
optimizer.load_state_dict(saved)
expected = [0.1, 0.2]
seen = [group["lr"] for group in groups]
defect = seen != expected
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
