"""Stages are validated with assert, and therefore not at all under python -O.

Optimized containers set PYTHONOPTIMIZE. There, a stage that ends before it begins is skipped or
extrapolated, and INTERPOLATE without its end divides by zero in the middle of a run. Without -O, callers
that expect ValueError for an invalid argument, as torch optimizers raise, do not catch the AssertionError.

Clauses: WARM-060, WARM-062.
"""

import subprocess
import sys

PROGRAM = """
import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.SGD(params, lr=0.5))
stages = [
    WarmupStage(WarmupPolicy.CONSTANT, max_iters=9, value=0.5),
    WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.0),
]
try:
    optimizer = WarmupOptimizer(inner, stages, lr=1.0)
    for _ in range(10):
        optimizer.step()
    print(f"lr = {optimizer.param_groups[0]['lr']} from a stage that ends before it begins")
except ValueError as error:
    print(f"ValueError: {error}")
"""

done = subprocess.run([sys.executable, "-O", "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True)
seen = (done.stdout or done.stderr).strip().splitlines()[-1]
defect = not seen.startswith("ValueError")
print(f"{'defect' if defect else 'fixed'}: expected a ValueError under python -O, seen {seen}")
sys.exit(1 if defect else 0)
