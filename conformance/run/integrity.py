"""Detect that a target replaced functions that decide about its cases: of torch, Python, pytest, the suite.

The state before the import of the target is compared with the state after the import and after each case. A
target that restores what it replaced before its case ends, or that changes the memory of the process, is not
detected; conformance/TRUST.md has the table of attacks.
"""

import builtins
import inspect
import math
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

#: Functions of torch and methods of tensors that compare, reduce or read values.
TORCH = (
    *("equal", "allclose", "isclose", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge"),
    *("all", "any", "abs", "sub", "maximum", "max", "where", "as_tensor", "tensor", "log2", "exp2", "floor"),
)
TENSOR = (
    *(
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__bool__",
        "__float__",
        "__sub__",
        "__and__",
    ),
    *("__or__", "__getitem__", "equal", "allclose", "isnan", "isinf", "isfinite", "all", "any", "abs", "max"),
    *("item", "tolist", "to", "cpu", "double", "detach", "clone", "view", "reshape", "contiguous", "numel"),
    *("nan_to_num", "to_dense", "coalesce", "dtype", "shape", "layout"),
)
BUILTINS = (
    *("abs", "all", "any", "bool", "dict", "float", "getattr", "hasattr", "int", "isinstance", "issubclass"),
    *("len", "list", "max", "min", "repr", "set", "sorted", "str", "sum", "tuple", "type", "zip", "range"),
)
#: Modules of the harness and of Python whose functions and classes are compared after each case.
EVERY_CASE = ("keyedopt.conformance.suite.support.", "keyedopt.conformance.run.", "contextlib.")
#: Modules with many functions and classes, which are compared only once, after the import of the target.
AT_IMPORT = ("keyedopt.conformance.suite.", "keyedopt.conformance.results.", "_pytest.outcomes")

_Entry = tuple[Any, str, Any, Any]


def _stacked() -> int:
    """Return how many modes of torch see each operator."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


class Integrity:
    """The functions as they are now, before the target is imported."""

    def __init__(self) -> None:
        self._quick: list[_Entry] = [
            *_entries(torch, TORCH),
            *_entries(torch.Tensor, TENSOR),
            *_entries(builtins, BUILTINS),
            *_entries(math, ("isnan", "isinf", "isfinite", "isclose", "fsum")),
            *_entries(pytest, ("skip", "fail", "raises")),
            *_entries(type(pytest.raises(KeyError)), ("__enter__", "__exit__")),
            *_entries(warnings.catch_warnings, ("__enter__", "__exit__")),
            *_modules(EVERY_CASE),
        ]
        self._more = list(_modules(AT_IMPORT))
        self._answer, self._modes = vars(torch.Tensor)["__torch_function__"], _stacked()

    def changed(self, everything: bool = False) -> str:
        """Return the name of a function that was replaced or answers wrongly, or an empty string.

        Args:
            everything: whether the target has just been imported: then modules with many functions are
                compared too.
        """
        for owner, name, value, code in (*self._quick, *self._more) if everything else self._quick:
            found = getattr(owner, name, None)
            if found is not value or (code is not None and found.__code__ is not code):
                return f"{getattr(owner, '__name__', owner)}.{name}"
        if vars(torch.Tensor).get("__torch_function__") is not self._answer:
            return "Tensor.__torch_function__"
        if _stacked() != self._modes:
            return "what torch runs, by a mode that was not left,"
        return "" if _answers() else "a comparison of torch, which gives a wrong answer"


def _entries(owner: Any, names: tuple[str, ...]) -> Iterator[_Entry]:
    for name in names:
        value = getattr(owner, name)
        yield owner, name, value, value.__code__ if isinstance(value, types.FunctionType) else None


def _modules(prefixes: tuple[str, ...]) -> Iterator[_Entry]:
    """Yield the functions and methods that the loaded modules define."""
    for module in [each for name, each in sys.modules.items() if f"{name}.".startswith(prefixes)]:
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value):
                yield module, name, value, value.__code__
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                yield module, name, value, None
                # torch itself wraps `step` of optimizers
                methods = [
                    key for key, each in vars(value).items() if inspect.isfunction(each) and key != "step"
                ]
                yield from _entries(value, tuple(methods))


_ONE, _TWO = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])


def _answers() -> bool:
    """Whether torch compares known tensors rightly; its operators can be replaced below Python."""
    return not (
        torch.equal(_ONE, _TWO)
        or torch.allclose(_ONE, _TWO)
        or (_ONE == _TWO).all()
        or _TWO.isnan().tolist() != [False, True]
        or _ONE.tolist() != [1.0, 2.0]
    )
