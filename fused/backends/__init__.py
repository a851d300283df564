"""The ways to do an update, by name, and which one is chosen.

==========  =============================================================================================
name        what it is
==========  =============================================================================================
`native`    C++ kernels for the CPU, built when keyedopt is installed
`triton`    own kernels for CUDA
`fbgemm`    FBGEMM's table-batched embeddings, where they do what is asked
`torch`     vectorized torch, on every device and for everything
==========  =============================================================================================
"""

import importlib
import os
from collections.abc import Sequence
from functools import cache

import torch

from keyedopt.fused.backends.interface import Backend, Step, Table

#: Where each backend is, and the extra of keyedopt that has what it needs; of FBGEMM that of torch's build.
BACKENDS = {
    "native": ("keyedopt.fused.backends.native", "NativeBackend", ""),
    "triton": ("keyedopt.fused.backends.triton", "TritonBackend", "cuda"),
    "fbgemm": ("keyedopt.fused.backends.fbgemm", "FbgemmBackend", "cuda" if torch.version.cuda else "cpu"),
    "torch": ("keyedopt.fused.backends.torch", "TorchBackend", ""),
}
#: Which are tried for a device, one after the other; FBGEMM never by itself, for it is slower on each.
ORDER = {"cuda": ("triton", "torch"), "cpu": ("native", "torch")}
#: In the environment, the backend that ``"auto"`` tries first: to check or to measure one of them.
PREFERRED = "KEYEDOPT_BACKEND"
#: Which read no memory by values and offsets that they have not checked themselves: with a ValueError, but on
#: CUDA by an alarm that stops every update, see `check`.
CHECKING = ("native", "triton")
#: Which take the count of steps as a number of the host, wherever the tables are.
COUNTING_ON_HOST = ("fbgemm",)
#: Which count steps on CUDA themselves, unless an alarm was raised, see `check`.
COUNTING_ITSELF = ("triton",)

__all__ = [
    "BACKENDS",
    "CHECKING",
    "COUNTING_ITSELF",
    "COUNTING_ON_HOST",
    "PREFERRED",
    "available",
    "check",
    "check_name",
    "choose",
    "counts_itself",
    "first",
    "get",
]


class MissingBackend:
    """Stands for a backend that this machine or this installation does not have."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    def missing(self) -> str:
        """Return why it is not there."""
        return self._why


@cache
def _load(name: str) -> Backend | MissingBackend:
    module, attribute, extra = BACKENDS[name]
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)()
        why = backend.missing()
    except (ImportError, AttributeError, OSError) as error:
        why = f"{error}"
    if why:
        advice = f"pip install 'keyedopt[{extra}]'" if extra else ""
        return MissingBackend(name, why if not advice or advice in why else f"{why}; {advice}")
    return backend


def available() -> dict[str, str]:
    """Return every backend, with the reason why it cannot run here, empty for those that can.

    >>> available()["torch"]
    ''
    """
    return {name: _load(name).missing() for name in BACKENDS}


def check_name(name: str) -> None:
    """Refuse the name of a backend that is not known, or not there.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: it is missing here; the message says what to install.
    """
    if name == "auto":
        return
    if name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {list(BACKENDS)}, not {name!r}")
    why = _load(name).missing()
    if why:
        raise RuntimeError(f"backend {name!r} is not available here: {why}")


def get(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        ValueError: there is no such backend.
        RuntimeError: it is missing here; the message says what to install.
    """
    if name == "auto":
        raise ValueError(f"backend must be one of {list(BACKENDS)}; 'auto' is chosen for tables")
    check_name(name)
    backend = _load(name)
    assert not isinstance(backend, MissingBackend)  # which `check_name` refuses
    return backend


def first(device: torch.device) -> Backend | None:
    """Return the backend that ``"auto"`` tries first for a device; None where it is missing or unknown."""
    preferred = os.environ.get(PREFERRED)
    names = (preferred,) if preferred else ORDER.get(device.type, ())
    backend = _load(names[0]) if names and names[0] in BACKENDS else None
    return None if isinstance(backend, MissingBackend) else backend


def check(backend: Backend, device: torch.device) -> None:
    """Wait for the device, where this backend finds bad lookups there later, and raise what was wrong.

    Raises:
        ValueError: says what was wrong since the last time; nothing was written since.
    """
    waits = getattr(backend, "check", None)
    if waits is not None:
        waits(device)


def counts_itself(backend: Backend, device: torch.device) -> bool:
    """Whether an update counts the steps, see `Step.counters`."""
    return device.type != "cpu" and backend.name in COUNTING_ITSELF


def choose(backend: str, tables: Sequence[Table], step: Step) -> Backend:
    """Return the backend for some tables of one device and dtype, and a step.

    Args:
        backend: its name, or ``"auto"`` for the first of `ORDER` that can do it, after that which the
            environment variable `PREFERRED` names.
        tables: at least one.
        step: the algorithm with its options.

    Raises:
        ValueError: there is no such backend, or it cannot do this; the message says why.
        RuntimeError: it is missing here; the message says what to install.
    """
    if backend != "auto":
        chosen = get(backend)
        why = chosen.refuses(tables, step)
        if why:
            raise ValueError(f"backend {backend!r} cannot do this: {why}")
        return chosen
    order = ORDER.get(tables[0].weight.device.type, ())
    preferred = os.environ.get(PREFERRED)
    if preferred:
        check_name(preferred)
        order = (preferred, *order)
    for name in order:
        candidate = _load(name)
        if not isinstance(candidate, MissingBackend) and not candidate.refuses(tables, step):
            return candidate
    return get("torch")
