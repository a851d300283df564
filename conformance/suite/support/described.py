"""What an adapter says about the classes of a target: names of options and of state, defaults, variants."""

import inspect
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "maximize": False}
_ADAGRAD = {"lr": 1e-2, "lr_decay": 0, "weight_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10}
_LIKE_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
_FTRL = {
    **dict.fromkeys(("l1", "l2", "l2_shrinkage", "beta", "weight_decay"), 0),
    "lr": 1e-3,
    "lr_power": -0.5,
    "initial_accumulator_value": 0.1,
}
#: The documented defaults, on which cases rely.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"lr": 1e-3, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False},
    "Adagrad": _ADAGRAD,
    "RowWiseAdagrad": {**_ADAGRAD, "maximize": False},
    "Adam": _ADAM,
    "AdamW": {**_ADAM, "weight_decay": 1e-2},
    "PartialRowWiseAdam": _LIKE_ADAM,
    "LAMB": _LIKE_ADAM,
    "PartialRowWiseLAMB": _LIKE_ADAM,
    "LarsSGD": {"momentum": 0.9, "weight_decay": 0, "eta": 1e-3},
    "Ftrl": _FTRL,
}
#: The name of a `torch.optim.Optimizer` whose formula the suite does not know.
OTHER = "OtherOptimizer"
#: The options that a target may lack.
OPTIONS = frozenset(name for options in DEFAULTS.values() for name in options) | {
    *("maximize", "max_norm", "decay", "rows", "eps_placement", "bias_correction"),
}


class MissingName(AttributeError):  # noqa: N818 - read as "fails: missing name"
    """A name that is missing: of a class, an argument, an option or an entry of the state."""


class CannotRun(MissingName):
    """A case cannot run here, whatever the target claims: a library, a device or an operator is missing."""


def said(adapter: Mapping[str, Mapping[str, Any]], part: str, owner: str) -> dict[str, Any]:
    """Return what a part of an adapter says about a class: the entries for ``owner.name``, by name.

    An adapter is plain data. A text such as ``"torch.float32"`` stands for that dtype.
    """
    found = {}
    for key, value in adapter.get(part, {}).items():
        pattern, _, name = key.partition(".")
        if fnmatchcase(owner, pattern):
            found[name] = as_dtype(value) if isinstance(value, str) and value.startswith("torch.") else value
    return found


def held_options(adapter: Mapping[str, Mapping[str, Any]], owner: str) -> dict[str, Any]:
    """Return the options that a class always has at a value of its own, as it claims no other, by name."""
    absent, documented = said(adapter, "absent", owner), DEFAULTS.get(owner, {})
    return {
        name: value
        for name, value in said(adapter, "fixed", owner).items()
        if name in documented and any(fnmatchcase(name, pattern) for pattern in absent)
    }


def is_option(name: str) -> bool:
    """Return whether a name that a target lacks, such as ``Adam.max*``, is that of an option."""
    return any(fnmatchcase(option, name.partition(".")[2]) for option in OPTIONS)


