"""OneCycleLR and CyclicLR refuse a keyed optimizer around Adam or SGD with momentum.

They look up in the optimizer's defaults whether there is momentum to cycle. The defaults of the
inner optimizer are not passed on, so both raise a ValueError that claims the optimizer has no
momentum.

Clauses: KEYED-110.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.ones(1))
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.Adam(params, lr=0.1))
expected = "a scheduler, as around Adam itself"
try:
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    seen, defect = "a scheduler", False
except ValueError as error:
    seen, defect = f"ValueError: {error}", True
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
