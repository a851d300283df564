"""Dense parameters: the step of each optimizer and wrapper, and their state."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv import base
from keyedopt.benchmarks.tasks import TASKS

BY = ("fused", "reference", "torch", "torchrec")
DENSE = tuple(name for name, task in TASKS.items() if task.kind == "dense")
#: Tasks whose cost grows with the numbers of the parameters, and those whose cost grows with their count.
STEPS = tuple(name for name in DENSE if name.startswith(("step", "clip", "in_backward")))
STATES = tuple(name for name in DENSE if name not in STEPS)
MANY = ("state", "init_state", "state_dict-keyed", "load_state_dict-keyed", "save-keyed", "load-keyed")


class Step(base.Timed):
    """Steps of optimizers and wrappers."""

    params: ClassVar[Any] = (STEPS, ("tower-24m",), BY)


class State(base.Timed):
    """State dicts and checkpoints of 1,000 parameters."""

    params: ClassVar[Any] = (STATES, ("1k-parameters",), BY)


class Many(base.Timed):
    """State dicts and checkpoints of 10,000 parameters, of one optimizer."""

    params: ClassVar[Any] = (MANY, ("10k-parameters",), BY)


class Memory(base.HostMemory):
    """Peak memory of steps, including the parameters."""

    params: ClassVar[Any] = (("clip-adam", "step-adam", "state"), ("tower-24m",), BY)
