"""Decide whether a class can be what its name says: by its bases and by the arguments that it requires."""

import inspect
from collections.abc import Iterable
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.suite.support.described import OTHER

#: The areas of keyed optimizers, and all of which every class but the companions is an optimizer.
OF_KEYED = ("keyed", "combined", "wrapper", "clipping", "warmup", "semi_sync")
OF_OPTIMIZERS = (*OF_KEYED, "fault_tolerance", "algorithms", "accumulate", "sparse")
#: What a library of keyed optimizers has: beside one of them, a class of another base is a defect.
KEYED = ("KeyedOptimizer", "KeyedOptimizerWrapper")
#: How many arguments the constructor of an optimizer requires, if it is more than one.
REQUIRED = {
    "KeyedOptimizer": 3,
    "KeyedOptimizerWrapper": 2,
    "WarmupOptimizer": 2,
    "FaultTolerantOptimizer": 2,
    "SemisyncOptimizer": 3,
}
#: What to do if a class is not what its name says.
CLAIM = "To have it judged, say in an adapter what it is (`keyedopt init-adapter`)"


def another_meaning(
    name: str, kind: Any, options: Iterable[str] = ("lr",), beside: Iterable[Any] = ()
) -> str:
    """Return why a class or a factory function cannot be what its public name says, or an empty string.

    Args:
        name: a public name.
        kind: what a library has under that name.
        options: the options that each construction may pass.
        beside: what the library has under the names in `KEYED`.
    """
    import torch  # not before a target is loaded

    areas = [area for area in map(spec.areas().__getitem__, OF_OPTIMIZERS) if name in area.names]
    if not areas or name in areas[0].companions or not callable(kind):
        return ""
    if areas[0].name in OF_KEYED and any(
        isinstance(one, type) and not another_meaning(KEYED[0], one, ()) for one in beside
    ):
        return ""
    if isinstance(kind, type) and not issubclass(kind, torch.optim.Optimizer):
        if areas[0].name != "algorithms":
            return "does not extend torch.optim.Optimizer"
        if not callable(getattr(kind, "step", None)):
            return "has no method step"
    if name == OTHER and isinstance(kind, type) and _requires_closure(kind):
        return "has a step that requires a closure"
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # a class of C shows none
        return ""
    given = {option: None for option in options if option in signature.parameters}
    try:
        signature.bind(*[None] * REQUIRED.get(name, 1), **given)
    except TypeError as error:
        return f"has the arguments {signature}: {error}"
    return ""


def _requires_closure(kind: type) -> bool:
    """Return whether `step` of a class cannot be called without a closure, such as that of LBFGS."""
    step = inspect.signature(kind.step)  # type: ignore[attr-defined]
    taken = list(step.parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(one.default is one.empty and one.kind not in variable for one in taken)
