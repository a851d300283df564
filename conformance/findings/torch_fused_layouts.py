"""On the CPU optimizers with ``fused=True`` treat the memory of every tensor as contiguous.

For a parameter that is a strided view, wrong elements are updated, and the memory between its elements in
the larger buffer is overwritten. A gradient with another layout than its parameter is read in memory order.

Clauses: ALGO-097.
"""

import sys

import torch

seen = []
for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
    buffer = torch.zeros(8, 8)
    weight = torch.nn.Parameter(buffer[:, ::2])
    weight.grad = torch.ones(8, 4)
    kind([weight], lr=0.5, fused=True).step()
    if buffer[:, 1::2].any():
        seen.append(f"{kind.__name__} writes between the elements of a view")
    weight = torch.nn.Parameter(torch.zeros(8, 4))
    weight.grad = torch.zeros(4, 8).index_fill_(0, torch.tensor([0]), 1.0).t()
    kind([weight], lr=0.5, fused=True).step()
    if weight[:, 1:].any():
        seen.append(f"{kind.__name__} takes a transposed gradient as it lies in memory")
print(f"{'defect' if seen else 'fixed'}: expected only the parameter's elements to be updated, seen {seen}")
sys.exit(1 if seen else 0)
