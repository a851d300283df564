"""OneCycleLR and CyclicLR reject a keyed optimizer around Adam or SGD with momentum.

Both schedulers look in the optimizer's defaults for momentum to cycle. The wrapper does not pass on the
defaults of the inner optimizer, so both raise a ValueError that claims the optimizer has no momentum.

Clauses: KEYED-110.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.ones(1))
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.Adam(params, lr=0.1))
expected = "a scheduler, as with plain Adam"
try:
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    seen, defect = "a scheduler", False
except ValueError as error:
    seen, defect = f"ValueError: {error}", True
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
