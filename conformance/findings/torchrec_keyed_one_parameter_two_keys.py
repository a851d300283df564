"""A parameter under two keys is accepted, but its own checkpoint cannot be loaded.

Tied weights that are listed twice are saved only under the last of their keys. The constructor raises no
error; the next restart fails because the first key is missing.

Clauses: KEYED-002.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.ones(1))
expected = "a ValueError for two keys of one parameter"
try:
    optimizer = KeyedOptimizer({"in": param, "out": param}, {param: {"moment": torch.ones(1)}}, [])
    saved = optimizer.state_dict()
    seen, defect = f"a checkpoint of {list(saved['state'])}", True
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        seen += f" that does not load: {error}"
except ValueError as error:
    seen, defect = f"ValueError: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