def as_dtype(text: str) -> Any:
    """Return the dtype that a text such as ``"torch.float32"`` names; another text as it is."""
    import torch  # not before a target is loaded

    found = getattr(torch, text.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else text


class Described:
    """A class of a target that is called with the documented names of options.

    It returns objects of the class itself, and stands for the class in `isinstance` and as a base.

    Args:
        kind: the class.
        owner: its documented name.
        names: its own names of options, by documented name.
        fixed: options that are passed unless a case gives another value.
        absent: patterns of the options that it does not have.
    """

    def __init__(
        self,
        kind: Any,
        owner: str,
        names: Mapping[str, str],
        fixed: Mapping[str, Any],
        absent: Collection[str] = (),
    ) -> None:
        self.kind, self._names, self._fixed = kind, dict(names), dict(fixed)
        self._always = dict(fixed)  # also those that the constructor does not take
        self._owner, self._absent = owner, tuple(absent)
        documented = {own: name for name, own in names.items()}
        signature = inspect.signature(kind)
        takes = signature.parameters.values()
        if not any(
            one.kind is inspect.Parameter.VAR_KEYWORD for one in takes
        ):  # a pattern may name any class
            self._fixed = {
                name: one for name, one in fixed.items() if names.get(name, name) in signature.parameters
            }
        renamed = [
            one.replace(name=documented.get(one.name, one.name)) for one in signature.parameters.values()
        ]
        self.__signature__ = signature.replace(parameters=renamed)

    def __call__(self, params: Any = (), *args: Any, **options: Any) -> Any:
        """Make an optimizer of the class."""
        if isinstance(params, list | tuple):
            params = [self._group(one) if isinstance(one, dict) else one for one in params]
        by_position = list(self.__signature__.parameters)[1 : len(args) + 1]
        return self.kind(params, *args, **self._with_fixed(options, by_position))

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group under the names of the class; the same dict, which a class may change, if it can."""
        renamed = self.renamed(group)
        return group if renamed.keys() == group.keys() else renamed

    def unwrapped(self, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the class, and documented options under its names, for a module that makes the optimizer."""
        return self.kind, self._with_fixed(options)

    def _with_fixed(self, options: Mapping[str, Any], by_position: Collection[str] = ()) -> dict[str, Any]:
        """Return options under the own names, and those that are passed unless a case gives another."""
        fixed = {
            self._names.get(name, name): value
            for name, value in self._fixed.items()
            if name not in by_position
        }
        return {**fixed, **self.renamed(options)}

    def renamed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options under the names of the class, without the values that it always has.

        Raises:
            MissingName: an option that it does not have is not the value that it always has, which is the
                fixed one or the documented default, so the case is unsupported.
        """
        given = dict(options)
        for name in options:
            if any(fnmatchcase(name, pattern) for pattern in self._absent):
                documented = {"maximize": False, **DEFAULTS.get(self._owner, {}), **self._always}
                if name not in documented or not _equal(given.pop(name), documented[name]):
                    raise MissingName(f"{self._owner} has no {name}", name=f"{self._owner}.{name}")
        return {self._names.get(name, name): value for name, value in given.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kind, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.kind)

    def __subclasscheck__(self, other: Any) -> bool:
        return issubclass(other, self.kind)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self.kind,)


def _equal(value: Any, default: Any) -> bool:
    """Return whether a value of an option is its default; a tensor of several numbers is not."""
    try:
        return bool(value == default)
    except RuntimeError:
        return False


def is_placeholder(kind: Any) -> bool:
    """Return whether a class only names an algorithm: its `step` only raises NotImplementedError."""
    step = getattr(kind, "step", None)
    code = getattr(getattr(step, "__wrapped__", step), "__code__", None)  # torch.no_grad may be around it
    return isinstance(kind, type) and getattr(code, "co_names", None) == ("NotImplementedError",)


def described(kind: Any, owner: str, adapter: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a class, or a function that makes an optimizer, called with documented names of options.

    It is returned as it is unless its adapter says that it has other names or values, or lacks options.
    """
    names, documented = said(adapter, "options", owner), DEFAULTS.get(owner, {})
    differing = {name: documented[name] for name in said(adapter, "defaults", owner) if name in documented}
    fixed = {**differing, **said(adapter, "fixed", owner)}
    absent = said(adapter, "absent", owner)
    is_class = isinstance(kind, type) and hasattr(kind, "add_param_group")
    makes_one = inspect.isroutine(kind) and (owner in DEFAULTS or owner == OTHER)
    if not ((is_class or makes_one) and (names or fixed or absent)):
        return kind
    return Described(kind, owner, names, fixed, absent)


def unwrapped(kind: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a class and its options as the target has them."""
    return kind.unwrapped(options) if isinstance(kind, Described) else (kind, dict(options))


def default_of(impl: Any, algorithm: str, option: str) -> Any:
    """Return the default that the target documents for an option.

    Raises:
        MissingName: the option has no default: the target lacks it, or its adapter passes a fixed value.
    """
    if impl.lacks(f"{algorithm}.{option}") or option in said(impl.adapter, "fixed", algorithm):
        raise MissingName(f"{algorithm} has no default of {option}", name=f"{algorithm}.{option}")
    return said(impl.adapter, "defaults", algorithm).get(option, DEFAULTS[algorithm][option])


def named(impl: Any, algorithm: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group under the names of the target."""
    kind = getattr(impl, algorithm)
    return kind.renamed(options) if isinstance(kind, Described) else dict(options)


class State(Mapping[str, Any]):
    """The state of a parameter by documented names.

    Raises:
        MissingName: on access to an entry that is not there, so the case is unsupported.
    """

    def __init__(self, owner: str, entries: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._owner, self._entries = owner, entries
        own = {
            name: names.get(name, name) for name in (*names, *(n for n in entries if n not in names.values()))
        }
        self._names = {name: one for name, one in own.items() if one in entries}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise MissingName(f"{self._owner} has no {name} in its state", name=f"{self._owner}.{name}")
        return self._entries[self._names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def own(self, name: str) -> str:
        """Return the name of the target for a documented name."""
        self[name]
        return self._names[name]


def documented_state(impl: Any, algorithm: str, entries: Mapping[str, Any]) -> State:
    """Return the state of a parameter by documented names."""
    return State(algorithm, entries, said(impl.adapter, "state", algorithm))


def entries_of(optimizer: Any, weight: Any, otherwise: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Return the state of a parameter under the names of the target.

    Args:
        optimizer: the optimizer; what only has the methods of one may show no state.
        weight: the parameter.
        otherwise: what is returned if the optimizer shows no state.

    Raises:
        MissingName: it shows none, and there is no `otherwise`, so the case is unsupported.
    """
    state = getattr(optimizer, "state", None)
    if isinstance(state, Mapping):
        return state.get(weight, {})
    if otherwise is None:
        kind = type(optimizer).__name__
        raise MissingName(f"{kind} shows no state of a parameter", name=f"{kind}.state")
    return otherwise
