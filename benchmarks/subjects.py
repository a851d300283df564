"""Implementations for asv and pytest-benchmark: by import alone, so that old commits can be measured.

==================  ====================================================================================
name                what it is
==================  ====================================================================================
`fused`             `keyedopt.fused`, as it chooses by itself
`fused:BACKEND`     the same with one of its backends
`reference`         `keyedopt.reference`
`torch`, `fbgemm`,  peers in their own way, see `keyedopt.benchmarks.peers`; torchrec's tables have
`torchrec`          FBGEMM inside
==================  ====================================================================================
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from keyedopt.benchmarks import timing
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, NotOffered, make
from keyedopt.benchmarks.timing import Budget, Job
from keyedopt.benchmarks.workloads import Workload

#: Where the public names of an implementation are.
MODULES: dict[str, tuple[str, ...]] = {
    "fused": ("keyedopt.fused",),
    "reference": ("keyedopt.reference",),
    "torch": ("torch.optim",),
    "fbgemm": ("keyedopt.conformance.targets.adapters.fbgemm",),
    # without torchrec.optim.optimizers, where names stand for algorithms that do not run
    "torchrec": tuple(
        f"torchrec.optim.{part}"
        for part in (
            *("keyed", "clipping", "warmup", "semi_sync", "rowwise_adagrad"),
            "apply_optimizer_in_backward",
        )
    ),
}
BACKENDS = ("native", "triton", "fbgemm", "torch")
#: All of them.
SUBJECTS = (
    "fused",
    *(f"fused:{backend}" for backend in BACKENDS),
    "reference",
    "torch",
    "fbgemm",
    "torchrec",
)
#: In the environment, the backend that fused tries first.
PREFERRED = "KEYEDOPT_BACKEND"


class Names:
    """The public names of some modules.

    >>> Names("torch.optim").has("Adam"), Names("torch.optim").has("LAMB")
    (True, False)

    Raises:
        NotOffered: one of them is not there.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = []
        for module in modules:
            try:
                self._modules.append(importlib.import_module(module))
            except ImportError as error:
                raise NotOffered(f"no {module}: {error}") from error

    def has(self, name: str) -> bool:
        """Whether there is a name."""
        return any(hasattr(module, name) for module in self._modules)

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"no {name}")


def job_of(subject: str, task: str, work: Workload, device: str) -> Job:
    """Make the job of an implementation.

    Raises:
        NotOffered: it, its backend, the device, or a public name that the task needs is not there.
    """
    if subject not in SUBJECTS:
        raise NotOffered(f"no {subject}: there are {', '.join(SUBJECTS)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise NotOffered("no CUDA here")
    name, _, backend = subject.partition(":")
    surface = Names(*MODULES[name])
    maker = OWN_WAY.get(name, make)
    if not backend:
        return maker(surface, TASKS[task], work, device)
    _check(backend)
    with _preferring(backend):
        made = maker(surface, TASKS[task], work, device)
    run, results, prepare = (_with(backend, part) for part in (made.run, made.results, made.prepare))
    return Job(run, results, prepare, made.less and _with(backend, made.less))


def _check(backend: str) -> None:
    """Refuse a backend that cannot run here, or of a commit that cannot be told which one to take."""
    try:
        backends = importlib.import_module("keyedopt.fused.backends")
        missing = backends.available()[backend]
    except (ImportError, AttributeError, KeyError) as error:
        raise NotOffered(f"no backend {backend}: {error!r}") from error
    if missing:
        raise NotOffered(f"no backend {backend}: {missing}")
    if getattr(backends, "PREFERRED", None) != PREFERRED:
        raise NotOffered(f"no choice of backends by {PREFERRED}")


@contextmanager
def _preferring(backend: str) -> Iterator[None]:
    before = os.environ.get(PREFERRED)
    os.environ[PREFERRED] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[PREFERRED]
        else:
            os.environ[PREFERRED] = before


def _with(backend: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with _preferring(backend):
            return call()

    return run


def samples(job: Job, device: str, budget: Budget) -> list[float]:
    """Return the seconds of each run of a job, after it has become warm; its state is restored in between."""
    clock = timing.clock_of(device)
    timing.warm_up(clock, job, budget.warmup)
    first, second = timing.measure(clock, job, job, budget)
    return first + second


def nothing_changed(job: Job) -> bool:
    """Run a job once, and tell whether its results are as they were: then it measures nothing."""
    before: dict[str, Tensor] = {name: value.clone() for name, value in job.results().items()}
    job.prepare()
    job.run()
    after = job.results()
    return all(torch.equal(value, after[name]) for name, value in before.items())
