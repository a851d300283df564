"""Embedding tables: each optimizer, each shape of tables, each backend."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv_base import OnHost, Suite
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.workloads import STATE

SHAPES = ("8x200k-zipf", "8x200k-uniform", "small-step")
BY = ("fused:native", "fused:triton", "fused:torch", "reference", "torch", "fbgemm")
#: Tasks of tables that are not a forward, a backward and an update by one of the optimizers.
OTHERS = tuple(
    name for name, task in TASKS.items() if task.kind == "lookups" and task.part not in ("train", "backward")
)


class Train(Suite):
    """Forward, backward and update."""

    prefix: ClassVar[str] = "train-"
    param_names: ClassVar[tuple[str, ...]] = ("optimizer", *Suite.param_names[1:])
    params: ClassVar[Any] = (tuple(STATE), SHAPES, BY)

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()

    track_seconds.unit = "seconds"  # type: ignore[attr-defined]

    def track_throughput(self, *_: str) -> float:
        """Return GB/s."""
        return self._throughput()

    track_throughput.unit = "GB/s"  # type: ignore[attr-defined]

    def track_device_memory(self, *_: str) -> int:
        """Return bytes."""
        return self._device_memory()

    track_device_memory.unit = "bytes"  # type: ignore[attr-defined]


class Backward(Suite):
    """Backward and update."""

    prefix: ClassVar[str] = "backward-"
    param_names: ClassVar[tuple[str, ...]] = Train.param_names
    params: ClassVar[Any] = Train.params
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()


class Others(Suite):
    """What else is done with tables: lookups alone, clipping, schedules, windows, state, checkpoints."""

    params: ClassVar[Any] = (OTHERS, ("8x200k-zipf", "small-step"), BY[:4])
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()


class Memory(OnHost):
    """The peak of the host, tables and their making included."""

    prefix: ClassVar[str] = "train-"
    param_names: ClassVar[tuple[str, ...]] = Train.param_names
    params: ClassVar[Any] = (tuple(STATE), SHAPES[:1], ("fused:native", "fused:torch", "reference", "torch"))

    def peakmem_train(self, *_: str) -> None:
        """Run once."""
        self.job.prepare()
        self.job.run()
