"""Detect a target that replaced functions of torch or Python, or that left a mode of torch active.

The functions are noted before the target is imported, and compared after the import and after each case. That
detects accidents, such as a library that patches torch; conformance/TRUST.md says what it does not detect.
"""

import builtins
import contextlib
import math
import warnings
from typing import Any

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
MATH = ("isnan", "isinf", "isfinite", "isclose", "fsum")
#: Context managers, which could swallow the error of a case.
CONTEXTS = (contextlib.nullcontext, contextlib._GeneratorContextManager, warnings.catch_warnings)


def _stacked() -> int:
    """Return how many modes of torch see each operator."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


class Integrity:
    """The functions as they are now, before the target is imported."""

    def __init__(self) -> None:
        listed: list[tuple[Any, tuple[str, ...]]] = [(kind, ("__enter__", "__exit__")) for kind in CONTEXTS]
        listed += [(torch, TORCH), (torch.Tensor, TENSOR), (builtins, BUILTINS), (math, MATH)]
        self._before = [(owner, name, getattr(owner, name)) for owner, names in listed for name in names]
        self._answer, self._modes = vars(torch.Tensor)["__torch_function__"], _stacked()

    def changed(self) -> str:
        """Return the name of a function that was replaced or answers wrongly, or an empty string."""
        for owner, name, value in self._before:
            if getattr(owner, name, None) is not value:
                return f"{owner.__name__}.{name}"
        if vars(torch.Tensor).get("__torch_function__") is not self._answer:
            return "Tensor.__torch_function__"
        if _stacked() != self._modes:
            return "what torch runs, by a mode that was not left,"
        return "" if _answers() else "a comparison of torch, which gives a wrong answer"


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
