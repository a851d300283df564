"""The page answers first: in every view, what is worst comes first."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
from reports_data import clauses, results
from watching import shown

from keyedopt.conformance.results.verdict import UNSUPPORTED
from keyedopt.conformance.spec import LEVELS
from keyedopt.reports.page import overview
from keyedopt.reports.page.figures import looks
from keyedopt.reports.tables import HELD

#: Outcomes of clauses that do not hold, the most serious first.
BAD = ("fail", "error", "unexpected-pass", "known")
#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=2, spread=True)

pytest_plugins = "watching"  # its fixtures


@slow
def test_the_ranked_table_comes_first_and_amber_is_conformant_with_a_reservation(watched):
    tab = watched(viewport={"width": 390, "height": 844}).go("overview")
    rows = tab.locator(".ranked tbody tr")
    assert rows.first.bounding_box()["y"] < 844
    chips = [row.locator(".chip") for row in rows.all()]
    for row, chip in zip(rows.all(), chips, strict=True):
        green = "pass" in chip.get_attribute("class").split()
        if green:
            assert re.search(r"\b0 of \d+ should", row.inner_text())
    musts = [int((re.search(r"(\d+) of \d+ must", row.inner_text()) or [0, 0])[1]) for row in rows.all()]
    assert musts == sorted(musts, reverse=True)


def test_clauses_that_fail_come_first_in_the_matrix_and_musts_look_unlike_shoulds(watched):
    tables, known = results(4, 80, 3, 2000, 40)
    ranks = {}
    for row in tables.clauses.itertuples():
        bad = BAD.index(row.outcome) if row.outcome in BAD else len(BAD)
        rank = (LEVELS.index(row.level), bad) if bad < len(BAD) else (len(LEVELS), 0)
        ranks[row.clause] = min(rank, ranks.get(row.clause, rank))
    tab = watched().go("matrix")
    ids = shown(tab)
    assert [ranks[one] for one in ids] == sorted(ranks.values())
    cells = """() => [...document.querySelectorAll("#clauses td.o.known")].map((cell) => [
        cell.parentElement.querySelector("button").textContent, cell.textContent, getComputedStyle(
        cell.firstChild).borderTopWidth])"""
    seen = tab.evaluate(cells)
    assert {known[clause].level for clause, *_ in seen} == {"must", "should"}
    for clause, text, border in seen:
        assert ("must" in text, border == "2px") == (known[clause].level == "must",) * 2


@slow
def test_a_filter_says_how_many_clauses_each_choice_shows(watched):
    from playwright.sync_api import expect

    tab = watched().go("matrix&outcome=bad&run=library1%201.2")
    for name in ("area", "level", "outcome", "run"):
        control = tab.locator(f"#filter-{name}")
        chosen = control.input_value()
        said = dict(control.evaluate("one => [...one.options].map((each) => [each.value, each.textContent])"))
        for value in list(said)[-2:]:
            control.select_option(value)
            count = re.search(r"\((\d+)\)$", said[value])[1]
            expect(tab.locator("#count")).to_have_text(re.compile(f"^{count} of "))
            assert len(shown(tab)) == int(count)
        control.select_option(chosen)


def overview_of(cases):
    """Return the overview of cases: run, clause, outcome, what was seen, reason and link if it is known."""
    tables, known = results(2, 40, 1, 60, 6)
    rows = [
        {**dict.fromkeys(tables.cases.columns), "run": run, "clause": clause, "outcome": outcome,
         "case": f"test_a::test_{clause}", "expected": "1", "seen": seen, "reason": reason, "link": link,
         "replay": f"keyedopt replay x.json {clause}"}
        for run, clause, outcome, seen, reason, link in cases
    ]  # fmt: skip
    made = dataclasses.replace(tables, cases=pd.DataFrame(rows, columns=tables.cases.columns))
    script = ("library0", "a_defect", "print()")
    known = {name: dataclasses.replace(each, reproducers=(script,)) for name, each in known.items()}
    return overview.view(made, known, looks(tables.runs["run"].iloc[:2]))


@pytest.mark.parametrize("worse", range(4))
def test_the_worst_finding_is_the_one_that_does_most_harm(worse):
    first, second = ("library0 1.0", "library0 1.1")
    cases = [  # each is worse than the one after it
        (first, "KEYED-000", "fail", "2", "", ""),
        (second, "KEYED-000", "fail", "ValueError: no", "", ""),
        (second, "KEYED-000", "known", "2", "It counts twice", "conformance/findings/a_defect.py"),
        (first, "KEYED-008", "fail", "2", "", ""),  # a should
    ]
    found = overview_of(cases[worse:][::-1])["worst"]
    run, clause, outcome, seen, *_ = cases[worse]
    assert (found["run"], found["clause"]) == (run, clause)
    promise = clauses(40)[clause].statement.rstrip(".")
    assert found["why"] == ("It counts twice" if outcome == "known" else f"{promise}; seen: {seen}")
    replay = f"keyedopt replay x.json {clause}"
    assert found["command"] == ("keyedopt findings a_defect" if outcome == "known" else replay)


def test_where_nothing_fails_there_is_no_worst_finding():
    assert overview_of([])["worst"] is None


def test_the_heat_map_counts_what_the_tables_count():
    tables, known = results(2, 40, 1, 60, 6)
    rows = tables.clauses
    for row in overview.view(tables, known, looks(tables.runs["run"].iloc[:2]))["areas"]:
        for cell in row["cells"]:
            mine = rows[(rows["area"] == row["area"]) & (rows["run"] == cell["run"])]
            tried = mine[~mine["outcome"].isin(UNSUPPORTED)]
            bad = tried[~tried["outcome"].isin(HELD)]
            assert cell["tried"] == len(tried)
            assert {level: count for count, level in cell["failing"]} == bad["level"].value_counts().to_dict()
            share = len(bad) / len(tried) if len(tried) else 0
            assert cell["heat"] == (share > 0) + (share > 0.05) + (share > 0.2)


def test_the_worst_error_is_the_largest_share_of_a_budget():
    tables, known = results(2, 40, 1, 60, 6)
    errors = tables.errors.assign(error=0.5, budget=4.0, unit="ULP")
    errors.loc[errors.index[3], ["error", "budget"]] = 0.4, 0.5  # smaller, and a larger share
    made = dataclasses.replace(tables, errors=errors)
    cards = overview.view(made, known, looks(tables.runs["run"].iloc[:2]))["ranked"]
    worst = {card["run"]: card["precision"]["share"] for card in cards}
    assert sorted(worst.values()) == [0.125, 0.8]


@slow
def test_schedules_that_an_implementation_departs_from_come_first_and_the_others_are_folded(written):
    tables, known = results(4, 80, 3, 2000, 40)
    rows = tables.schedules
    right = rows["case"].isin(sorted(rows["case"].unique())[::2])
    rows = rows.assign(measured=rows["measured"].where(~right, rows["specified"]))
    tab = written(dataclasses.replace(tables, schedules=rows), known, "schedules")
    figures = tab.locator("section:visible figure").all()
    departs = [figure.locator(".bad").count() > 0 for figure in figures]
    assert len(figures) > sum(departs) > 0
    assert departs == [figure.is_visible() for figure in figures] == sorted(departs, reverse=True)


@slow
def test_errors_above_the_budget_come_first(watched):
    tab = watched().go("precision")
    rows = tab.locator("section:visible table tbody tr")
    above = [row.locator(".bad").count() > 0 for row in rows.all()]
    assert above == sorted(above, reverse=True)
    named = tab.locator("section:visible > ul:not(.keys) li").all_inner_texts()
    assert bool(named) == any(above)
    for text in named:
        count = int(re.search(r"above the budget in (\d+) of", text)[1])
        run = text.split(" is above")[0].strip()
        column = tab.locator("section:visible table thead th").all_inner_texts().index(run)
        assert (
            sum(row.locator(":is(th, td)").nth(column).locator(".bad").count() for row in rows.all()) == count
        )


@slow
@pytest.mark.parametrize(("unit", "alarm"), [("s", False), ("GB/s", False), ("of peer", True), ("B", True)])
def test_only_bytes_and_ratios_to_a_peer_are_alarms(written, unit, alarm):
    tables, known = results(2, 40, 2, 60, 40)
    ours = tables.history["parameters"].isin(["rows=1", "rows=3"])
    other = tables.history[ours].assign(unit=unit)
    larger = tables.history[tables.history["parameters"] == "rows=3"].assign(parameters="time")
    later = larger.assign(value=larger["value"].where(larger["value"] < 0.0125, 1.0), low=np.nan, high=np.nan)
    history = pd.concat([later, other])
    tab = written(dataclasses.replace(tables, history=history), known, "history")
    first = tab.locator("figure:visible").first
    assert first.locator("figcaption small").inner_text() == ("rows=3" if alarm else "time")
    assert first.locator(".bad, .good").count() == alarm


@slow
def test_a_step_down_is_worse_where_higher_is_better(written):
    tables, known = results(2, 40, 2, 60, 40)
    drop = tables.history[tables.history["parameters"] == "rows=3"]
    drop = drop.assign(value=1 / drop["value"], unit="GB/s", low=np.nan, high=np.nan)
    tab = written(dataclasses.replace(tables, history=drop), known, "history")
    assert re.search(r"-3\d\.\d%, worse at ", tab.locator("figure:visible .notes").inner_text())
