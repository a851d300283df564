"""All parameters share the optimizer arguments, including a learning rate tensor.

The optimizers of two parameters read one learning rate tensor, so two schedulers, one for each parameter,
decrease the learning rate twice as fast. Changing the recorded arguments of one parameter also changes
those of the other. torchrec re-exports torch's function.

Clauses: INBW-020.
"""

import sys
import warnings

import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

warnings.simplefilter("ignore")  # it says that it is deprecated
parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": torch.tensor(0.1)})
optimizers = [parameter._in_backward_optimizers[0] for parameter in parameters]
schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5) for optimizer in optimizers]
for parameter in parameters:
    parameter.sum().backward()
for scheduler in schedulers:
    scheduler.step()
seen = float(optimizers[0].param_groups[0]["lr"])
defect = abs(seen - 0.05) > 1e-6
print(
    f"{'defect' if defect else 'fixed'}: expected a learning rate of 0.05 after a scheduler step, seen {seen}"
)
sys.exit(1 if defect else 0)
