"""What is under test: any object, or package, that has the public names of the surface.

A target is written as a registered name (``torchrec``), a package or module (``acme.optim``), or an
attribute of one (``acme.compat:OPTIMIZERS``). A vendor who has more to say registers an
`Implementation` under the entry-point group ``keyedopt.implementations``::

    # acme/conformance.py
    from keyedopt.conformance.implementation import Implementation

    acme = Implementation(
        name="acme",
        root="acme.optim",
        names={"GradientClippingOptimizer": "acme.norms:ClippedOptimizer"},
        areas=("keyed", "clipping"),
        dtypes=("float32", "bfloat16"),
        distributions=("acme-optim",),
        install="pip install acme-optim",
    )

    # pyproject.toml
    [project.entry-points."keyedopt.implementations"]
    acme = "acme.conformance:acme"

Then ``keyedopt check acme`` knows it.
"""

import fnmatch
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from keyedopt.conformance import spec

GROUP = "keyedopt.implementations"


class TargetError(Exception):
    """A target that cannot be found, imported or built; the message says what to do."""


class MissingName(AttributeError):  # noqa: N818 - read as "fails: missing name"
    """A public name that an implementation does not have."""


@dataclass(frozen=True)
class Implementation:
    """An implementation of the surface, and what it says about itself.

    Args:
        name: short name, as ``keyedopt check`` shows it.
        root: where the public names live: a dotted module or package (its submodules are searched
            too), ``module:attribute``, or the object itself.
        names: public name -> ``module:attribute``, for names that live elsewhere, or are called
            otherwise, or that the target borrows from another library without claiming them.
        areas: the areas it claims (see ``keyedopt list areas``). A claimed name that is missing
            fails; an area that is not claimed is reported as unsupported. None claims every area of
            which at least one name is there.
        placeholders: names that exist but are not meant to run; they count as missing and are not
            claimed.
        absent: names, of classes or of what they take (``"LAMB"``, ``"Adam.decay"``, ``"*.rows"``; shell
            patterns), that it does not claim in an area that it does: the cases that need one are
            unsupported.
        devices, dtypes: what it supports; the default of ``--device`` and ``--dtype``.
        factories: builders of what the surface has no name for (an embedding module, say), by name;
            each a callable or ``module:attribute``.
        variants: which variant of a formula it documents, by algorithm, where several are in use.
        distributions: the installed distributions whose versions identify it; the first one's is
            the version that is shown.
        install: how to install it, shown where it is missing.
    """

    name: str
    root: Any
    names: Mapping[str, str] = field(default_factory=dict)
    areas: tuple[str, ...] | None = None
    placeholders: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
    factories: Mapping[str, Callable[..., Any] | str] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    distributions: tuple[str, ...] = ()
    install: str = ""

    def lacks(self, name: str) -> bool:
        """Whether the implementation does not claim a name: itself, or the class it belongs to."""
        owner = name.partition(".")[0]
        unclaimed = (*self.absent, *self.placeholders)
        return any(fnmatch.fnmatchcase(part, pattern) for part in (name, owner) for pattern in unclaimed)

    def surface(self) -> "Surface":
        """Import the target and return its public names as attributes of one object."""
        return Surface(self)


class Surface:
    """The public names of an implementation, found where it keeps them."""

    def __init__(self, implementation: Implementation) -> None:
        self._implementation = implementation
        root = implementation.root
        self._root = load(root) if isinstance(root, str) else root
        self._found: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Any:
        implementation = self._implementation
        if name in implementation.placeholders:
            raise MissingName(f"{implementation.name} has {name} only as a placeholder")
        if implementation.lacks(name):
            raise MissingName(f"{implementation.name} does not claim {name}")
        if name in implementation.names:
            return load(implementation.names[name])
        for place in self._places(name):
            if hasattr(place, name) and not isinstance(getattr(place, name), ModuleType):
                return getattr(place, name)
        raise MissingName(f"{implementation.name} has no {name}")

    def _places(self, name: str) -> Iterator[Any]:
        """Where a name may live: on the root, in the usual submodule, in any other submodule."""
        yield self._root
        if not hasattr(self._root, "__path__"):
            return
        usual = [module for area in spec.areas().values() if name in area.names for module in area.modules]
        present = [item.name for item in pkgutil.iter_modules(self._root.__path__)]
        for module in [*usual, *(item for item in present if item not in usual)]:
            if module in present and not module.startswith(("_", "test")):
                yield importlib.import_module(f"{self._root.__name__}.{module}")

    def has(self, name: str) -> bool:
        """Whether the implementation has a public name."""
        try:
            getattr(self, name)
        except MissingName:
            return False
        return True

    def claimed(self) -> tuple[str, ...]:
        """Return the areas that the implementation claims."""
        stated = self._implementation.areas
        return tuple(
            area.name
            for area in spec.areas().values()
            if (area.name in stated if stated is not None else any(map(self.has, area.names)))
        )


def load(place: str) -> Any:
    """Import ``module`` or ``module:attribute``."""
    module, _, attribute = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise TargetError(f"there is no module {module!r} in this environment") from error
        raise TargetError(
            f"{module!r} needs {error.name!r}, which is not installed in this environment"
        ) from error
    except Exception as error:
        text = " ".join(str(error).split())
        raise TargetError(f"{module!r} cannot be imported: {type(error).__name__}: {text}") from error
    for part in attribute.split(".") if attribute else ():
        if not hasattr(found, part):
            raise TargetError(f"{module!r} has no attribute {attribute!r}")
        found = getattr(found, part)
    return found


def registered() -> Mapping[str, importlib.metadata.EntryPoint]:
    """Return the entry points of the implementations that are registered, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def find(target: str) -> Implementation:
    """Return the implementation that a target names; imports what is needed to know.

    Raises:
        TargetError: nothing of that name, or it cannot be imported.
    """
    known = registered()
    if target in known:
        found = load(known[target].value)
        if not isinstance(found, Implementation):
            raise TargetError(
                f"the entry point {target!r} gives a {type(found).__name__}, "
                "not a keyedopt.conformance.implementation.Implementation"
            )
        return found
    if not all(part.isidentifier() for part in target.replace(":", ".").split(".")):
        raise TargetError(
            f"{target!r} is not a target: give one of {', '.join(sorted(known))}, "
            "a package.module, or package.module:attribute"
        )
    try:
        found = load(target)
    except TargetError as error:
        names = ", ".join(sorted(known))
        raise TargetError(f"{error}; install it, or name one of: {names}") from error
    return found if isinstance(found, Implementation) else Implementation(name=target, root=target)
