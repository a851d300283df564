"""The implementation under test: any object or package that has the public names of `torchrec.optim`.

A target is written as a registered name (``torchrec``), a package or module (``acme.optim``), or an
attribute of one (``acme.compat:OPTIMIZERS``). A vendor whose target needs a description registers an
`Implementation` under the entry-point group ``keyedopt.implementations``::

    # acme/conformance.py
    from keyedopt.conformance.targets.implementation import Implementation

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

Then ``keyedopt check acme`` finds it.
"""

import fnmatch
import importlib
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.golden import formulas
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.suite.support.described import MissingName, described, is_option, is_placeholder
from keyedopt.conformance.targets.meaning import KEYED, another_meaning
from keyedopt.conformance.targets.nearest import near_attribute, near_module

#: The dtypes that cases run in.
DTYPES = ("float64", "float32", "bfloat16", "float16")
#: The packages whose classes have public names; a module that only imports one of them does not claim it.
OWNERS = ("torch", "torchrec", "torchft", "fbgemm_gpu")
#: What a library may document that its optimizers do not take, by the name in `absent`.
RESTRICTIONS = {
    "closure": "step takes no closure",
    "groups": "one group of parameters",
    "tensor_rate": "the learning rate is a number",
    "any_shape": "parameters are tables",
    "sparse": "no sparse gradients",
}
#: Stands for every type of device that torch knows.
ANY_DEVICE = "*"


def is_plain(value: Any) -> bool:
    """Return whether a value can be written into an adapter, a result and a script."""
    if isinstance(value, list | tuple):
        return all(is_plain(one) for one in value)
    return value is None or isinstance(value, str | bool | int | float)


