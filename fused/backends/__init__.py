"""The backends: registered by name, and chosen for tables.

==========  =============================================================================================
name        what it is
==========  =============================================================================================
`native`    C++ kernels for the CPU, built when keyedopt is installed
`triton`    keyedopt's own kernels for CUDA
`fbgemm`    FBGEMM's table-batched embeddings, for the steps in which FBGEMM follows the specification
`torch`     vectorized torch, for every device, dtype and algorithm
==========  =============================================================================================
"""

import importlib
import os
import warnings
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from keyedopt.fused.backends.interface import Backend, Step, Table
from keyedopt.fused.backends.self_check import WrongKernelError, check_at_first_use
from keyedopt.fused.extensions import warn_if_missing


class Registered(NamedTuple):
    """Where a backend is.

    Args:
        module, attribute: of the class, which is called without arguments.
        extra: the extra of keyedopt that installs the requirements of the backend.
        devices: the device types for which ``"auto"`` tries the backend, in the order of `BACKENDS`.
    """

    module: str
    attribute: str
    extra: str = ""
    devices: tuple[str, ...] = ()


#: Every backend. ``"auto"`` never tries FBGEMM, which is slower on each device; its extra is that of torch's
#: build.
BACKENDS = {
    "native": Registered("keyedopt.fused.backends.native", "NativeBackend", devices=("cpu",)),
    "triton": Registered("keyedopt.fused.backends.triton", "TritonBackend", "cuda", devices=("cuda",)),
    "fbgemm": Registered(
        "keyedopt.fused.backends.fbgemm", "FbgemmBackend", "cuda" if torch.version.cuda else "cpu"
    ),
    "torch": Registered("keyedopt.fused.backends.torch", "TorchBackend", devices=("cpu", "cuda")),
}
#: The environment variable that names the backend that ``"auto"`` tries first.
PREFERRED = "KEYEDOPT_BACKEND"
#: The names of the backends that were chosen, see `ran`.
_RAN: dict[str, None] = {}

__all__ = [
    "BACKENDS",
    "PREFERRED",
    "Registered",
    "available",
    "check_name",
    "choose",
    "described",
    "explain",
    "first",
    "get",
    "load",
    "order",
    "ran",
]


def order(device: str) -> tuple[str, ...]:
    """Return the names of the backends that ``"auto"`` tries for a device type, without the preferred one."""
    return tuple(name for name, entry in BACKENDS.items() if device in entry.devices)


class MissingBackend:
    """A backend that cannot run on this machine, or in this installation."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    def missing(self) -> str:
        """Return why the backend cannot run."""
        return self._why


@cache
def _load(name: str) -> Backend | MissingBackend:
    module, attribute, extra, _ = BACKENDS[name]
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
    """Return every backend with the reason why it cannot run here; the reason is empty if the backend can.

    >>> available()["torch"]
    ''
    """
    return {name: _load(name).missing() for name in BACKENDS}


def check_name(name: str) -> None:
    """Check that a backend is registered and can run here; ``"auto"`` always can.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the backend cannot run here; the message says what to install.
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
        ValueError: the name is unknown.
        RuntimeError: the backend cannot run here; the message says what to install.
    """
    if name == "auto":
        raise ValueError(f"backend must be one of {list(BACKENDS)}; 'auto' names a choice, not a backend")
    check_name(name)
    backend = _load(name)
    assert not isinstance(backend, MissingBackend)  # which `check_name` refuses
    return backend


def first(device: torch.device) -> Backend | None:
    """Return the backend that ``"auto"`` tries first for a device, or None if it cannot run."""
    preferred = os.environ.get(PREFERRED)
    names = (preferred,) if preferred else order(device.type)
    backend = _load(names[0]) if names and names[0] in BACKENDS else None
    return None if isinstance(backend, MissingBackend) else backend


def load(name: str) -> Backend | str:
    """Return a backend by name, or why it cannot run here."""
    backend = _load(name)
    return backend.missing() if isinstance(backend, MissingBackend) else backend


def choose(backend: str, tables: Sequence[Table], step: Step) -> Backend:
    """Return the backend for some tables of one device and dtype, and a step.

    Args:
        backend: its name. ``"auto"`` returns the first backend that can do the step: the one that the
            environment variable `PREFERRED` names, then those of `order`, then ``"torch"``.
        tables: at least one.
        step: the algorithm with its options.

    Raises:
        ValueError: the name is unknown, or the backend cannot do the step; the message says why.
        RuntimeError: the backend cannot run here; the message says what to install.
        WrongKernelError: a kernel of the named backend is wrong on this device, see `self_check`; ``"auto"``
            warns, and takes the next backend.
    """
    if backend != "auto":
        chosen = get(backend)
        why = chosen.refuses(tables, step)
        if why:
            raise ValueError(f"backend {backend!r} cannot do this: {why}")
        wrong = check_at_first_use(chosen, tables, step)
        if wrong:
            raise WrongKernelError(wrong)
        _RAN[backend] = None
        return chosen
    names = order(tables[0].weight.device.type)
    preferred = os.environ.get(PREFERRED)
    if preferred:
        check_name(preferred)
        names = (preferred, *names)
    for name in names:
        candidate = _load(name)
        if isinstance(candidate, MissingBackend) or candidate.refuses(tables, step):
            if name == "native":
                warn_if_missing()
            continue
        wrong = check_at_first_use(candidate, tables, step)
        if not wrong:
            _RAN[name] = None
            return candidate
        warnings.warn(f"{wrong}; the next backend runs instead", RuntimeWarning, stacklevel=2)
    _RAN["torch"] = None
    return get("torch")


def described(backend: Backend) -> str:
    """Return the name of a backend and its kernels, for people."""
    kernels = backend.kernels()
    return f"backend {backend.name!r}" + (f" ({kernels})" if kernels else "")


def explain(chosen: Backend, tables: Sequence[Table], step: Step, setting: str = "backend") -> dict[str, str]:
    """Return every backend other than the chosen one, with the reason why it does not run.

    Args:
        chosen: the backend of the tables.
        tables: of one device and dtype.
        step: the algorithm with its options.
        setting: what a user sets to the name of another backend: the argument, or `PREFERRED`.

    Returns:
        The reason by name: the backend is missing, cannot do the step, or ``"auto"`` prefers the chosen one.
    """
    reasons = {}
    for name in BACKENDS:
        backend = _load(name)
        if name == chosen.name:
            continue
        if isinstance(backend, MissingBackend):
            reasons[name] = backend.missing()
        else:
            slower = f"could run; {chosen.name} is preferred ({setting}={name!r} asks for {name})"
            reasons[name] = (
                backend.refuses(tables, step) or check_at_first_use(backend, tables, step) or slower
            )
    return reasons


def ran() -> tuple[str, ...]:
    """Return the names of the backends that were chosen since the last call, in order.

    ``"auto"`` chooses another backend than the preferred one if that cannot do a step.
    """
    names = tuple(_RAN)
    _RAN.clear()
    return names
