"""Run the cases of a clause also in situations: the dimensions that the clause names, in few combinations.

`spec.Clause.varies` names the dimensions. Up to five situations have each dimension of a clause at least
once. Which dimensions meet in a situation differs from clause to clause, so that pairs of dimensions meet in
the cases of an area. The choice depends only on the specification and on the cases of the clause.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest

from keyedopt.conformance import spec
from keyedopt.conformance.run.outcomes import HEAD, error_of
from keyedopt.conformance.suite.support.assertions import Late
from keyedopt.conformance.suite.support.described import OTHER
from keyedopt.conformance.targets.implementation import Implementation

#: The situation of a case, such as ``group+last``; the plain case has none.
SITUATION = pytest.StashKey[str]()
#: The clauses of a case in a situation, which are not always those of the plain case.
CLAUSES = pytest.StashKey[tuple[str, ...]]()
#: What a function of cases is given for which it runs on another backend once each.
_ON_ANOTHER = ("dtype", "algorithm", "optimizer", "variant", "option", "options", "made")
#: The dtypes of cases that run in situations: few targets have others.
_DTYPES = (None, "float32", "float64")
#: The dimensions of situations in which a case fails its own clause, and is the second of what it makes.
_OWN_LAST = spec.STRUCTURE - {"last"}


def situations(clause: spec.Clause) -> list[str]:
    """Return the situations of a clause: each of its dimensions at least once; none if it names none.

    >>> clause = spec.Clause("X-001", "keyed", "must", "0.1", "…", (), varies=("group", "parameter", "copy"))
    >>> situations(clause)
    ['group', 'parameter', 'group+copy', 'parameter+copy']
    """
    varies = frozenset(clause.varies)

    def some(*values: str) -> list[str]:
        """Return the values, without dimensions that the clause does not name."""
        found = ("+".join(one for one in value.split("+") if one in varies) for value in values)
        return list(dict.fromkeys(filter(None, found)))

    def toggles(*values: str) -> list[list[str]]:
        return [[value, ""] for value in values if value in varies]

    optimizers, tables = some("group", "parameter"), some("table", "feature")
    plain = [optimizers, tables, *toggles("order", "last", "backend")]
    others = [some("group+tensor-lr", "parameter"), some("frozen", "dtype+layout")] if optimizers else []
    others += [some("table+frozen", "feature")] if tables else []
    others += [some("copy", "load"), *toggles("nesting", "order", "last")]
    rows = _rotated(clause.id, plain)
    if varies - spec.STRUCTURE:
        rows += _rotated(clause.id, others)
    rows = list(dict.fromkeys(filter(None, rows)))
    for row in list(rows) if clause.level != "must" else ():  # fewer cases, for what less depends on
        fewer = [one for one in rows if one != row]
        named = {one for each in fewer for one in each.split("+")}
        if varies <= named and any(_OWN_LAST.issuperset(one.split("+")) for one in fewer):
            rows = fewer
    return rows


def _rotated(seed: str, factors: Sequence[Sequence[str]]) -> list[str]:
    """Return as many combinations as the longest factor has values, which have each value at least once."""
    factors = [factor for factor in factors if factor]
    starts = [_number(f"{seed} {number}") for number in range(len(factors))]
    return [
        "+".join(
            dict.fromkeys(
                dimension
                for start, factor in zip(starts, factors, strict=True)
                for dimension in factor[(start + row) % len(factor)].split("+")
                if dimension
            )
        )
        for row in range(max(map(len, factors), default=0))
    ]


def _number(text: str) -> int:
    """Return a number that is the same everywhere; those of similar texts have nothing in common."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def _chosen(functions: Sequence[Sequence[Any]], clause: spec.Clause) -> Iterator[tuple[Any, str]]:
    """Yield cases of a clause with the situations in which they run, given the cases of each function."""
    start = _number(clause.id)
    for number, situation in enumerate(situations(clause) if functions else (), start):
        cases = functions[number % len(functions)]
        yield cases[number % len(cases)], situation


