"""The error for state that does not fit does not say where the mismatch is.

A missing entry raises a bare `KeyError: 'm'`, a wrong shape raises a RuntimeError about "tensor a" and
"tensor b", and a ShardedTensor or DTensor raises a bare AssertionError, which `python -O` removes. With
thousands of tables, neither the table nor the entry can be found.

Clauses: KEYED-036, FUSED-008, SEMI-018.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

params = {f"table_{number}": torch.nn.Parameter(torch.zeros(2)) for number in range(3)}
state = {param: {"moment": torch.zeros(2)} for param in params.values()}
given = {name: {"moment": torch.zeros(2)} for name in params}
given["table_1"] = {"other": torch.zeros(2)}
expected = "a ValueError that names table_1 and moment"
try:
    KeyedOptimizer(params, state, []).load_state_dict({"state": given})
    seen, defect = "no error", True
except Exception as error:
    seen = f"{type(error).__name__}: {error}"
    defect = not isinstance(error, ValueError) or "table_1" not in seen
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
