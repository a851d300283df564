"""The devices that torch knows: those in PyTorch, and one that a package registers when it is imported."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from keyedopt.conformance.results.errors import did_you_mean
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.targets.implementation import DTYPES, TargetError

#: What to do if a device is missing.
_HINT = "`keyedopt list devices` shows those here, and `--import MODULE` imports a module that registers one"


@dataclass(frozen=True)
class Device:
    """A device that is here: its name as for ``--device``, what it is, and the dtypes that work on it."""

    name: str
    about: str
    dtypes: tuple[str, ...]


def check_device(device: str) -> None:
    """Check that torch has a device, such as ``cuda`` or ``npu:1``.

    Raises:
        TargetError: there is no such device, or it does not compute, as ``meta``, whose tensors have no data.
    """
    import torch

    try:
        found = torch.device(device)
        count = _count(found.type)
    except RuntimeError as error:
        near = did_you_mean(device, _types())
        raise TargetError(f"torch knows no device {device!r}: {_HINT}{near}") from error
    if (found.index or 0) >= count:
        here = ", ".join(f"{found.type}:{index}" for index in range(count)) or f"none of type {found.type}"
        raise TargetError(f"the device {device!r} is not here (there is {here}): {_HINT}")
    if not _computes(device, torch.float32):
        raise TargetError(f"the device {device!r} does not add numbers, so nothing can be checked on it")


def description(device: str) -> str | None:
    """Return what the module of an accelerator calls a device, such as the name of a GPU; None for others."""
    import torch

    found = torch.device(device)
    name = None if found.type == "cpu" else getattr(_module(found.type), "get_device_name", None)
    return one_line(str(name(found))) if name else None


def _types() -> list[str]:
    import torch

    return ["cpu", "cuda", "xpu", "mps", "mtia", "hpu", torch._C._get_privateuse1_backend_name()]


def devices() -> Iterator[Device]:
    """Yield the devices that are here."""
    import torch

    for kind in _types():
        for index in range(_count(kind)):
            name = f"{kind}:{index}" if kind != "cpu" else kind
            dtypes = tuple(dtype for dtype in DTYPES if _computes(name, getattr(torch, dtype)))
            yield Device(name, description(name) or "the processor", dtypes)


def _module(kind: str) -> Any:
    """Return torch's module of a type of device, or None."""
    import torch

    with contextlib.suppress(RuntimeError):  # torch's error for a type without a module
        return torch.get_device_module(kind)
    return None


def _count(kind: str) -> int:
    """Return how many devices of a type are here."""
    if kind in ("cpu", "meta"):
        return 1
    module = _module(kind)
    available = getattr(module, "is_available", None)
    return int(module.device_count()) if available and available() else 0


def _computes(device: str, dtype: Any) -> bool:
    """Return whether a device adds numbers of a dtype."""
    import torch

    try:
        return float(torch.ones(2, dtype=dtype, device=device).sum()) == 2
    except (RuntimeError, TypeError, NotImplementedError):
        return False
