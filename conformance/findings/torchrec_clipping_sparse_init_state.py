"""init_state with sparse gradients fails through a clipping optimizer.

`init_state({names})` creates the state of parameters with sparse gradients, so that a checkpoint can be
loaded in place. It works on the wrapped optimizer, but GradientClippingOptimizer tries to clip the sparse
zeros and raises NotImplementedError, so a model with sparse embeddings cannot resume. With torch 2.14,
which can clip sparse gradients by norm, NORM works and VALUE still fails.

Clauses: CLIP-075.
"""

import functools
import sys
import warnings

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

warnings.simplefilter("ignore")
params = {"table": torch.nn.Parameter(torch.zeros(3, 2))}
keyed = KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adagrad, lr=1.0))
keyed.init_state({"table"})  # works
try:
    GradientClippingOptimizer(keyed, GradientClipping.VALUE).init_state({"table"})
    seen = "initialized state"
except NotImplementedError as error:
    seen = f"NotImplementedError: {str(error)[:60]}"
defect = seen != "initialized state"
print(f"{'defect' if defect else 'fixed'}: expected initialized state, seen {seen}")
sys.exit(1 if defect else 0)