def varied(items: Sequence[pytest.Item], wanted: Callable[[spec.Clause], bool]) -> list[pytest.Item]:
    """Return the cases, each followed by itself in the situations that were chosen for it.

    Each function of a clause that names the dimension "backend" runs on another backend once for each dtype,
    algorithm and option: a backend is an implementation of its own. `is_plain` says where there is no other.

    Args:
        items: the cases of the suite, and perhaps other tests.
        wanted: whether the cases of a clause are run.
    """
    of_clause: dict[str, dict[Any, list[pytest.Item]]] = {}
    on_another: dict[tuple[str, Any, str], list[pytest.Item]] = {}
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        dtype, other = given.get("dtype"), given.get("algorithm") == OTHER  # whose parameters may be coupled
        for clause in clauses_of(item):
            if clause in spec.clauses() and "backend" in spec.clauses()[clause].varies:
                kind = str([given.get(name) for name in _ON_ANOTHER])
                on_another.setdefault((clause, getattr(item, "obj", None), kind), []).append(item)
        if dtype in _DTYPES and not other and not item.get_closest_marker("plain_only"):
            for clause in clauses_of(item):
                of_clause.setdefault(clause, {}).setdefault(getattr(item, "obj", None), []).append(item)
    added: dict[pytest.Item, dict[str, dict[str, None]]] = {}
    for name in of_clause.keys() & spec.clauses().keys():
        own = spec.clauses()[name]
        about = spec.clause_of_situations(own.area)
        functions = list(of_clause[name].values())
        here = [cases for cases in functions if cases[0].path.parent.name == own.area]
        for item, situation in _chosen(here or functions, own):  # the same if only this area is collected
            judged = name if spec.STRUCTURE.issuperset(situation.split("+")) else about
            if judged and wanted(spec.clauses()[judged]):
                added.setdefault(item, {}).setdefault(situation, {})[judged] = None
    for number, ((name, *_), cases) in enumerate(on_another.items()):
        if wanted(spec.clauses()[name]):
            added.setdefault(cases[number % len(cases)], {}).setdefault("backend", {})[name] = None
    return [
        one
        for item in items
        for one in (
            item,
            *(_InSituation.of(item, name, tuple(judged)) for name, judged in added.get(item, {}).items()),
        )
    ]


def clauses_of(item: pytest.Item) -> list[str]:
    """Return the clauses that a case tests: those of its mark, or others in its situation."""
    marked = [clause for mark in item.iter_markers("clause") for clause in mark.args]
    return list(item.stash.get(CLAUSES, marked))


class _InSituation(pytest.Function):
    """A case in a situation."""

    @property
    def nodeid(self) -> str:
        """Return the address of the case, whose last part says the situation, too."""
        assert self.parent is not None
        return f"{self.parent.nodeid}::{self.name}"

    @classmethod
    def of(cls, item: Any, situation: str, clauses: tuple[str, ...]) -> pytest.Item:
        """Return a case in a situation, for these clauses."""
        name = f"{item.name[:-1]}-{situation}]" if item.name.endswith("]") else f"{item.name}[{situation}]"
        made: pytest.Item = cls.from_parent(
            item.parent,
            name=name,
            callspec=getattr(item, "callspec", None),
            callobj=item.obj,
            fixtureinfo=item._fixtureinfo,
            originalname=item.originalname,
        )
        made.stash[SITUATION], made.stash[CLAUSES] = situation, clauses
        return made


def is_plain(item: pytest.Item, implementation: Implementation) -> bool:
    """Return whether a case on another backend is the plain case again, because there is no other."""
    asked = os.environ.get(implementation.backend_variable) if implementation.backend_variable else None
    return item.stash.get(SITUATION, "") == "backend" and bool(asked or not implementation.other_backends)


def as_input(item: pytest.Item) -> Mapping[str, str]:
    """Return the situation of a case as one of its inputs, if it has one."""
    return {"situation": item.stash[SITUATION]} if SITUATION in item.stash else {}


def in_its_situation(
    item: pytest.Item,
    call: Callable[[str], None],
    implementation: Implementation,
    error_of: Callable[[Callable[[], None]], BaseException | None] = error_of,
) -> None:
    """Call a case in its situation. A case that fails without the situation, too, is unsupported in it.

    Args:
        item: the case.
        call: calls the case in a situation; empty is none.
        implementation: names the other backends, and the variable of the environment that asks for one.
        error_of: bound before the target could replace it in this module.
    """
    situation = item.stash.get(SITUATION, "")
    others, variable = implementation.other_backends, implementation.backend_variable
    asked: list[dict[str, str]] = [{}]
    if "backend" in situation.split("+") and others and not os.environ.get(variable):
        start = _number(item.name) % len(others)
        asked = [{variable: one} for one in others[start:] + others[:start]]
    for environment in asked:  # the next backend, if this one leaves the case to another
        with mock.patch.dict(os.environ, environment) if environment else contextlib.nullcontext():
            error = error_of(lambda: call(situation))
        if not isinstance(error, pytest.skip.Exception):
            break
    if situation and isinstance(error, Exception) and not isinstance(error, Late):
        head = item.stash[HEAD]
        kept = head.copy()
        plainly = error_of(lambda: call(""))
        head.update(kept)
        if plainly is not None:
            pytest.skip("the case fails without its situation, too")
    if error is not None:
        raise error
