"""State with a sparse layout is not loaded at all, without an error.

The copy goes into `tensor.detach()`, which for a sparse tensor shares nothing that could be
replaced. The momentum that SGD keeps for an embedding with sparse gradients is saved, and then
silently not restored.

Clauses: KEYED-040.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.zeros(3, 1))


def rows(*numbers: int) -> torch.Tensor:
    """Make a sparse tensor of ones in some rows."""
    return torch.sparse_coo_tensor(
        [list(numbers)], torch.ones(len(numbers), 1), (3, 1), check_invariants=True
    )


state = {param: {"momentum_buffer": rows(0)}}
KeyedOptimizer({"p": param}, state, []).load_state_dict({"state": {"p": {"momentum_buffer": rows(1, 2)}}})
expected = "[0.0, 1.0, 1.0]"
seen = state[param]["momentum_buffer"].to_dense().flatten().tolist()
defect = str(seen) != expected
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
