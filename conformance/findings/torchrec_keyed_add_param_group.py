"""add_param_group, which the documentation describes, only raises NotImplementedError.

Frozen layers cannot be made trainable during fine-tuning, although the page of the class says
that this is what the method is for; the optimizer has to be built again and its state lost or
moved by hand.

Clauses: KEYED-085, WRAP-022.
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
