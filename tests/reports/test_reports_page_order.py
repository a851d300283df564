"""The page answers first: in every view, what is worst comes first."""

import dataclasses
import re

import numpy as np
import pandas as pd
import pytest
from reports_data import results

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
    musts = [int((re.search(r"(\d+) must", row.inner_text()) or [0, 0])[1]) for row in rows.all()]
    assert musts == sorted(musts, reverse=True)


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
