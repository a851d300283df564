"""With ``foreach=True`` and ``nesterov=True`` a step of SGD adds the momentum to ``.grad`` in place.

``_multi_tensor_sgd`` adds the buffers to the list of gradients, which are the user's own tensors if neither
``weight_decay`` nor ``maximize`` has made copies. What reads the gradients later, such as a second optimizer
or a norm that is logged, finds others.

On accelerators this path is the default.

Clauses: ALGO-041.
"""

import sys

import torch

weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
torch.optim.SGD([weight], lr=0.1, momentum=0.5, nesterov=True, foreach=True).step()
off = weight.grad.tolist() != [1.0, 1.0]
print(f"{'defect' if off else 'fixed'}: expected the gradient [1.0, 1.0], seen {weight.grad.tolist()}")
sys.exit(1 if off else 0)
