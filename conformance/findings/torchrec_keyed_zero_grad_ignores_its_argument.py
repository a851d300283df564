"""zero_grad of the wrapper ignores set_to_none.

The signature has set_to_none=False and the documentation says that gradients are set to zero, but the
argument is not passed on, and torch's default removes the gradients. Code that accumulates into `.grad`
after zero_grad() fails on None, optimizers skip parameters instead of applying momentum and decay, and
gradient memory is freed and allocated again.

Clauses: KEYED-091, KEYED-117, COMB-029, WRAP-012.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.ones(1))
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.SGD(params, lr=0.1))
param.grad = torch.ones(1)
optimizer.zero_grad(set_to_none=False)
expected = "a gradient of zeros"
seen = param.grad
defect = param.grad is None
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
