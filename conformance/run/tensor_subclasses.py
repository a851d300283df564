"""Keep subclasses of `torch.Tensor` that the target defines from answering for their numbers in a case.

A subclass can answer a comparison itself, in ``__torch_function__``, ``__torch_dispatch__`` or a method. In
calls from the suite the operators of torch answer instead, on the numbers that a tensor holds. A case fails
if it reads a tensor that has no numbers without its ``__torch_dispatch__``. Calls from the target are not
changed, nor torch's own subclasses, such as DTensor.
"""

import inspect
import os
import sys
import types
from typing import Any

import torch
import typing_extensions

from keyedopt.conformance.run.device_seen import of_suite
from keyedopt.conformance.suite.support.assertions import Mismatch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISPATCH, _FUNCTION = "__torch_dispatch__", "__torch_function__"


def guard_subclasses(names: tuple[str, ...]) -> None:
    """Guard these attributes of each later subclass of `torch.Tensor` as soon as it is defined."""

    def begin(cls: Any, **kwargs: Any) -> None:
        super(torch.Tensor, cls).__init_subclass__(**kwargs)
        _guard(cls, names)

    torch.Tensor.__init_subclass__ = classmethod(begin)  # type: ignore[assignment, arg-type]


def _guard(cls: type, names: tuple[str, ...]) -> None:
    for name, value in list(vars(cls).items()):
        if name in (*names, _FUNCTION, _DISPATCH) and not _is_torchs(value):
            setattr(cls, name, _made(cls, name, value))


def _is_torchs(value: Any) -> bool:
    """Whether a function, or the one of a property, was defined in a file of torch."""
    function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    if getattr(getattr(function, "__code__", None), "co_filename", "") == typing_extensions.__file__:
        function = inspect.unwrap(function)  # what is deprecated, such as ShardedTensor
    if isinstance(function, types.BuiltinFunctionType):
        return True  # such as that of Parameter, which leaves everything to torch
    code = getattr(function, "__code__", None)
    return isinstance(code, types.CodeType) and code.co_filename.startswith(_TORCH)


def _asked_by_suite() -> bool:
    """Whether the suite called, directly or through torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return of_suite(frame)


def _made(cls: type, name: str, value: Any) -> Any:
    """Return what takes the place of an attribute: torch's for the suite, and the class's own for others."""
    if name not in (_FUNCTION, _DISPATCH):
        return _Method(name, value)

    def answer(kind: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _asked_by_suite():
            return value.__get__(None, kind)(func, types, args, kwargs or {})
        if name == _DISPATCH:
            raise Mismatch("tensors that torch can read", f"{cls.__qualname__}, which answers for itself")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    return classmethod(answer)


class _Method:
    """A method or property of a subclass, and torch's of the same name for the suite."""

    def __init__(self, name: str, own: Any) -> None:
        self._name, self._own = name, own

    def __get__(self, tensor: Any, kind: type) -> Any:
        if tensor is None or not _asked_by_suite():
            return self._own.__get__(tensor, kind) if hasattr(self._own, "__get__") else self._own
        with torch._C.DisableTorchFunctionSubclass():
            return getattr(torch.Tensor, self._name).__get__(tensor, kind)
