"""On the CPU SGD with ``fused=True`` does not update parameters in half precision.

Of a bfloat16 or float16 parameter only the last few elements, which do not fill a vector register, are
updated; all others keep their bits, without an error or a warning.

Clauses: ALGO-097. Seen in: <2.14. Reported as pytorch#191763.
"""

import sys

import torch

seen = []
for dtype in (torch.bfloat16, torch.float16):
    weight = torch.nn.Parameter(torch.ones(64, dtype=dtype))
    weight.grad = torch.ones(64, dtype=dtype)
    torch.optim.SGD([weight], lr=0.5, fused=True).step()
    still = int((weight == 1.0).sum())
    if still:
        seen.append(f"{still} of 64 elements of {dtype} at 1")
print(f"{'defect' if seen else 'fixed'}: expected all elements at 0.5, seen {seen}")
sys.exit(1 if seen else 0)