def _is_dtype(value: Any) -> bool:
    """Return whether a value is a dtype; torch may not be imported."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


class TargetError(KeyedoptError):
    """A target that cannot be found, imported or built; the message says what to do."""


class NotFoundError(TargetError):
    """The module of a target does not exist."""


@dataclass(frozen=True)
class Implementation:
    """An implementation, and its description by its vendor.

    Args:
        name: short name, as ``keyedopt check`` shows it.
        root: where the public names live: a dotted module or package (its submodules are searched
            too), ``module:attribute``, or the object itself.
        names: public name -> ``module:attribute``, for names that live elsewhere or differ, and for names
            that the target borrows from another library without claiming them. ``OtherOptimizer`` is an
            optimizer of any other formula, which is not judged.
        areas: the claimed areas (see ``keyedopt list areas``). A claimed name that is missing
            fails; an area that is not claimed is reported as unsupported. None claims every area of
            which at least one name exists that a module does not only import from one of `OWNERS`. If a
            case needs a name of another area, the name is claimed if it exists.
        placeholders: names that exist but do not work; they count as missing and are not claimed. Without
            stated areas they are recognized: their `step` only raises NotImplementedError. Nor is a class
            claimed then that cannot be what its name says, by its bases and required arguments.
        absent: classes and arguments (``"LAMB"``, ``"Adam.decay"``, ``"*.rows"``; shell patterns) of claimed
            areas that are not claimed: the cases that need one are unsupported. So are the restrictions of
            optimizers, such as ``"*.closure"``: see `RESTRICTIONS`.
        devices: the supported types of device, such as ``"cuda"``; the first one is the default of
            ``--device``. `ANY_DEVICE` stands for every type that torch knows after the imports.
        dtypes: the supported dtypes; the default of ``--dtype``.
        device_dtypes: the dtypes of a type of device, if they are others.
        imports: modules to import first, such as ``"torch_npu"``, which registers its devices with torch.
        factories: builders of objects without a public name, such as an embedding module, by name;
            each a callable or ``module:attribute``.
        option_names: names of options in the target, by documented name (``{"LARS.eta": "trust"}``; the class
            may be a shell pattern).
        fixed_options: options that each construction passes unless a case gives another value
            (``{"LarsSGD.lr": 0.1}``). Values are numbers, strings, dtypes, or tuples of numbers or strings.
        defaults: documented defaults of the target where they differ (``{"Adam.eps": 1e-6}``); that of
            zero_grad is ``"Adam.set_to_none"``.
        state_names: names of entries of the state, by documented name (``{"Adam.exp_avg": "m"}``). An empty
            name says that the state has no such entry.
        variants: documented variants of formulas by algorithm: see `keyedopt.conformance.golden.formulas`.
        distributions: the installed distributions whose versions identify the implementation; the version
            of the first one is shown.
        install: how to install it, shown if it is missing.
        compiles: whether the first step of an algorithm compiles: the smoke stage takes one step with each
            algorithm, and waits for compilers longer than for an import; so do cases.
        backends: ``module:function`` that returns the names of the backends that ran since its last call.
        backend_variable: the environment variable that asks for a backend; a case of another is unsupported.
        other_backends: values of the variable; cases on "another backend" run on one of them.
    """

    name: str
    root: Any
    names: Mapping[str, str] = field(default_factory=dict)
    areas: tuple[str, ...] | None = None
    placeholders: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "float16")
    device_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    factories: Mapping[str, Callable[..., Any] | str] = field(default_factory=dict)
    option_names: Mapping[str, str] = field(default_factory=dict)
    fixed_options: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    state_names: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)
    distributions: tuple[str, ...] = ()
    install: str = ""
    compiles: bool = False
    backends: str = ""
    backend_variable: str = ""
    other_backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the types: a string instead of a tuple of strings would give a wrong verdict."""
        for part in ("areas", "placeholders", "absent", "devices", "dtypes", "imports", "distributions"):
            value = getattr(self, part)
            if part == "areas" and value is None:
                continue
            if isinstance(value, str) or not all(isinstance(item, str) for item in value):
                raise TypeError(f"{part} of an Implementation must be a tuple of strings, not {value!r}")
            object.__setattr__(self, part, tuple(value))
        of_devices = tuple(dtype for dtypes in self.device_dtypes.values() for dtype in dtypes)
        for part, given, known in (
            ("areas", self.areas or (), tuple(spec.areas())),
            ("dtypes", self.dtypes, DTYPES),
            ("device_dtypes", of_devices, DTYPES),
        ):
            unknown = [item for item in given if item not in known]
            if unknown:
                raise ValueError(
                    f"{part} of an Implementation: there is no {unknown[0]!r}; there are {known}"
                )
        for algorithm, words in self.variants.items():
            if set(words.split()) not in map(set, map(str.split, formulas.variants(algorithm))):
                there = " and one of ".join(map(str, formulas.VARYING.get(algorithm, ["()"])))
                raise ValueError(
                    f"variants of an Implementation: {algorithm} has no {words!r}; it has one of {there}"
                )
        if not (self.devices and self.dtypes):
            raise ValueError("an Implementation supports at least one device and one dtype")
        for part in ("fixed_options", "defaults"):
            for name, value in getattr(self, part).items():
                if not is_plain(value) and not _is_dtype(value):
                    raise TypeError(
                        f"{part} of an Implementation: {name} must be None, a number, a string, a dtype "
                        f"or a tuple of these, not {value!r}"
                    )

    def adapter(self) -> dict[str, dict[str, Any]]:
        """Return what cases need to know about the classes of the target, as plain data."""
        parts = {
            "options": self.option_names,
            "fixed": self.fixed_options,
            "defaults": self.defaults,
            "state": self.state_names,
            "variants": self.variants,
            "absent": {name: True for name in self.absent if is_option(name)},
        }
        return {
            part: {name: str(one) if _is_dtype(one) else one for name, one in value.items()}
            for part, value in parts.items()
            if value
        }

    def lacks(self, name: str) -> bool:
        """Whether the implementation does not claim a name, or the class of the name."""
        owner = name.partition(".")[0]
        unnamed = (entry for entry, own in self.state_names.items() if not own)
        undescribed = (one for area in spec.areas().values() for one in {*area.described} - {*self.names})
        unclaimed = (*self.absent, *self.placeholders, *unnamed, *undescribed)
        if name == f"{owner}.by_row" and "per_tensor" in self.variants.get(owner, ""):
            return True  # its norms are those of whole tensors
        return any(fnmatch.fnmatchcase(part, pattern) for part in (name, owner) for pattern in unclaimed)

    def supported(self, device: str | None, dtypes: Sequence[str] = ()) -> str:
        """Return the device, or the first supported one if it is None.

        Raises:
            TargetError: the type of the device or a dtype is not supported.
        """
        device = device or self.devices[0]
        kinds = [known.partition(":")[0] for known in self.devices]
        if device.partition(":")[0] not in kinds and ANY_DEVICE not in kinds:
            raise TargetError(f"{self.name} supports the devices {', '.join(self.devices)}, not {device!r}")
        supported = self.dtypes_on(device)
        for dtype in dtypes:
            if dtype not in supported:
                raise TargetError(f"{self.name} supports the dtypes {', '.join(supported)}, not {dtype!r}")
        return device

    def dtypes_on(self, device: str | None) -> tuple[str, ...]:
        """Return the dtypes that are supported on a device, or on the first one."""
        return tuple(self.device_dtypes.get((device or self.devices[0]).partition(":")[0], self.dtypes))

    def ran(self) -> str:
        """Return the names of the backends that ran since the last call; empty if it cannot name them."""
        return ", ".join(map(str, load(self.backends)())) if self.backends else ""

    def another_ran(self, ran: str) -> str:
        """Return why a case or a figure does not count if one backend is asked for, but others ran."""
        asked = os.environ.get(self.backend_variable, "") if self.backend_variable else ""
        return f"asked of the backend {asked}, but {ran} ran" if asked and ran not in ("", asked) else ""

    def surface(self) -> "Surface":
        """Import the target, and return an object that has its public names as attributes."""
        for module in self.imports:
            load(module)
        return Surface(self)


