"""After the inner optimizer loads a checkpoint itself, the wrapper keeps saving the old state.

The wrapper stores the state mapping and the list of groups from its construction; torch optimizers replace
both in load_state_dict. After a migration from plain torch checkpoints, the wrapper saves the old state,
and loads into tensors that are no longer used.

Clauses: KEYED-109, WRAP-003, WARM-074.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

param, other = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
inner, old = torch.optim.Adam([param], lr=0.1), torch.optim.Adam([other], lr=0.1)
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: inner)
for own, steps in ((inner, 1), (old, 5)):
    for _ in range(steps):
        param.grad = other.grad = torch.ones(1)
        own.step()
inner.load_state_dict(old.state_dict())
expected = "a checkpoint with 5 steps"
saved = optimizer.state_dict()["state"]["p"]["step"]
seen = f"one with {int(saved)}, while the inner optimizer has {int(inner.state[param]['step'])}"
defect = int(saved) != 5
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
