"""Observe on which device the operators of the target run while a case runs."""

import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: The frames of a case are those of these modules; what it calls itself is not the target's.
SUITE = "keyedopt.conformance.suite."


def of_suite(frame: FrameType) -> bool:
    """Whether a frame is one of the suite's, that is of a case or of what cases share."""
    return str(frame.f_globals.get("__name__", "")).startswith(SUITE)


class DeviceSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class has no types
    """A context in which `device` becomes where operators of the target ran; None if it ran none.

    An operator is the target's if a function of the target's packages called it, however deep, and no
    function of the suite in between. Once one ran on the device under test, nothing more is observed.
    One or two numbers on the CPU, such as a step count or the position of a schedule, show nothing.
    """

    def __init__(self, wanted: str, packages: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device: str | None = None
        self._found = False  # whether it is the wanted one
        self._wanted = torch.device(wanted)
        self._packages = tuple(f"{package}." for package in packages)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work inside the context."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note its device if the target called it."""
        kwargs = kwargs or {}
        written = [one for one in args[0] if not one.is_inference()] if _changes_a_list(func) else ()
        before = [tensor._version for tensor in written]
        result = func(*args, **kwargs)
        for tensor, version in zip(written, before, strict=True):
            if tensor._version == version:
                torch.autograd.graph.increment_version(tensor)
        if not self._found and self._is_targets(sys._getframe(1)):
            for tensor in _tensors((result, *args, *kwargs.values())):
                where = tensor.device
                if where.type == self._wanted.type and self._wanted.index in (None, where.index):
                    self.device, self._found = str(self._wanted), True
                    break
                if tensor.numel() > 2:
                    self.device = str(where)
        return result

    def _is_targets(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if of_suite(frame):
                return False
            if f"{frame.f_globals.get('__name__', '')}.".startswith(self._packages):
                return True
            frame = frame.f_back
        return False


@cache
def _changes_a_list(func: Any) -> bool:
    """Whether an operator changes a list of tensors in place.

    Most kernels of them call an operator for each tensor, which counts a new version of it, but not inside a
    dispatch mode.
    """
    return "::_foreach_" in func.name() and func._schema.is_mutable


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def packages_of(modules: Collection[str]) -> set[str]:
    """Return the packages whose functions are the target's: torch and keyedopt contain more than the target.

    >>> sorted(packages_of(["acme.optim.sgd", "keyedopt.reference.keyed", "torch.optim.adam"]))
    ['acme', 'keyedopt.reference', 'torch.optim']
    """
    parts = {module: module.split(".") for module in modules}
    depth = {"torch": 2, "keyedopt": 2}
    return {".".join(names[: depth.get(names[0], 1)]) for names in parts.values()}
