"""Propose an adapter for a library: classes with common names or bases, missing options, other defaults."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from keyedopt.conformance import spec
from keyedopt.conformance.suite.support.algorithms import OF_OTHERS
from keyedopt.conformance.suite.support.described import DEFAULTS, OTHER
from keyedopt.conformance.targets.builtin import torchft, torchrec
from keyedopt.conformance.targets.implementation import Implementation, TargetError, is_plain, load
from keyedopt.conformance.targets.meaning import another_meaning
from keyedopt.conformance.targets.trial import first_steps, step_error

#: Names under which libraries have the algorithms, the most literal first.
COMMON = {
    "SGD": ("SGD", "SGDW", "SGD32bit"),
    "Adagrad": ("Adagrad", "AdaGrad", "Adagrad32bit"),
    "RowWiseAdagrad": ("RowWiseAdagrad", "RWSAdagrad", "RowwiseAdagrad"),
    "Adam": ("Adam", "Adam8bit", "Adam32bit", "CPUAdam", "DeepSpeedCPUAdam"),
    "AdamW": ("AdamW", "AdamW8bit", "AdamW32bit"),
    "LAMB": ("LAMB", "Lamb", "LAMB32bit"),
    "LarsSGD": ("LarsSGD", "LARS", "Lars", "LARS32bit"),
    "Ftrl": ("Ftrl", "FTRL", "FTRLProximal"),
}
#: Other names of options in constructors.
ALSO_CALLED = {"eta": ("trust_coefficient", "trust_coeff", "eeta"), "eps": ("epsilon",)}
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
    """What an adapter says about the classes of a library, as far as signatures and bases show it.

    The notes say what is guessed, and what only its documents can tell.
    """

    areas: tuple[str, ...]
    names: dict[str, str]
    absent: tuple[str, ...]
    option_names: dict[str, str]
    fixed_options: dict[str, Any]
    defaults: dict[str, Any]
    variants: dict[str, str]
    inherits: tuple[str, ...]
    notes: tuple[str, ...] = ()


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


def _named(name: str) -> tuple[str, str] | None:
    """Return the algorithm that words of a name in camel case say, and the word after it; the longest counts.

    >>> _named("AnyPrecisionAdamW"), _named("AdamWClip"), _named("AdagradW"), _named("Adamax")
    (('AdamW', ''), ('AdamW', 'Clip'), ('Adagrad', 'W'), None)
    """
    words = list(re.finditer(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name))
    starts, ends = {word.start() for word in words}, {word.end() for word in words}
    found = [
        (len(common), place.start(), algorithm)
        for algorithm in DEFAULTS
        for common in COMMON.get(algorithm, (algorithm,))
        for place in re.finditer(common, name, re.IGNORECASE)
        if place.start() in starts and place.end() in ends
    ]
    if not found:
        return None
    length, start, algorithm = max(found)
    return algorithm, next((word[0] for word in words if word.start() >= start + length), "")


def _parameters(kind: Any) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Return the parameters of a constructor, and whether there may be more that no signature shows.

    What a constructor takes as ``**kwargs`` is looked up in those of its base classes.
    """
    shown = dict(inspect.signature(kind).parameters)
    makers = [vars(base)["__init__"] for base in getattr(kind, "__mro__", ()) if "__init__" in vars(base)]
    for maker in (None, *makers[1:]):
        if maker is torch.optim.Optimizer.__init__:
            break
        if maker is not None:
            shown = {**inspect.signature(maker).parameters, **shown}
        variable = [name for name, one in shown.items() if one.kind is inspect.Parameter.VAR_KEYWORD]
        if not variable:
            return shown, False
        for name in variable:
            del shown[name]
    return shown, True


