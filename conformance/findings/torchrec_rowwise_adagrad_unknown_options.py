"""Any misspelt option is accepted and ignored.

The constructor takes ``**unused``, so ``wieght_decay=0.1`` silently trains without decay, and
``epsilon=1e-8`` with a different eps.

Clauses: ALGO-062.
"""

import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

seen = "accepted"
try:
    RowWiseAdagrad([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1, wieght_decay=0.1)
except (TypeError, ValueError) as error:
    seen = type(error).__name__
defect = seen == "accepted"
print(f"{'defect' if defect else 'fixed'}: expected an error for wieght_decay=0.1, seen: {seen}")
sys.exit(1 if defect else 0)
