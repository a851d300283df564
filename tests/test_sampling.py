"""The two sets of tests: a sample moves and can be repeated; the parts of the long loops make the whole."""

import subprocess
from pathlib import Path

import pytest
from sampling import PARTS, ROOT, Sample, select

from keyedopt.conformance import spec

NUMBERS = range(100)


class Item:
    """An item as pytest collects it, of a test with a marker or without."""

    def __init__(self, nodeid, mark=None):
        self.nodeid, self.path, self._mark = nodeid, Path(nodeid.partition("::")[0]), mark

    def get_closest_marker(self, name):
        return self._mark


ITEMS = [
    *(Item(f"test_a.py::test_sampled[{n}]", pytest.mark.complete(sample=2).mark) for n in range(20)),
    *(Item(f"test_a.py::test_spread[{n}]", pytest.mark.complete(spread=True).mark) for n in range(2 * PARTS)),
    *(Item(f"test_a.py::test_s{n}", pytest.mark.complete(loop="a", sample=2).mark) for n in range(9)),
    Item("test_a.py::test_long", pytest.mark.complete.mark),
    Item("test_b.py::test_longer", pytest.mark.complete.mark),
    Item("test_b.py::test_always"),
]


def test_a_choice_is_that_of_its_seed():
    one, again, other = (Sample(seed).choose(NUMBERS, 5) for seed in ("a", "a", "b"))
    assert one == again != other
    assert one == sorted(one)
    assert len(one) == 5


def test_a_choice_does_not_depend_on_what_else_there_is():
    chosen = Sample("a").choose(NUMBERS, 5)
    assert Sample("a").choose(reversed(NUMBERS), 5) == chosen[::-1]
    assert {*chosen} & {*range(50)} <= {*Sample("a").choose(range(50), 5)}


def test_each_group_is_sampled():
    chosen = Sample("a").choose(NUMBERS, 2, group=lambda number: number % 10)
    assert sorted(number % 10 for number in chosen) == sorted([*range(10)] * 2)


def test_everything_is_chosen_once_in_many_samples():
    seen = {number for seed in range(200) for number in Sample(str(seed)).choose(NUMBERS, 5)}
    assert seen == {*NUMBERS}


def test_a_marker_without_the_name_of_its_argument_is_an_error():
    with pytest.raises(pytest.UsageError, match=r"test_a.py::test_few: write complete\(sample=...\)"):
        select([Item("test_a.py::test_few", pytest.mark.complete(2).mark)], Sample("a"), None)


def test_the_complete_set_chooses_everything():
    assert Sample("a", complete=True).choose(NUMBERS, 5) == [*NUMBERS]
    area = spec.areas()["warmup"]
    assert Sample("a", complete=True).clauses(["warmup"], 1, "") == [clause.id for clause in area.clauses]


def test_clauses_are_chosen_by_area():
    chosen = Sample("a").clauses(["warmup", "wrapper"], 3, "here")
    areas = [spec.clauses()[clause].area for clause in chosen]
    assert areas == ["warmup"] * 3 + ["wrapper"] * 3
    assert chosen != Sample("a").clauses(["warmup", "wrapper"], 3, "elsewhere")


def names(items):
    return [item.nodeid.partition("::")[2].partition("[")[0] for item in items]


def test_the_everyday_set_has_a_sample_of_the_long_loops():
    everyday = select(ITEMS, Sample("a"), None)
    kinds = [name.rstrip("0123456789") for name in names(everyday)]
    assert kinds == ["test_sampled", "test_sampled", "test_s", "test_s", "test_always"]
    assert everyday == select(ITEMS, Sample("a"), None) != select(ITEMS, Sample("b"), None)


def test_three_numbers_of_commits_run_all_parts():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"part <= {PARTS}" in text
    assert f"Part $part of {PARTS} of" in text
    (line,) = (line for line in text.splitlines() if line.startswith("for n in "))
    for commits in range(PARTS + 1):
        found = [
            subprocess.check_output(
                ["bash", "-c", f"commits={commits + n} parts=(); {line}; echo ${{parts[*]}}"]
            )
            for n in range(3)
        ]
        assert {int(part) for parts in found for part in parts.split()} == {*range(1, PARTS + 2)}


def test_the_complete_set_has_everything():
    assert select(ITEMS, Sample("a", complete=True), None) == ITEMS


def test_the_parts_make_the_long_loops():
    parts = [select(ITEMS, Sample("a", complete=True), number + 1) for number in range(PARTS)]
    assert sorted(name for part in parts for name in names(part)) == sorted(names(ITEMS[:-1]))
    assert [names(part).count("test_spread") for part in parts] == [2] * PARTS
    sampled = sorted(names(part).count("test_sampled") for part in parts)
    assert sampled == [*[0] * (PARTS - 1), 20], "they share fixtures"
