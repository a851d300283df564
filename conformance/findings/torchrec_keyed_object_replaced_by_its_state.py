"""An object in the state that can save but not load is replaced by its state dict.

Saving looks for `state_dict`, loading for `load_state_dict`. An object that has only the first is shown as
a dictionary and then overwritten with that dictionary: the optimizer finds a dict in place of its object.

Clauses: KEYED-054.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer


class Statistics:
    """An object whose state can be looked at."""

    def state_dict(self) -> dict[str, int]:
        """Return a count."""
        return {"count": 1}


param = torch.nn.Parameter(torch.zeros(1))
entry = {"statistics": Statistics()}
optimizer = KeyedOptimizer({"p": param}, {param: entry}, [])
expected = "a Statistics object after a load, or an error"
try:
    optimizer.load_state_dict(optimizer.state_dict())
except Exception as error:
    print(f"raised {type(error).__name__}")
seen = repr(entry["statistics"])
defect = not isinstance(entry["statistics"], Statistics)
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
