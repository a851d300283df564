"""Sparse gradients: the step of each optimizer, and SparseAdam's state."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv_base import Suite
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.workloads import STATE

BY = ("fused:native", "fused:triton", "fused:fbgemm", "fused:torch", "reference", "torch", "torchrec")


class Step(Suite):
    """Steps on gradients that are not coalesced."""

    prefix: ClassVar[str] = "sparse-"
    param_names: ClassVar[tuple[str, ...]] = ("optimizer", *Suite.param_names[1:])
    params: ClassVar[Any] = (tuple(STATE), ("sparse-zipf", "sparse-uniform"), BY)
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()


class State(Suite):
    """State dicts, checkpoints."""

    params: ClassVar[Any] = (
        tuple(name for name, task in TASKS.items() if task.kind == "sparse" and not task.optimizer),
        ("sparse-zipf",),
        ("fused", "reference", "torch"),
    )
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()
