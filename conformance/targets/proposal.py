"""Propose an adapter for a library: classes with common names or bases, missing options, other defaults."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from keyedopt.conformance import spec
from keyedopt.conformance.suite.support.described import DEFAULTS
from keyedopt.conformance.targets.builtin import torchft, torchrec
from keyedopt.conformance.targets.implementation import TargetError, is_plain, load

#: Names under which libraries have the algorithms, the most literal first.
COMMON = {
    "SGD": ("SGD", "SGDW", "SGD32bit"),
    "Adagrad": ("Adagrad", "AdaGrad", "Adagrad32bit"),
    "RowWiseAdagrad": ("RowWiseAdagrad", "RWSAdagrad", "RowwiseAdagrad"),
    "Adam": ("Adam", "Adam8bit", "Adam32bit", "CPUAdam", "DeepSpeedCPUAdam"),
    "AdamW": ("AdamW", "AdamW8bit", "AdamW32bit"),
    "LAMB": ("LAMB", "Lamb", "LAMB32bit"),
    "LarsSGD": ("LarsSGD", "LARS", "Lars", "LARS32bit"),
}
#: Other names of options in constructors.
ALSO_CALLED = {"eta": ("trust_coefficient", "trust_coeff")}
#: Options that are not in the documented formula, with the values that leave it as it is.
NEUTRAL = {"LarsSGD": {"eps": 0.0}}
#: Options of the reference, and what cases need from other libraries.
NOT_SHOWN = (
    "decay",
    "rows",
    "bias_correction",
    "eps_placement",
    "error_if_nonfinite",
    "positional",
    "dtensor",
)


#: The areas whose classes other libraries subclass.
COMPOSING = ("keyed", "combined", "wrapper", "clipping", "warmup", "semi_sync", "fault_tolerance")


@dataclass(frozen=True)
class Proposal:
    """What an adapter says about the classes of a library, as far as signatures and bases show it."""

    areas: tuple[str, ...]
    names: dict[str, str]
    absent: tuple[str, ...]
    option_names: dict[str, str]
    fixed_options: dict[str, Any]
    defaults: dict[str, Any]
    variants: dict[str, str]
    inherits: tuple[str, ...]


def _own(kind: Any, library: str) -> bool:
    """Whether an object is a class that the library does not only borrow from torch."""
    borrowed = not library.startswith("torch.") and str(getattr(kind, "__module__", "")).startswith("torch.")
    return isinstance(kind, type) and not borrowed


def _published() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each installed library with classes of composing areas, with their public names and places."""
    for about in (torchrec, torchft):
        try:
            places = about.surface().places()
        except TargetError:
            continue
        yield about.name, {name: places[name] for name in _names(COMPOSING) if name in places}


def _names(areas: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for area in areas for name in spec.areas()[area].names)


def _classes(library: str, root: Any) -> dict[str, tuple[str, Any]]:
    """Return the classes of a library by name, each with its place; one, if the library is a class itself.

    A factory function may replace a class; its name is the attribute that the user gave.
    """
    if not isinstance(root, ModuleType) and callable(root):
        return {root.__name__ if isinstance(root, type) else library.rpartition(":")[2]: (library, root)}
    names = dict.fromkeys([*vars(root), *chain.from_iterable(COMMON.values())])
    found = {name: _attribute(root, name) for name in names}
    return {name: (f"{library}:{name}", kind) for name, kind in found.items() if _own(kind, library)}


def _attribute(module: Any, name: str) -> Any:
    """Return an attribute, or None; a module that loads some of them lazily may raise any error."""
    try:
        return getattr(module, name)
    except Exception:
        return None


def _find_algorithm(
    algorithm: str, classes: Mapping[str, tuple[str, Any]], root: Any, by_ending: bool
) -> str | None:
    """Return the name of the class to judge as an algorithm, or None.

    Classes of a module are found by their names. A class that was given itself may have any name; its
    bases decide then; with `by_ending`, the end of its name decides if no base does.
    """
    if isinstance(root, type) and not any(root.__name__ in common for common in COMMON.values()):
        nearest = next((base.__name__ for base in root.__mro__ if base.__name__ in DEFAULTS), None)
        if nearest is None and by_ending:
            nearest = _ending(root.__name__)
        return root.__name__ if nearest == algorithm else None
    return next((name for name in COMMON.get(algorithm, (algorithm,)) if name in classes), None)


