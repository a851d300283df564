"""Mutants: implementations with one small, realistic fault each, which the suite must reject.

A mutant replaces code of a base. The files ``AREA.toml`` list the mutants of the reference by area, and
``BASE/AREA.toml`` those of the other bases::

    [[mutant]]
    name = "wrapper-copies-groups"
    rejected_by = ["WRAP-003", "WRAP-032"]
    at = "keyed/wrapper.py:OptimizerWrapper.param_groups"
    old = "return self._optimizer.param_groups"
    new = "return [dict(group) for group in self._optimizer.param_groups]"

`keyedopt.conformance.mutants.fragments` says how ``old`` is found.
"""

import functools
import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.errors import KeyedoptError

#: The base of most mutants. It is copied, and faults are planted in the copy.
SOUND = "reference"
#: The other bases, and the package of each that paths of files begin in. Their own functions are changed.
PACKAGES = {"fused": "keyedopt.fused", "torch": "torch", "torchft": "torchft", "torchrec": "torchrec"}


class MutantError(KeyedoptError):
    """A mutant is not well written, or does not fit the code of its base."""


@dataclass(frozen=True)
class Change:
    """One replacement in one file of a base.

    Args:
        file: path of the file in the package.
        old: the code that is replaced.
        new: the code in its place; may be empty.
        function: qualified name of the function or class that contains ``old``, or ``<module>``. If it is
            missing, ``old`` and ``new`` are plain text, and ``old`` occurs exactly once in the file.
        occurrence: which occurrence of ``old`` in the function is replaced, from 1 on, if there are several.
    """

    file: str
    old: str
    new: str
    function: str | None = None
    occurrence: int | None = None


@dataclass(frozen=True)
class Mutant:
    """One fault, and who must notice it.

    Args:
        name: unique name.
        area: the area whose file lists the mutant.
        rejected_by: ids of the clauses that reject the mutant, each of them. A mutant without ids is a sound
            variant: no clause of its area rejects it that does not reject its base.
        changes: the replacements that plant the fault; ``also`` is the second, or a list of further ones.
        dtypes: the dtypes in which cases run.
        base: the implementation that the fault is planted in.
    """

    name: str
    area: str
    rejected_by: tuple[str, ...]
    changes: tuple[Change, ...]
    dtypes: tuple[str, ...] = ("float32",)
    base: str = SOUND


@functools.cache
def mutants() -> Mapping[str, Mutant]:
    """Return every mutant by name.

    Raises:
        MutantError: an entry has a wrong key, or two mutants have the same name.
    """
    found: dict[str, Mutant] = {}
    for base, area in itertools.product((SOUND, *PACKAGES), spec.areas()):
        path = Path(__file__).parent / ("" if base == SOUND else base) / f"{area}.toml"
        entries = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for entry in entries.get("mutant", ()):
            mutant = parsed(area, entry, base)
            if mutant.name in found:
                raise MutantError(f"two mutants have the name {mutant.name!r}: rename one")
            found[mutant.name] = mutant
    return found


def parsed(area: str, entry: Mapping[str, Any], base: str = SOUND) -> Mutant:
    """Return the mutant that an entry of a TOML file describes.

    Raises:
        MutantError: a key is unknown or missing.
    """
    rest = dict(entry)
    name, also = rest.pop("name", "without a name"), rest.pop("also", [])
    also = also if isinstance(also, list) else [also]
    lists = {key: tuple(rest.pop(key)) for key in ("rejected_by", "dtypes") if key in rest}
    try:
        changes = tuple(_change(**change) for change in (rest, *also))
        return Mutant(name=name, area=area, changes=changes, base=base, **lists)
    except TypeError as error:
        raise MutantError(f"mutant {name} in {area}.toml: {error}") from error


def _change(at: str, **rest: Any) -> Change:
    file, _, function = at.partition(":")
    return Change(file, function=function or None, **rest)
