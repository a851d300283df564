"""A load that fails halfway leaves the optimizer partly loaded.

Checks and writes are mixed: when the error is raised, everything before the first fault has been
overwritten, stateful objects have loaded their state, and groups are only checked after all state has been
written. A caller that catches the error, to start from scratch or from an older checkpoint, trains on a
mixture.

Clauses: KEYED-026, KEYED-045, KEYED-053, WARM-056, COMB-013, COMB-018, WRAP-016, SEMI-018.
"""

import contextlib
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

params = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a", "b")}
state = {param: {"moment": torch.zeros(2)} for param in params.values()}
optimizer = KeyedOptimizer(params, state, [])
given = {"a": {"moment": torch.ones(2)}, "b": {"moment": torch.ones(5)}}
with contextlib.suppress(ValueError, RuntimeError):
    optimizer.load_state_dict({"state": given})
expected = "the state of a unchanged, because loading b raises an error"
seen = state[params["a"]]["moment"].tolist()
defect = seen != [0.0, 0.0]
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
