"""Integer state truncates loaded values, and real state drops imaginary parts.

A float checkpoint that is loaded into quantized moments (int8, for example) gives zeros for fractions,
wraps around out of range, and turns NaN into numbers. No error is raised.

Clauses: KEYED-032.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.zeros(2))
moment = torch.zeros(2, dtype=torch.int8)
optimizer = KeyedOptimizer({"p": param}, {param: {"moment": moment}}, [])
expected = "an error for [0.75, 300.0] in int8 state"
try:
    optimizer.load_state_dict({"state": {"p": {"moment": torch.tensor([0.75, 300.0])}}})
    seen, defect = f"{moment.tolist()}", True
except (ValueError, RuntimeError, TypeError) as error:
    seen, defect = f"{type(error).__name__}: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
