"""With ``foreach=True`` SGD rounds momentum, AdamW beta2, to the parameter dtype: 0.9 to 0.8984 in bfloat16.

``torch._foreach_mul_`` rounds a Python number to the dtype of the tensors before it multiplies; ``mul_``
keeps the number in float32. With a constant gradient, the buffer converges to a different multiple of it.

On accelerators this path is the default.

Clauses: ALGO-030, ALGO-097.
"""

import sys

import torch

settled = {}
for foreach in (True, False):
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, foreach=foreach)
    for _ in range(100):
        weight.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    settled[foreach] = float(optimizer.state[weight]["momentum_buffer"][0])
off = settled[True] != settled[False]
print(f"{'defect' if off else 'fixed'}: expected a buffer of {settled[False]}, seen {settled[True]}")
sys.exit(1 if off else 0)
