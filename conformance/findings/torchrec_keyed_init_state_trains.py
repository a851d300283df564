"""init_state takes a real training step: it changes weights and step counts, and in float16 creates NaN.

The dummy step runs with weight decay enabled, so every restart decays the weights and adds a trace of them
to the moments; with float16 parameters Adam and Adagrad compute 0/0 and the model becomes NaN. The step is
counted, so that Adam's bias correction and Adagrad's decay are wrong from then on, and existing moments
decay. A job that calls init_state, as it must before it loads a checkpoint in place, trains differently
from one that does not.

Clauses: KEYED-074, KEYED-075, KEYED-076, KEYED-077, KEYED-078, KEYED-082, COMB-031, WRAP-020.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

decayed = torch.nn.Parameter(torch.ones(1))
half = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
KeyedOptimizerWrapper(
    {"p": decayed}, lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.5)
).init_state()
optimizer = KeyedOptimizerWrapper({"p": half}, lambda params: torch.optim.Adam(params, lr=0.1))
optimizer.init_state()
steps = float(optimizer.state[half]["step"])
expected = "weights of 1.0 and 1.0, and 0.0 steps"
seen = f"weights of {float(decayed):.3g} and {float(half):.3g}, and {steps} steps"
defect = (float(decayed), float(half), steps) != (1.0, 1.0, 0.0)
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
