"""Sparse gradients: the step of each optimizer."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv_base import Suite
from keyedopt.benchmarks.workloads import STATE


class Step(Suite):
    """Steps on gradients that are not coalesced."""

    prefix: ClassVar[str] = "sparse-"
    param_names: ClassVar[tuple[str, ...]] = ("optimizer", *Suite.param_names[1:])
    params: ClassVar[Any] = (
        tuple(STATE),
        ("sparse-zipf", "sparse-uniform"),
        ("fused:native", "fused:triton", "fused:torch", "reference", "torch"),
    )
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()
