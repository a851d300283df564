"""A wrapper around a combination shows the state from its construction, and is saved without state.

CombinedOptimizer returns new copies of its state, parameters and groups on each access, and the wrapper
keeps the copies from its construction, usually before the first step. Its state stays empty. A combination
that contains such a wrapper, for example clipping around one half of a model, silently saves an empty
state: the moments of all optimizers are lost at the restart. The same cause loses the schedule in
torchrec_warmup_around_combined.py.

Clauses: COMB-020, WRAP-003, WRAP-004, WRAP-005, WRAP-033.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
adam = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.Adam, lr=0.1))
dense = GradientClippingOptimizer(CombinedOptimizer([("tower", adam)]), GradientClipping.NORM, 1.0)
optimizer = CombinedOptimizer([("dense", dense)])
param.grad = torch.ones(2)
optimizer.step()
saved = sorted(optimizer.state_dict()["state"])
defect = saved != ["dense.tower.p"] or len(dense.state) != 1
print(f"{'defect' if defect else 'fixed'}: expected ['dense.tower.p'] to be saved, seen {saved}")
sys.exit(1 if defect else 0)