class Surface:
    """The public names of an implementation, as attributes that are looked up where it keeps them."""

    def __init__(self, implementation: Implementation) -> None:
        self._implementation = implementation
        root = implementation.root
        self._root = load(root) if isinstance(root, str) else root
        self._found: dict[str, tuple[Any, str]] = {}
        self._missing: dict[str, str] = {}
        self._placeholders: set[str] = set()  # that were recognized
        #: Why what was found under a name is not claimed, by name: it cannot be what the name says.
        self.other_meanings: dict[str, str] = {}
        #: What cases read; replayed scripts contain it.
        self.adapter = implementation.adapter()
        self.dtypes = implementation.dtypes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self.borrows(name):
            raise MissingName(f"{self._implementation.name} only imports {name}", name=name)
        return described(self._find(name)[0], name, self.adapter)

    def _find(self, name: str) -> tuple[Any, str]:
        """Return the object of a name, and its ``module:attribute``, empty if it cannot be imported."""
        if name not in self._found and name not in self._missing:
            try:
                self._found[name] = self._look_up(name)
            except MissingName as error:
                self._missing[name] = str(error)
        if name in self._missing:
            raise MissingName(self._missing[name], name=name)
        return self._found[name]

    def _look_up(self, name: str) -> tuple[Any, str]:
        about = self._implementation
        if "." in name:  # raised by cases for an option or a method that a class lacks: unsupported
            raise MissingName(f"{about.name} has no {name}")
        if name in about.placeholders:
            raise MissingName(f"{about.name} has {name} only as a placeholder")
        if about.lacks(name):
            raise MissingName(f"{about.name} does not claim {name}")
        if name in about.names:
            return load(about.names[name]), about.names[name]
        for holder, place in self._places(name):
            try:
                value = getattr(holder, name)
            except AttributeError:
                continue
            except Exception as error:
                text = one_line(error_text(error))
                raise TargetError(f"{about.name} cannot give its {name}: {text}") from error
            if about.areas is None and name in spec.areas()["algorithms"].names and is_placeholder(value):
                self._placeholders.add(name)
                raise MissingName(f"{about.name} has {name} only as a placeholder")
            beside = (getattr(at, one, None) for one in KEYED if one != name for at, _ in self._places(one))
            if about.areas is None and (why := another_meaning(name, value, beside=beside)):
                self.other_meanings[name] = why
                raise MissingName(f"{about.name} does not claim {name}, which {why}")
            if not isinstance(value, ModuleType):
                return value, f"{place}{name}" if place else _place_of(value)
        raise MissingName(f"{about.name} has no {name}")

    def _places(self, name: str) -> Iterator[tuple[Any, str]]:
        """Yield where a name may live: the root, the usual submodule, any other submodule."""
        root = self._implementation.root
        if isinstance(root, str):
            yield self._root, f"{root}." if ":" in root else f"{root}:"
        else:
            yield self._root, ""
        if not isinstance(self._root, ModuleType) or not hasattr(self._root, "__path__"):
            return
        usual = [module for area in spec.areas().values() if name in area.names for module in area.modules]
        present = [item.name for item in pkgutil.iter_modules(self._root.__path__)]
        for module in dict.fromkeys([*usual, *present]):
            if module in present and not module.startswith(("_", "test")):
                place = f"{self._root.__name__}.{module}"
                try:
                    yield load(place), f"{place}:"
                except TargetError:
                    if module in usual:
                        raise

    def has(self, name: str) -> bool:
        """Whether the implementation has a public name."""
        try:
            self._find(name)
        except MissingName:
            return False
        return True

    def borrows(self, name: str) -> bool:
        """Return whether the target only imports this name of a claimed area; companions are excepted."""
        areas = map(spec.areas().__getitem__, self.claimed() if self._imported(name) else ())
        return any(name in {*one.names} - {*one.companions} for one in areas)

    def _imported(self, name: str) -> bool:
        """Whether a module without stated areas only imports a name from one of `OWNERS`."""
        about = self._implementation
        explicit = about.areas is not None or name in about.names or not isinstance(self._root, ModuleType)
        if explicit or not self.has(name):
            return False
        owner = str(getattr(self._find(name)[0], "__module__", "")).partition(".")[0]
        return owner in OWNERS and owner != self._root.__name__.partition(".")[0]

    def lacks(self, name: str) -> bool:
        """Whether a name that a case needs is not claimed: no stated area has it, and it does not exist."""
        about, owner = self._implementation, name.partition(".")[0]
        stated = any(owner in spec.areas()[area].names for area in about.areas or ())
        return about.lacks(name) or self.borrows(owner) or (not stated and not self.has(owner))

    def stated(self, name: str) -> bool:
        """Whether the description claims a name of a class; what was only found claims no names of state."""
        return self._implementation.areas is not None and not self.lacks(name)

    def claims(self, name: str) -> bool:
        """Whether a claimed area has a public name that is not excluded."""
        unclaimed = self._implementation.lacks(name) or self.borrows(name)
        recognized = (*self._placeholders, *self.other_meanings) if not self.has(name) else ()
        unclaimed = unclaimed or name in recognized
        return not unclaimed and any(name in spec.areas()[area].names for area in self.claimed())

    def claimed(self) -> tuple[str, ...]:
        """Return the areas that the implementation claims; one without names is claimed with any other."""
        stated = self._implementation.areas
        own = [
            area.name
            for area in spec.areas().values()
            if (area.name in stated if stated is not None else any(map(self._defines, area.names)))
        ]
        return with_nameless(own)

    def _defines(self, name: str) -> bool:
        return self.has(name) and not self._imported(name)

    def restrictions(self) -> dict[str, list[str]]:
        """Return the restrictions that the description states, each with the claimed optimizers."""
        found: dict[str, list[str]] = {}
        for what, text in RESTRICTIONS.items():
            for name in (*spec.areas()["algorithms"].names, "SparseAdam"):
                if self.claims(name) and self._implementation.lacks(f"{name}.{what}"):
                    found.setdefault(text, []).append(name)
        return found

    def places(self) -> dict[str, str]:
        """Return ``module:attribute`` of each public name that can be imported."""
        names = dict.fromkeys(name for area in spec.areas().values() for name in area.names)
        found = {name: self._find(name)[1] for name in names if self.has(name)}
        return {name: place for name, place in found.items() if place}


