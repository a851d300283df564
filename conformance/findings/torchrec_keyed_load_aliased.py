"""Renaming keys in a live state dict and loading it mixes up states.

state_dict() returns the live tensors, as documented, and load_state_dict() copies them one after the other.
After a swap of two entries, the first copy overwrites the source of the second: both parameters end up with
the same state, and one state is lost.

Clauses: KEYED-033.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

params = {name: torch.nn.Parameter(torch.zeros(1)) for name in ("a", "b")}
state = {params["a"]: {"moment": torch.ones(1)}, params["b"]: {"moment": torch.full((1,), 2.0)}}
optimizer = KeyedOptimizer(params, state, [])
saved = optimizer.state_dict()["state"]
optimizer.load_state_dict({"state": {"a": saved["b"], "b": saved["a"]}})
expected = "{'a': 2.0, 'b': 1.0} after a swap"
seen = {name: float(state[param]["moment"]) for name, param in params.items()}
defect = seen != {"a": 2.0, "b": 1.0}
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