def _subclasses(
    classes: Mapping[str, tuple[str, Any]], roots: Sequence[Any]
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
            if any(kind is root for root in roots) or kind not in bases:
                nearest = next((bases[base] for base in getattr(kind, "__mro__", ()) if base in bases), None)
                if nearest:
                    own.setdefault(nearest, place)
                    beside |= places
                    owners[owner] = None
    return own, beside, tuple(owners)


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def _acts_as_optimizer(kind: Any) -> bool:
    """Return whether a class has what a training loop calls: some libraries have a base of their own."""
    acts = all(callable(getattr(kind, name, None)) for name in ("step", "zero_grad"))
    return isinstance(kind, type) and acts


def _is_sparse_adam(name: str, kind: Any) -> bool:
    return name == "SparseAdam" or (isinstance(kind, type) and issubclass(kind, torch.optim.SparseAdam))


def _claimed(names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(area for area in COMPOSING if set(names) & set(spec.areas()[area].names))


@dataclass
class _Draft:
    """What is known of the algorithms of a library so far."""

    names: dict[str, str] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    option_names: dict[str, str] = field(default_factory=dict)
    fixed_options: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, algorithm: str, place: str, kind: Any, because: str = "", sure: bool = True) -> None:
        """Describe a class as an algorithm, or note why it is not: as another one is, or it cannot be it.

        Args:
            algorithm: the public name.
            place: where the class is.
            kind: the class, or a factory function.
            because: why it should be that algorithm, if the class is to be tried.
            sure: whether that counts although a trial does not confirm it.
        """
        if algorithm in self.names:
            if place != self.names[algorithm]:
                known = f"{self.names[algorithm]} is the {algorithm} here"
                self.notes.append(f"{place} is not described: {known}; alone, with --from {place}, it may be")
            return
        if why := another_meaning(algorithm, kind, {**DEFAULTS[algorithm], "lr": 0}):
            self.notes.append(f"{place} is not described: as {algorithm}, it {why}")
            return
        one = _describe(algorithm, place, kind)
        if because:
            claimed = {name: value for name, value in vars(one).items() if name != "notes"}
            about = Implementation("trial", place, areas=("algorithms",), **claimed)
            variant, why = first_steps(about, algorithm)
            if variant is None and not sure:
                ask = f"if its documents say that it is {algorithm}, use --from {algorithm}={place}"
                ask += f", otherwise --from {OTHER}={place}"
                self.notes.append(f"{place} is not described: {because}, but {why}; {ask}")
                return
            if variant is None:
                self.notes.append(f"{place} is judged as {algorithm}: {because}, but {why}: is it?")
            elif not sure or because.startswith("it extends"):
                self.notes.append(
                    f"{place} is judged as {algorithm}: {because}, and its first steps are right"
                )
            if variant:
                claim = f"claim {variant!r} in `variants` if its documents describe that"
                self.notes.append(f"{place} takes the steps of a variant of {algorithm}: {claim}")
        for name, value in vars(one).items():
            mine = getattr(self, name)
            mine.update(value) if isinstance(mine, dict) else mine.extend(value)

    def add_other(self, place: str, kind: Any, tried: bool = False) -> None:
        """Describe an optimizer of another formula, or note why it is not described.

        Args:
            place: where the class is.
            kind: the class, or a factory function.
            tried: whether it is described only if it takes a step.
        """
        if OTHER in self.names:
            known = f"{self.names[OTHER]} is the {OTHER} here"
            self.notes.append(f"{place} is not described: {known}; `keyedopt check {place}` judges it")
            return
        takes, more = _parameters(kind)
        if why := another_meaning(OTHER, kind):
            self.notes.append(f"{place} is not described: as {OTHER}, it {why}")
            return
        if tried and (why := step_error(Implementation("trial", place, names={OTHER: place}), OTHER)):
            ask = f"if it needs more arguments, use --from {OTHER}=MODULE:FUNCTION, which gives them"
            self.notes.append(f"{place} is not described: a step of {place}([weight]) raises {why}; {ask}")
            return
        self.names[OTHER] = place
        hidden = [name for name in OF_OTHERS if name not in takes]
        self.absent += [f"{OTHER}.{name}" for name in hidden]
        if "lr" in hidden:
            self.fixed_options[f"{OTHER}.lr"] = 0.1  # which most cases pass
        self.notes.append(f"{place} is judged as {OTHER}: its formula is not known, and is not judged")
        if more and hidden:
            self.notes.append(_not_shown(place, hidden))


def _not_shown(place: str, hidden: Sequence[str]) -> str:
    """Return the note on a class that takes options of which no signature shows the names."""
    return (
        f"{place} takes **kwargs, of which no signature shows the names: {', '.join(hidden)} count as "
        "absent; delete from `absent` what it takes"
    )


def _describe(algorithm: str, place: str, kind: Any) -> _Draft:
    """Return what the signature of a class says about it as an algorithm."""
    one = _Draft({algorithm: place})
    name = place.rpartition(":")[2].rpartition(".")[2]
    decoupled = algorithm in ("SGD", "Adagrad") and (_named(name) or ("", ""))[1] == "W"
    if decoupled or "SGDW" in name:
        one.variants[algorithm] = "decoupled"
    takes, more = _parameters(kind)
    hidden = []
    for option, documented in {"lr": 1e-3, **DEFAULTS[algorithm]}.items():
        called = next((each for each in (option, *ALSO_CALLED.get(option, ())) if each in takes), None)
        if called is None:
            hidden.append(option)
            continue
        if called != option:
            one.option_names[f"{algorithm}.{option}"] = called
        default = takes[called].default
        if not is_plain(default):  # none, or an object that stands for a required option
            one.fixed_options[f"{algorithm}.{option}"] = documented
        elif option in DEFAULTS[algorithm] and default != documented:
            one.defaults[f"{algorithm}.{option}"] = default
    neutral = NEUTRAL.get(algorithm, {}).items()
    one.fixed_options |= {f"{algorithm}.{option}": value for option, value in neutral if option in takes}
    hidden += [name for name in ("maximize", "fused", "foreach") if name not in takes and name not in hidden]
    one.absent += [f"{algorithm}.{name}" for name in hidden]
    if more and hidden:
        one.notes.append(_not_shown(place, hidden))
    return one


def _add_class(draft: _Draft, place: str, kind: Any, by_words: bool) -> None:
    """Describe a class that was given itself: by its name, its bases, or as a guess by words of its name."""
    name = kind.__name__
    literal = next((one for one in DEFAULTS if name in COMMON.get(one, (one,))), None)
    nearest = next((base for base in kind.__mro__ if base.__name__ in DEFAULTS), None)
    said = _named(name)
    if literal:
        draft.add(literal, place, kind, "that is its name" if by_words else "")
    elif nearest:
        # A step of its own may be that of another formula, if not even the name says which one it is.
        mine, theirs = (inspect.unwrap(getattr(one, "step", object)) for one in (kind, nearest))
        unsaid = mine is not theirs and (said or ("",))[0] != nearest.__name__
        because = f"it extends {nearest.__name__}" if by_words or unsaid else ""
        draft.add(nearest.__name__, place, kind, because, sure=not unsaid)
    elif by_words and said:
        draft.add(said[0], place, kind, f"its name says {said[0]}", sure=False)


def _add_module(draft: _Draft, classes: Mapping[str, tuple[str, Any]], by_words: bool) -> None:
    """Describe the classes of a module: those with common names, and guesses for the other algorithms."""
    for algorithm in DEFAULTS:
        name = next((one for one in COMMON.get(algorithm, (algorithm,)) if one in classes), None)
        if name is not None:
            draft.add(algorithm, *classes[name], "that is its name" if by_words else "")
    rest = {
        name: one
        for name, one in classes.items()
        if one[0] not in draft.names.values() and _is_optimizer(one[1]) and not _is_sparse_adam(name, one[1])
    }
    for name, (place, kind) in rest.items() if by_words else ():
        said = _named(name)
        if said:
            draft.add(said[0], place, kind, f"its name says {said[0]}", sure=False)


def propose(*libraries: str, by_words: bool = False) -> Proposal:
    """Import libraries, or single classes (``module:Class``), and read the signatures of their classes.

    Args:
        libraries: modules or classes; ``AdamW=module:Class`` says what a class is.
        by_words: whether words of the name of a class may decide which algorithm it is. That is a guess,
            which its first steps must confirm. Those of a class that extends one are tried too.

    Raises:
        TargetError: a library cannot be imported.
    """
    draft, roots = _Draft(), []
    classes: dict[str, tuple[str, Any]] = {}
    for library in libraries:
        algorithm, _, place = library.rpartition("=")
        if algorithm and algorithm not in (*DEFAULTS, OTHER):
            known = ", ".join((*DEFAULTS, OTHER))
            raise TargetError(f"there is no algorithm {algorithm!r}; there are: {known}")
        root = load(place)
        roots.append(root)
        here = _classes(place, root)
        classes |= {name: one for name, one in here.items() if name not in classes}
        if algorithm == OTHER:
            draft.add_other(place, root)
        elif algorithm:
            draft.add(algorithm, place, root)
        elif isinstance(root, ModuleType):
            _add_module(draft, here, by_words)
        elif isinstance(root, type):
            _add_class(draft, place, root, by_words)
        else:
            _add_module(draft, here, by_words=False)
    own, beside, owners = _subclasses(classes, roots)
    sparse = _sparse_adam(draft, classes)
    described = {*draft.names.values(), *own.values(), *sparse.values()}
    for name, (place, kind) in classes.items():
        given = any(kind is root for root in roots)
        free = place not in described and name not in _names(COMPOSING)
        if free and (_acts_as_optimizer(kind) if given else _is_optimizer(kind) and not _named(name)):
            draft.add_other(place, kind, tried=by_words)
    areas = _claimed(own)
    companions = {name for area in areas for name in spec.areas()[area].companions}
    absent = [one for one in DEFAULTS if one not in draft.names]
    absent += [*draft.absent, *(f"*.{name}" for name in ("sparse", *NOT_SHOWN))]
    absent += [name for name in _names(areas) if name not in {*own, *companions}]
    if draft.names:
        areas, owners = (*areas, "algorithms"), (*owners, "torch")
    if sparse:
        areas, owners = (*areas, "sparse"), (*owners, "torch")
    return Proposal(
        areas,
        {**beside, **draft.names, **own, **sparse},
        tuple(dict.fromkeys(absent)),
        draft.option_names,
        draft.fixed_options,
        draft.defaults,
        draft.variants,
        tuple(dict.fromkeys(owners)),
        tuple(dict.fromkeys(draft.notes)),
    )


def _sparse_adam(draft: _Draft, classes: Mapping[str, tuple[str, Any]]) -> dict[str, str]:
    """Return the place of the class that is named as `torch.optim.SparseAdam` or extends it, by name."""
    for name, (place, kind) in classes.items():
        if _is_sparse_adam(name, kind):
            why = another_meaning("SparseAdam", kind)
            if not why:
                draft.absent += [
                    f"SparseAdam.{one}" for one in ("maximize",) if one not in _parameters(kind)[0]
                ]
                return {"SparseAdam": place}
            draft.notes.append(f"{place} is not described: as SparseAdam, it {why}")
    return {}