def with_nameless(areas: Iterable[str]) -> tuple[str, ...]:
    """Return claimed areas, and those without names, which are claimed with any other."""
    own = tuple(areas)
    nameless = (area.name for area in spec.areas().values() if not area.names)
    return tuple(dict.fromkeys([*own, *nameless])) if own else ()


def _place_of(value: Any) -> str:
    """Return ``module:attribute`` of an object, or an empty string if it cannot be imported."""
    place = f"{getattr(value, '__module__', None)}:{getattr(value, '__qualname__', None)}"
    try:
        return place if load(place) is value else ""
    except TargetError:
        return ""


def load(place: str) -> Any:
    """Import ``module`` or ``module:attribute``."""
    module, _, attribute = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            missing = f"there is no module {module!r} in this environment; install it or correct the name"
            raise NotFoundError(f"{missing}{near_module(error.name)}") from error
        raise TargetError(
            f"{module!r} needs {error.name!r}, which is not installed in this environment"
        ) from error
    except AttributeError as error:
        if module not in sys.modules or not attribute:
            raise TargetError(f"{module!r} cannot be imported: {one_line(error_text(error))}") from error
        near = near_attribute(sys.modules[module], attribute)
        raise TargetError(f"{module!r} has no attribute {attribute!r}{near}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # modules also raise SystemExit, or pytest's Skipped
        raise TargetError(f"{module!r} cannot be imported: {one_line(error_text(error))}") from error
    return found
