"""Dense parameters: the step of each optimizer and wrapper, and their state."""

from typing import Any, ClassVar

from keyedopt.benchmarks.asv_base import OnHost, Suite
from keyedopt.benchmarks.tasks import TASKS

BY = ("fused", "reference", "torch", "torchrec")
DENSE = tuple(name for name, task in TASKS.items() if task.kind == "dense")
#: Steps move every number; what is done to state costs by the parameter.
STEPS = tuple(name for name in DENSE if name.startswith(("step", "clip", "in_backward")))
STATES = tuple(name for name in DENSE if name not in STEPS)
MANY = ("state", "init_state", "state_dict-keyed", "load_state_dict-keyed", "save-keyed", "load-keyed")


class Step(Suite):
    """Steps."""

    params: ClassVar[Any] = (STEPS, ("tower-24m",), BY)
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()


class State(Suite):
    """State dicts, checkpoints."""

    params: ClassVar[Any] = (STATES, ("1k-parameters",), BY)
    unit: ClassVar[str] = "seconds"

    def track_seconds(self, *_: str) -> Any:
        """Return the seconds of each run."""
        return self._samples()


class Many(State):
    """The same of ten times as many parameters, with one optimizer."""

    params: ClassVar[Any] = (MANY, ("10k-parameters",), BY)


class Memory(OnHost):
    """The peak of the host, parameters and their making included."""

    params: ClassVar[Any] = (("clip-adam", "step-adam", "state"), ("tower-24m",), BY)

    def peakmem_step(self, *_: str) -> None:
        """Run once."""
        self.job.prepare()
        self.job.run()
