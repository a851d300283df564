"""If several groups have the same parameters, a load restores only the last one.

Groups are collected in a dictionary under the names of their parameters. Empty groups, as on a rank that
holds none of their tables, have the same name and overwrite each other: all but the last silently keep
stale learning rates.

Clauses: KEYED-046, SEMI-019.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.zeros(1))
groups = [{"params": [], "lr": 0.1}, {"params": [], "lr": 0.2}, {"params": [param], "lr": 0.3}]
optimizer = KeyedOptimizer({"p": param}, {}, groups)
optimizer.save_param_groups(True)
saved = optimizer.state_dict()
for group in groups:
    group["lr"] = 0.0
optimizer.load_state_dict(saved)
expected = [0.1, 0.2, 0.3]
seen = [group["lr"] for group in groups]
defect = seen != expected
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
