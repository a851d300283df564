"""A wrapper does not report that its groups are to be saved, so a combination drops them.

OptimizerWrapper passes save_param_groups on, but its own flag, which CombinedOptimizer reads, always stays
False. A combination of wrappers that save their groups saves none; if an unwrapped optimizer that saves its
groups is beside them, an assertion fails. Learning rates and options are missing from the checkpoint
although they were requested.

Clauses: WRAP-018, COMB-052.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
adam = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.Adam, lr=0.1))
wrapper = OptimizerWrapper(adam)
wrapper.save_param_groups(True)
alone = sorted(wrapper.state_dict())
combined = sorted(CombinedOptimizer([("a", wrapper)]).state_dict())
defect = "param_groups" in alone and "param_groups" not in combined
seen = f"{alone} from the wrapper, {combined} from its combination"
print(f"{'defect' if defect else 'fixed'}: expected param_groups in both; seen {seen}")
sys.exit(1 if defect else 0)
