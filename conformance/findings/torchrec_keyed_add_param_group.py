"""add_param_group is documented but only raises NotImplementedError.

The documentation of the class says that the method serves to make frozen layers trainable during
fine-tuning. Instead, users have to rebuild the optimizer and lose its state or move it manually.

Clauses: KEYED-085, KEYED-116, WRAP-022, WRAP-038.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

params = {name: torch.nn.Parameter(torch.ones(1)) for name in ("old", "new")}
optimizer = KeyedOptimizerWrapper({"old": params["old"]}, lambda given: torch.optim.SGD(given, lr=0.1))
expected = "a second group"
try:
    optimizer.add_param_group({"params": [("new", params["new"])], "lr": 0.01})
    seen = f"{len(optimizer.param_groups)} groups and keys {sorted(optimizer.params)}"
except Exception as error:
    seen = type(error).__name__
defect = seen != "2 groups and keys ['new', 'old']"
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
