"""State with a sparse layout is silently not loaded.

The load copies into `tensor.detach()`, which for a sparse tensor does not share its storage with the
original. The momentum that SGD keeps for an embedding with sparse gradients is saved but not restored.

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
