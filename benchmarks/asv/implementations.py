"""The implementations that asv and pytest-benchmark measure, imported by module name.

Unlike `keyedopt bench`, they are measured in the process of the caller.

==================  ====================================================================================
name                implementation
==================  ====================================================================================
`fused`             `keyedopt.fused`, with the backend that it selects
`fused:BACKEND`     `keyedopt.fused` with the named backend
`reference`         `keyedopt.reference`
`torch`, `fbgemm`,  peers, see `keyedopt.benchmarks.peers`; torchrec's tables contain FBGEMM
`torchrec`
==================  ====================================================================================
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, NotOffered, make
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import Workload

#: The modules that have the public names of an implementation.
MODULES: dict[str, tuple[str, ...]] = {
    "fused": ("keyedopt.fused",),
    "reference": ("keyedopt.reference",),
    "torch": ("torch.optim",),
    "fbgemm": ("keyedopt.conformance.targets.adapters.fbgemm",),
    # without torchrec.optim.optimizers, whose classes are placeholders that do not run
    "torchrec": tuple(
        f"torchrec.optim.{part}"
        for part in (
            *("keyed", "clipping", "warmup", "semi_sync", "rowwise_adagrad"),
            "apply_optimizer_in_backward",
        )
    ),
}
BACKENDS = ("native", "triton", "fbgemm", "torch")
#: The names of all implementations.
IMPLEMENTATIONS = (
    "fused",
    *(f"fused:{backend}" for backend in BACKENDS),
    "reference",
    "torch",
    "fbgemm",
    "torchrec",
)
#: The environment variable that names the backend that `keyedopt.fused` tries first.
PREFERRED = "KEYEDOPT_BACKEND"


class Names:
    """The public names of several modules.

    >>> Names("torch.optim").has("Adam"), Names("torch.optim").has("LAMB")
    (True, False)

    Raises:
        NotOffered: a module cannot be imported.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = []
        for module in modules:
            try:
                self._modules.append(importlib.import_module(module))
            except ImportError as error:
                raise NotOffered(f"no {module}: {error}") from error

    def has(self, name: str) -> bool:
        """Return whether a module has a name."""
        return any(hasattr(module, name) for module in self._modules)

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"no {name}")


def job_of(implementation: str, task: str, work: Workload, device: str) -> Job:
    """Return the job of an implementation.

    Raises:
        NotOffered: the implementation, its backend, the device or a public name is missing.
    """
    if implementation not in IMPLEMENTATIONS:
        raise NotOffered(f"no {implementation}: give one of {', '.join(IMPLEMENTATIONS)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise NotOffered("no CUDA here")
    name, _, backend = implementation.partition(":")
    surface = Names(*MODULES[name])
    maker = OWN_WAY.get(name, make)
    if not backend:
        return maker(surface, TASKS[task], work, device)
    _check(backend)
    with _preferring(backend):
        _ran()
        tried = maker(surface, TASKS[task], work, device)
        tried.prepare()
        tried.run()
        others = [name for name in _ran() if name != backend]
        if others:
            raise NotOffered(f"not by {backend}: {', '.join(others)} ran")
        del tried  # frees its tables
        made = maker(surface, TASKS[task], work, device)  # a job that has not run
    run, results, prepare = (_with(backend, part) for part in (made.run, made.results, made.prepare))
    return Job(run, results, prepare, made.less and _with(backend, made.less))


def _check(backend: str) -> None:
    """Raise NotOffered if a backend cannot run here, or if the commit does not read `PREFERRED`."""
    try:
        backends = importlib.import_module("keyedopt.fused.backends")
        missing = backends.available()[backend]
    except (ImportError, AttributeError, KeyError) as error:
        raise NotOffered(f"no backend {backend}: {error!r}") from error
    if missing:
        raise NotOffered(f"no backend {backend}: {missing}")
    if getattr(backends, "PREFERRED", None) != PREFERRED:
        raise NotOffered(f"no selection of backends by {PREFERRED}")


def _ran() -> tuple[str, ...]:
    """Return the backends that ran since the last call; none if the commit cannot tell."""
    return tuple(getattr(importlib.import_module("keyedopt.fused.backends"), "ran", tuple)())


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


def nothing_changed(job: Job) -> bool:
    """Run a job once, and return whether its results are unchanged; timing such a job means nothing."""
    before: dict[str, Tensor] = {name: value.clone() for name, value in job.results().items()}
    job.prepare()
    job.run()
    after = job.results()
    return all(torch.equal(value, after[name]) for name, value in before.items())
