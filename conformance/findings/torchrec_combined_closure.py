"""A combination evaluates the closure once per optimizer instead of once per step.

CombinedOptimizer passes the closure to every optimizer in turn. The second one sees a partly updated model,
a closure that accumulates gradients doubles them, metrics count the batch several times, and the step costs
one forward and backward pass per optimizer. Gradients are not enabled for the closure either, unless each
of the optimizers does so itself.

Clauses: COMB-024, COMB-025, COMB-050.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

sgd = functools.partial(torch.optim.SGD, lr=1.0)
params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a", "b")}
optimizer = CombinedOptimizer(
    [(name, KeyedOptimizerWrapper({"p": param}, sgd)) for name, param in params.items()]
)
evaluations = 0


def closure() -> torch.Tensor:
    """Evaluate a model whose parameters both have the gradient 1."""
    global evaluations
    evaluations += 1
    loss = params["a"].sum() + params["b"].sum()
    loss.backward()
    return loss


optimizer.step(closure)
seen = f"{evaluations} evaluations, moves {[float(-param.detach()) for param in params.values()]}"
defect = evaluations != 1
print(f"{'defect' if defect else 'fixed'}: expected 1 evaluation, moves [1.0, 1.0]; seen {seen}")
sys.exit(1 if defect else 0)
