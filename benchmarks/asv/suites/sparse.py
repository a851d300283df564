"""Sparse gradients: the step of each optimizer, and SparseAdam's state."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv import base
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.workloads import STATE

BY = ("fused:native", "fused:triton", "fused:fbgemm", "fused:torch", "reference", "torch", "torchrec")


class Step(base.Timed):
    """Steps on uncoalesced gradients."""

    prefix: ClassVar[str] = "sparse-"
    param_names: ClassVar[tuple[str, ...]] = ("optimizer", *base.Suite.param_names[1:])
    params: ClassVar[Any] = (tuple(STATE), ("sparse-zipf", "sparse-uniform"), BY)


class State(base.Timed):
    """State dicts and checkpoints."""

    params: ClassVar[Any] = (
        tuple(name for name, task in TASKS.items() if task.kind == "sparse" and not task.optimizer),
        ("sparse-zipf",),
        ("fused", "reference", "torch"),
    )
