"""Embedding tables: each optimizer, several shapes of tables, each backend."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv import base
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.workloads import STATE

SHAPES = ("8x200k-zipf", "500-tiny-tables", "small-step")
#: The first value of each parameter is what asv's page shows first: a series that is always measured.
OPTIMIZERS = ("rowwise_adagrad", *(name for name in STATE if name != "rowwise_adagrad"))
OURS = ("fused:native", "fused:triton", "fused:fbgemm", "fused:torch", "reference")
BY = (*OURS, "torch", "fbgemm", "torchrec")
#: Tasks of tables other than `train-*` and `backward-*`.
OTHERS = tuple(
    name for name, task in TASKS.items() if task.kind == "lookups" and task.part not in ("train", "backward")
)
#: Those of them that are also measured with large tables.
LARGE = ("forward", *(name for name in OTHERS if name.endswith("rowwise_adagrad") and "partial" not in name))
#: The parameters of suites whose first parameter is an optimizer.
BY_OPTIMIZER = ("optimizer", *base.Suite.param_names[1:])


class Train(base.Timed):
    """Forward, backward and update."""

    prefix: ClassVar[str] = "train-"
    param_names: ClassVar[tuple[str, ...]] = BY_OPTIMIZER
    params: ClassVar[Any] = (OPTIMIZERS, SHAPES, BY)

    def track_throughput(self, *_: str) -> float:
        """Return GB/s; for reading only, because asv takes a smaller value for a better one."""
        return base.throughput(self)

    track_throughput.unit = "GB/s"  # type: ignore[attr-defined]


class TrainJoined(base.Timed):
    """Forward, backward and update in the form of torchrec's models: one input, one output, one gradient."""

    prefix: ClassVar[str] = "train_joined-"
    param_names: ClassVar[tuple[str, ...]] = BY_OPTIMIZER
    params: ClassVar[Any] = (OPTIMIZERS, (*SHAPES, "26-tables", "100-tables"), BY)


class Backward(base.Timed):
    """Backward and update."""

    prefix: ClassVar[str] = "backward-"
    param_names: ClassVar[tuple[str, ...]] = BY_OPTIMIZER
    params: ClassVar[Any] = (OPTIMIZERS, ("8x200k-zipf", "small-step"), BY)


class Others(base.Timed):
    """Lookups only, clipping, schedules, accumulation windows, state, checkpoints."""

    params: ClassVar[Any] = (OTHERS, ("small-step",), (*OURS, "torchrec"))


class Large(base.Timed):
    """The tasks of `Others` with large tables and one optimizer."""

    params: ClassVar[Any] = (LARGE, ("8x200k-zipf",), (*OURS, "torchrec"))


class Memory(base.HostMemory):
    """Peak memory of the host, including the tables."""

    prefix: ClassVar[str] = "train-"
    param_names: ClassVar[tuple[str, ...]] = BY_OPTIMIZER
    params: ClassVar[Any] = (
        OPTIMIZERS,
        SHAPES[:1],
        ("fused:native", "fused:torch", "reference", "torch", "fbgemm", "torchrec"),
    )


class DeviceMemory(base.DeviceMemory):
    """Peak memory of a GPU beyond the memory in use before a run."""

    prefix: ClassVar[str] = "train-"
    param_names: ClassVar[tuple[str, ...]] = BY_OPTIMIZER
    params: ClassVar[Any] = (OPTIMIZERS, SHAPES[:1], BY)