def _ending(name: str) -> str | None:
    """Return the algorithm whose common name is the last words of a name in camel case, or None.

    >>> _ending("AnyPrecisionAdamW"), _ending("NAdam")
    ('AdamW', None)
    """
    for algorithm, common in COMMON.items():
        if any(name.endswith(end) and name.removesuffix(end)[-1:].islower() for end in common):
            return algorithm
    return None


def _subclasses(
    classes: Mapping[str, tuple[str, Any]], root: Any
) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """Return the classes of a library that subclass published ones, the published ones, and whose they are.

    The class of a public name is the first one whose nearest published base has that name. A published class
    that a module only imports is not its own; one that was given itself is meant.
    """
    own: dict[str, str] = {}
    beside: dict[str, str] = {}
    owners: dict[str, None] = {}
    for owner, places in _published():
        bases = {load(place): name for name, place in places.items()}
        for place, kind in classes.values():
            if kind is root or kind not in bases:
                nearest = next((bases[base] for base in getattr(kind, "__mro__", ()) if base in bases), None)
                if nearest:
                    own.setdefault(nearest, place)
                    beside |= places
                    owners[owner] = None
    return own, beside, tuple(owners)


def _claimed(names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(area for area in COMPOSING if set(names) & set(spec.areas()[area].names))


def optimizers(library: str) -> list[str]:
    """Return the places of all optimizers that a library defines, whatever their names.

    Raises:
        TargetError: the library cannot be imported.
    """
    classes = _classes(library, load(library)).values()
    kinds = [(place, kind) for place, kind in classes if isinstance(kind, type)]
    return [place for place, kind in kinds if issubclass(kind, torch.optim.Optimizer)]


def propose(library: str, by_ending: bool = False) -> Proposal:
    """Import a library, or one class (``module:Class``), and read the signatures of its classes.

    Args:
        library: a module, or one class.
        by_ending: whether the end of the name of one class may decide which algorithm it is. That is a guess:
            a class of another algorithm may be named so.

    Raises:
        TargetError: the library cannot be imported.
    """
    root = load(library)
    classes = _classes(library, root)
    own, beside, owners = _subclasses(classes, root)
    names: dict[str, str] = {}
    absent, renamed, fixed, defaults, variants = [], {}, {}, {}, {}
    for algorithm, options in DEFAULTS.items():
        chosen = _find_algorithm(algorithm, classes, root, by_ending)
        if chosen is None:
            absent.append(algorithm)
            continue
        names[algorithm], kind = classes[chosen]
        if "SGDW" in chosen:
            variants[algorithm] = "decoupled"
        takes = inspect.signature(kind).parameters
        for option, documented in {"lr": 1e-3, **options}.items():
            called = next((name for name in (option, *ALSO_CALLED.get(option, ())) if name in takes), None)
            if called is None:
                absent.append(f"{algorithm}.{option}")
                continue
            if called != option:
                renamed[f"{algorithm}.{option}"] = called
            default = takes[called].default
            if not is_plain(default):  # none, or an object that stands for a required option
                fixed[f"{algorithm}.{option}"] = documented
            elif option in options and default != documented:
                defaults[f"{algorithm}.{option}"] = default
        neutral = NEUTRAL.get(algorithm, {}).items()
        fixed |= {f"{algorithm}.{option}": value for option, value in neutral if option in takes}
        absent += [f"{algorithm}.{name}" for name in ("maximize", "fused", "foreach") if name not in takes]
    absent += [f"*.{name}" for name in ("sparse", *NOT_SHOWN)]
    areas = _claimed(own)
    companions = {name for area in areas for name in spec.areas()[area].companions}
    absent += [name for name in _names(areas) if name not in {*own, *companions}]
    if names:
        areas, owners = (*areas, "algorithms"), (*owners, "torch")
    return Proposal(
        areas,
        {**beside, **names, **own},
        tuple(dict.fromkeys(absent)),
        renamed,
        fixed,
        defaults,
        variants,
        owners,
    )
