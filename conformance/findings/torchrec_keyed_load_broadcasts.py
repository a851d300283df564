"""Loading broadcasts: the state of one row silently becomes the state of all rows.

A checkpoint of a table of another size, or a moment that another version saved per row, is accepted as long
as the shapes broadcast; even a plain number fills a whole tensor. DTensor state behaves in the same way.
Training continues with accumulators that belong to no row.

Clauses: KEYED-025, KEYED-028, KEYED-062, FUSED-008, COMB-022, SEMI-018.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer

param = torch.nn.Parameter(torch.zeros(2, 3))
moment = torch.zeros(2, 3)
optimizer = KeyedOptimizer({"p": param}, {param: {"moment": moment}}, [])
expected = "an error for shape (1, 3) over shape (2, 3)"
try:
    optimizer.load_state_dict({"state": {"p": {"moment": torch.tensor([[1.0, 2.0, 3.0]])}}})
    seen, defect = f"{moment.tolist()}", True
except (ValueError, RuntimeError) as error:
    seen, defect = f"{type(error).__name__}: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
