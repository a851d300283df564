"""Embedding tables: each optimizer, each shape of tables, each backend."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv_base import OnDevice, OnHost, Suite
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.workloads import STATE

SHAPES = ("8x200k-zipf", "500-tiny-tables", "small-step")
OURS = ("fused:native", "fused:triton", "fused:fbgemm", "fused:torch", "reference")
BY = (*OURS, "torch", "fbgemm", "torchrec")
#: Tasks of tables that are not a forward, a backward and an update by one of the optimizers.
OTHERS = tuple(
    name for name, task in TASKS.items() if task.kind == "lookups" and task.part not in ("train", "backward")
)
#: Those of them that are measured with large tables, too.
LARGE = ("forward", *(name for name in OTHERS if name.endswith("rowwise_adagrad") and "partial" not in name))


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


class Backward(Suite):
    """Backward and update."""

    prefix: ClassVar[str] = "backward-"
    param_names: ClassVar[tuple[str, ...]] = Train.param_names
    params: ClassVar[Any] = (tuple(STATE), ("8x200k-zipf", "small-step"), BY)
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()


class Others(Suite):
    """What else is done with tables: lookups alone, clipping, schedules, windows, state, checkpoints."""

    params: ClassVar[Any] = (OTHERS, ("small-step",), (*OURS, "torchrec"))
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()


class Large(Others):
    """The same of large tables, with one optimizer."""

    params: ClassVar[Any] = (LARGE, ("8x200k-zipf",), (*OURS, "torchrec"))


class Memory(OnHost):
    """The peak of the host, tables and their making included."""

    prefix: ClassVar[str] = "train-"
    param_names: ClassVar[tuple[str, ...]] = Train.param_names
    params: ClassVar[Any] = (
        tuple(STATE),
        SHAPES[:1],
        ("fused:native", "fused:torch", "reference", "torch", "fbgemm", "torchrec"),
    )

    def peakmem_train(self, *_: str) -> None:
        """Run once."""
        self.job.prepare()
        self.job.run()


class DeviceMemory(OnDevice):
    """The peak of a GPU, beside what is there before a run."""

    prefix: ClassVar[str] = "train-"
    param_names: ClassVar[tuple[str, ...]] = Train.param_names
    params: ClassVar[Any] = (tuple(STATE), SHAPES[:1], BY)
    unit: ClassVar[str] = "bytes"

    def track_bytes(self, *_: str) -> int:
        """Return bytes."""
        return self._device_memory()
