"""The two sets of tests: the everyday set with its moving sample, and the long loops of the complete set.

A test marked `complete` belongs to the complete set. With ``sample``, so many items of a parametrized test
belong to the everyday set too; with ``spread``, the items are spread over the parts of the complete set::

    @pytest.mark.complete(sample=2)
    @pytest.mark.parametrize("name", names())
    def test_interpreted(name): ...

Slow tests of a file that ask alike share a loop, of which so many tests are run every day::

    slow = pytest.mark.complete(loop=__name__, sample=3, spread=True)

    @slow
    def test_a_killed_worker(): ...

A test whose loop is inside one item takes the fixture `sample` instead. The choice depends only on the seed
of the sample and on the names of what is chosen, so the option ``--sample`` repeats it.
"""

import hashlib
import subprocess
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from keyedopt.conformance import spec

ROOT = Path(__file__).parents[2]
#: The parts that the long loops are divided into; `.ci/run` runs one of them.
PARTS = 12
#: The files whose tests share fixtures and take longest, which are dealt out to the parts.
LONGEST_TOGETHER = (
    *("test_documentation", "test_without_values", "test_triton_compiled", "test_findings"),
    *("test_triton_traffic", "test_triton_interpreter", "test_suite_verdicts", "test_tutorial"),
    *("test_signals", "test_fused_checkpoints", "test_build", "test_benchmarks_pytest"),
    *("test_compiled_tables", "test_repeat"),
)
Item = TypeVar("Item")
#: The call of a test without parameters.
NO_PARAMETERS = SimpleNamespace(params={})


def commit() -> str:
    """Return the abbreviated commit of the checkout, or ``none`` outside a repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


@dataclass(frozen=True)
class Sample:
    """Chooses from long loops.

    Args:
        seed: what the choice depends on.
        complete: choose everything.
    """

    seed: str
    complete: bool = False

    def choose(
        self,
        items: Iterable[Item],
        count: int,
        *,
        name: Callable[[Item], str] = str,
        group: Callable[[Item], Hashable] = lambda item: None,
    ) -> list[Item]:
        """Return so many items of each group, in their order; all items in the complete set.

        Args:
            items: what there is to choose from.
            count: how many items of each group are chosen.
            name: returns the name of an item, which the choice depends on.
            group: returns the group of an item.
        """
        every = list(items)
        if self.complete:
            return every
        ranked: dict[Hashable, list[Item]] = {}
        for item in sorted(every, key=lambda item: rank(self.seed, name(item))):
            ranked.setdefault(group(item), []).append(item)
        chosen = {name(item) for members in ranked.values() for item in members[:count]}
        return [item for item in every if name(item) in chosen]

    def clauses(self, areas: Iterable[str], count: int, where: str) -> list[str]:
        """Return the ids of so many clauses of each area; all clauses of the areas in the complete set.

        Args:
            areas: names of areas.
            count: how many clauses of each area are chosen.
            where: what the clauses are asked of; each has another sample.
        """
        every = [clause for area in areas for clause in spec.areas()[area].clauses]
        chosen = self.choose(
            every, count, name=lambda clause: f"{where} {clause.id}", group=lambda clause: clause.area
        )
        return [clause.id for clause in chosen]


def rank(seed: str, name: str) -> str:
    """Return a key that sorts names in an order that the seed decides."""
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()


def select(items: list[pytest.Item], sample: Sample, part: int | None) -> list[pytest.Item]:
    """Return the items of the set that is run.

    Args:
        items: every collected item.
        sample: the everyday set with this sample, or the complete set.
        part: only the long loops, and of these only one of `PARTS` parts, counted from 1.
    """
    if part is not None:
        long = [item for item in items if item.get_closest_marker("complete")]
        return [item for item in long if part_of(item, long) == part]
    loops: dict[str, list[pytest.Item]] = {}
    for item in items:
        loops.setdefault(_loop(item), []).append(item)
    kept: set[str] = set()
    for members in loops.values():
        mark = members[0].get_closest_marker("complete")
        if mark is not None and mark.args:
            raise pytest.UsageError(f"{members[0].nodeid}: write complete(sample=...)")
        count = len(members) if mark is None else mark.kwargs.get("sample", 0)
        kept |= {item.nodeid for item in sample.choose(members, count, name=lambda item: item.nodeid)}
    return [item for item in items if item.nodeid in kept]


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values of a parameter in the items of this file that are run: a fixture makes no others."""
    return [
        item.callspec.params[parameter]
        for item in request.session.items
        if item.path == request.path and parameter in getattr(item, "callspec", NO_PARAMETERS).params
    ]


def part_of(item: pytest.Item, long: Iterable[Any]) -> int:
    """Return the part of a long loop's item.

    The tests of a file share fixtures, so they are in one part. The items of a loop with ``spread=True`` take
    turns.
    """
    mark, file = item.get_closest_marker("complete"), item.path.stem
    if mark is not None and mark.kwargs.get("spread"):
        members = [other.nodeid for other in long if _loop(other) == _loop(item)]
        place = int(rank("", _loop(item)), 16) + members.index(item.nodeid)
    elif file in LONGEST_TOGETHER:
        place = LONGEST_TOGETHER.index(file)
    else:
        place = int(rank("", file), 16)
    return place % PARTS + 1


def _loop(item: pytest.Item) -> str:
    """Return the loop that a test names, or its own name without its parameters."""
    mark = item.get_closest_marker("complete")
    own = item.nodeid.partition("[")[0]
    return str(mark.kwargs.get("loop", own)) if mark else own
