"""In float16 Adam, AdamW, Adagrad and RAdam turn elements with a zero gradient into NaN in the first step.

eps is added to a float16 square root, where 1e-8 and 1e-10 round to zero; an element whose gradients were
all zero is computed as 0/0. With eps=0, which the constructors accept, this happens in every dtype. RAdam
has the defect only with foreach=True, its default on accelerators.

Clauses: ALGO-028, ALGO-032, ALGO-033, ALGO-097.
"""

import sys

import torch

seen = []
for kind in (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam):
    for dtype, options in ((torch.float16, {}), (torch.float32, {"eps": 0.0})):
        weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        try:
            optimizer = kind([weight], lr=0.1, foreach=kind is torch.optim.RAdam or None, **options)
        except ValueError:
            continue
        weight.grad = torch.tensor([1.0, 0.0], dtype=dtype)
        optimizer.step()
        if not weight.detach().isfinite().all():
            seen.append(f"{kind.__name__} {dtype} {options}")
print(f"{'defect' if seen else 'fixed'}: expected the element to stay at 1, seen NaN from {seen}")
sys.exit(1 if seen else 0)
