"""On the CPU optimizers with ``fused=True`` write outside the memory of a state that is too small.

The kernels do not compare sizes. After a table has grown through ``.data``, a step overwrites other memory
of the process, without an error; optimizers without ``fused=True`` raise RuntimeError. Here the memory behind
the state is a buffer of the script.

Clauses: ALGO-104.
"""

import sys

import torch

seen = []
for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind([weight], lr=0.5, fused=True, **options)
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    buffers = []
    for state in optimizer.state[weight].values():
        if isinstance(state, torch.Tensor) and state.ndim:
            buffers.append(torch.full((64, 3), 7.0))
            buffers[-1][:4] = state
            state.data = buffers[-1][:4]
    weight.data, weight.grad = torch.ones(8, 3), None
    weight.grad = torch.ones(8, 3)
    try:
        optimizer.step()
    except RuntimeError:
        continue
    written = sum(int((buffer[4:] != 7).sum()) for buffer in buffers)
    seen.append(f"{kind.__name__} has overwritten {written} numbers behind its state")
print(f"{'defect' if seen else 'fixed'}: expected a RuntimeError of each step, seen {seen}")
sys.exit(1 if seen else 0)
