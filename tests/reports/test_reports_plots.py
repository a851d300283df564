"""Plots of a report: written as files, drawn whatever the numbers are, named for screen readers; steps."""

import dataclasses
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from reports_data import HOSTILE, results

from keyedopt.reports import page
from keyedopt.reports.page import traffic
from keyedopt.reports.page.figures import looks
from keyedopt.reports.page.history import detect

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

pytest_plugins = "watching"  # its fixtures


@slow
def test_plots_are_written_as_png_and_svg(tmp_path):
    tables, known = results(3, 40, 2, 60, 6)
    page.write(tables, known, tmp_path, plots=True)
    svgs, pngs = ({path.stem for path in (tmp_path / "plots").glob(f"*.{kind}")} for kind in ("svg", "png"))
    assert svgs == pngs
    assert {"schedule-1", "precision-1", "speed-1", "traffic-1", "history-1"} <= svgs
    for name in svgs:
        ElementTree.parse(tmp_path / "plots" / f"{name}.svg")


@slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 0.0])
def test_odd_numbers_are_drawn_and_nothing_is_warned_of(tmp_path, odd):
    tables, known = results(2, 40, 2, 60, 6)
    columns = {
        "errors": ["error", "budget"],
        "schedules": ["specified", "measured"],
        "speeds": ["ratio", "low", "high", "noise", "bandwidth", "seconds_median"],
        "history": ["value", "low", "high"],
        "records": ["value"],
    }
    made = {name: getattr(tables, name).assign(**dict.fromkeys(some, odd)) for name, some in columns.items()}
    made["errors"] = made["errors"].assign(rows=0)
    made["schedules"] = made["schedules"].query("iteration > 2")
    page.write(dataclasses.replace(tables, **made), known, tmp_path)


@pytest.mark.complete
@pytest.mark.filterwarnings("error")
def test_a_name_that_the_font_of_plots_lacks_is_shown_as_escapes(tmp_path):
    name = next(text for text in HOSTILE if "日本語" in text)
    tables, known = results(1, 40, 2, 60, 6, text=[name])
    page.write(tables, known, tmp_path, plots=True)
    assert name[:3] in (tmp_path / "index.html").read_text(encoding="utf-8")
    text = (tmp_path / "plots" / "speed-1.svg").read_text(encoding="utf-8")
    assert "日" not in text
    assert r"\u65e5" in text


def test_lines_of_traffic_that_coincide_are_drawn_inside_each_other():
    tables, _ = results(3, 40, 2, 60, 6)
    ours = tables.records["clause"] == "SHARD-029"
    third = tables.records["run"] == tables.runs["run"].iloc[2]
    equal = tables.records["value"].mask(ours & ~third, 16.0)
    made = dataclasses.replace(tables, records=tables.records.assign(value=equal))
    drawn = looks(tables.runs["run"].iloc[:3])
    (plot,) = traffic.view(made, drawn, None)["pictures"]
    widths = {}
    for colour, width in re.findall(r'stroke="(var\(--s\d\))" stroke-width="([\d.]+)"', plot.svg):
        widths[colour] = max(float(width), widths.get(colour, 0))
    first, second, apart = (widths[f"var(--s{index})"] for index in range(3))
    assert first > second + 2
    assert second == apart


def test_a_plot_says_in_words_what_it_shows(sites):
    text = sites["plain"].read_text(encoding="utf-8")
    plots = re.findall(r'<svg class="plot".*?</svg>', text, flags=re.S)
    assert len(plots) > 20
    for plot in plots:
        names = re.search(r'aria-labelledby="(\S+) (\S+)"', plot)
        assert f'<title id="{names[1]}">' in plot
        assert len(re.search(f'<desc id="{names[2]}">(.*?)</desc>', plot)[1]) > 10
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_a_plot_of_speeds_has_its_numbers_at_both_ends(sites):
    text = sites["plain"].read_text(encoding="utf-8")
    plot = text[text.index("Speed against peers") :].partition("</svg>")[0]
    assert plot.count(">1×<") == 2


@pytest.mark.complete
def test_the_page_is_small(tmp_path):
    """Ten implementations of 500 clauses: the failing cases are shortened until it fits."""
    tables, known = results(10, 500, 4, 20_000, 60)
    assert page.write(tables, known, tmp_path).stat().st_size < 3_000_000


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ([1.0] * 30, []),
        ([1.0] * 15 + [1.3] * 15, [15]),
        ([1.0] * 10 + [2.0] * 10 + [1.0] * 10, [10, 20]),
        ([1.0] * 10 + [9.0] + [1.0] * 10, []),
        ([1.0, 2.0], []),
    ],
)
def test_steps_are_where_the_level_changes(values, steps):
    noise = 0.004 * np.sin(np.arange(len(values)) * 7.3)
    assert detect(np.array(values) + noise) == steps


@slow
def test_more_pictures_than_the_page_has_room_for_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("keyedopt.reports.page.precision.PICTURES", 1)
    text = page.write(*results(2, 80, 3, 2000, 40), tmp_path).read_text(encoding="utf-8")
    groups = text.count("Against steps, ") + text.count("Against the gradients of one row")
    assert len(re.findall(r'id="precision-\d+-title"', text)) == groups
    assert "more are not drawn, to keep the page small" in text
