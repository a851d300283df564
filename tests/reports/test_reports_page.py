"""The page in a browser: views, filters, links; strangers' text is text; nothing is asked of a network."""

import dataclasses
import os
import re
import subprocess
import sys

import pandas as pd
import pytest
from reports_data import clauses, results
from watching import shown

from keyedopt.conformance.results.verdict import UNSUPPORTED
from keyedopt.reports import page
from keyedopt.reports.changes import WORDS, Run, verdict_changes
from keyedopt.reports.diff import only
from keyedopt.reports.page.embedded import as_json
from keyedopt.reports.tables import tables_of
from keyedopt.tools.reaction import KEYS

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=4, spread=True)

pytest_plugins = "watching"  # its fixtures
VIEWS = [view.lower() for view in page.VIEWS]


# --- the views --------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("site", ["plain", "hostile", "empty"])
def test_every_view_opens_alone(watched, site):
    one = watched(site)
    tab = one.go("")
    assert tab.locator("main > section:visible").count() == 1
    for number, name in enumerate(page.VIEWS):
        tab.get_by_role("navigation").get_by_role("link", name=name).click()
        visible = tab.locator("main > section:visible")
        visible.get_by_role("heading", level=2, name=name, exact=True).wait_for()  # the hash changes later
        assert tab.locator("nav a[aria-current]").inner_text() == name
        assert (visible.locator(".empty:visible").count() > 0) == (site == "empty"), VIEWS[number]
    tab.go_back()
    tab.get_by_role("heading", level=2, name=page.VIEWS[-2], exact=True).wait_for()


def test_what_is_missing_names_the_command_that_brings_it(watched):
    tab = watched("empty").go("speed")
    assert tab.locator(".empty:visible code").inner_text().startswith("keyedopt bench")


def test_the_overview_counts_what_the_tables_count(watched, sites):
    tables, _ = results(4, 80, 3, 2000, 40)
    tab = watched().go("overview")
    cards = tab.locator(".card")
    assert cards.count() == 4
    mine, levels = tables.clauses["run"] == "library0 1.0", tables.clauses["level"]
    first = tables.clauses[mine & (levels != "recorded")]
    asked = first[~first["outcome"].isin(UNSUPPORTED)]
    held = int((asked["outcome"] == "pass").sum())
    said = {card.get_attribute("aria-label"): " ".join(card.inner_text().split()) for card in cards.all()}
    fails = [row for row in tab.locator(".ranked tbody tr").all_inner_texts() if "library0 1.0" in row]
    counts = re.findall(r"(\d+) of (\d+) (?:must|should)", fails[0])
    missed, of = (sum(map(int, side)) for side in zip(*counts, strict=True))
    assert (missed, of) == (len(asked) - held, len(asked))
    names = [name.split() for name in tab.locator(".ranked tbody th").all_inner_texts()]
    assert [" ".join(name) for name in names] == list(said), "the cards have the order of the table"
    second = tables.runs[tables.runs["kind"] == "conformance"]["run"].iloc[1]
    assert "1 entry of the list of known failures is not true any more" in said[second]
    assert [name for name, text in said.items() if "expired 1 " in text] == [second]
    limits = (
        "restricted, as its description says: step takes no closure (Adam); one group of parameters (SGD)"
    )
    assert [name for name, text in said.items() if limits in text] == [second]
    assert "it is truncated" in tab.locator(".note").first.inner_text()


# --- the matrix -------------------------------------------------------------------------------------


@slow
def test_filters_leave_what_they_say(watched):
    _, known = results(4, 80, 3, 2000, 40)
    tab = watched().go("matrix")
    assert len(shown(tab)) == 80
    tab.locator("#filter-area").select_option("warmup")
    tab.locator("#filter-level").select_option("must")
    wanted = [clause.id for clause in known.values() if (clause.area, clause.level) == ("warmup", "must")]
    assert sorted(shown(tab, wanted)) == sorted(wanted)
    tab.get_by_role("button", name="Reset").click()
    tab.get_by_role("searchbox").fill("statement 17 sentences")
    assert shown(tab, ["COMBINED-017"])
    tab.get_by_role("searchbox").fill("keyed-008")
    assert shown(tab, ["KEYED-008"])
    tab.get_by_role("searchbox").fill("no such thing")
    tab.locator("#nothing").wait_for(state="visible")


def test_outcomes_are_filtered_by_implementation(watched):
    tables, _ = results(4, 80, 3, 2000, 40)
    tab = watched().go("matrix&outcome=known&run=library1%201.2")
    rows = tables.clauses
    wanted = rows[(rows["run"] == "library1 1.2") & (rows["outcome"] == "known")]["clause"]
    assert sorted(shown(tab)) == sorted(wanted)
    assert tab.locator("#filter-outcome").input_value() == "known"


@slow
def test_a_link_opens_its_clause_with_the_failing_cases(watched):
    tables, known = results(4, 80, 3, 2000, 40)
    failing = tables.cases[tables.cases["outcome"] == "fail"].iloc[0]
    tab = watched().go(f"clause={failing['clause']}")
    detail = tab.locator(".detail:visible")
    text = detail.inner_text()
    assert known[failing["clause"]].statement in text
    assert "torchrec.optim: KeyedOptimizer" in text
    assert failing["case"] in text
    assert " ".join(failing["expected"].split()) in " ".join(text.split())
    assert f"keyedopt replay results/library0-1.0.json '{failing['case']}' --run" in text
    assert tab.evaluate("document.activeElement.textContent") == failing["clause"]
    box = tab.locator("tr", has=tab.get_by_role("button", name=failing["clause"])).first.bounding_box()
    assert 0 < box["y"] < 900


@slow
def test_a_clause_opens_and_closes_by_keyboard(watched):
    tab = watched().go("matrix")
    button = tab.get_by_role("button", name="KEYED-000")
    button.focus()
    tab.keyboard.press("Enter")
    assert button.get_attribute("aria-expanded") == "true"
    assert tab.evaluate("location.hash") == "#clause=KEYED-000"
    tab.keyboard.press("Enter")
    assert tab.locator(".detail").count() == 0
    tab.keyboard.press("Enter")
    tab.keyboard.press("Escape")
    assert tab.locator(".detail").count() == 0
    tab.keyboard.press("ArrowDown")
    assert not button.evaluate("one => one === document.activeElement")
    tab.keyboard.press("ArrowUp")
    assert button.evaluate("one => one === document.activeElement")


@slow
def test_everything_is_reached_by_tab(watched):
    tab = watched().go("overview")
    reached = []
    for _ in range(12):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.textContent.trim()"))
    assert reached[0] == "Skip to the content"
    assert reached[1:9] == list(page.VIEWS)


def test_implementations_that_behave_alike_have_the_same_letter(watched):
    tables, _ = results(4, 80, 3, 2000, 40)
    tab = watched().go("matrix&level=recorded")
    rows = tables.records
    clause = rows["clause"].iloc[0]
    texts = [
        tuple(rows[(rows["run"] == run) & (rows["clause"] == clause)].sort_values("case")["text"])
        for run in tables.runs["run"].iloc[:4]
    ]
    row = tab.locator("tr", has=tab.get_by_role("button", name=clause))
    letters = row.locator("td.o").all_inner_texts()
    assert [texts.index(text) for text in texts] == [letters.index(letter) for letter in letters]


@slow
def test_differences_compare_a_chosen_pair(watched):
    tables, _ = results(4, 80, 3, 2000, 40)
    tab = watched().go("differences")
    assert tab.locator("#from").locator("option:checked").inner_text() == "library0 1.0"
    assert tab.locator("#to").locator("option:checked").inner_text() == "library0 1.1"
    tab.locator("#to").select_option("library1 1.3")
    one, other = (Run.of(only(tables, run)) for run in ("library0 1.0", "library1 1.3"))
    wanted = {
        change.what: WORDS[change.worse]
        for change in verdict_changes(one, other, list(other.cases))
        if change.worse is not None
    }
    lines = tab.locator("#changes .verdicts:visible tbody tr").all()
    assert {
        line.locator("th").inner_text(): line.locator("td").nth(2).inner_text() for line in lines
    } == wanted
    assert set(wanted.values()) == {"worse", "better"}
    tab.get_by_role("button", name="Swap").click()
    assert tab.locator("#changes .lead").inner_text().startswith("From library1 1.3 to library0 1.0")


@slow
def test_a_common_cause_is_a_line_of_its_card(written):
    tables, known = results(1, 5, 1, 5, 1)
    runs = tables.runs.assign(causes="Adam could not be judged: no <kernel>\nSGD neither")
    tab = written(dataclasses.replace(tables, runs=runs), known, "overview")
    said = tab.locator("article.card .bad small").all_inner_texts()
    assert said == ["Adam could not be judged: no <kernel>", "SGD neither"]


@slow
def test_a_list_of_known_failures_makes_no_difference(written):
    tables, known = results(2, 40, 2, 60, 6)
    mine = tables.clauses[tables.clauses["run"] == "library0 1.0"]
    failed = mine["outcome"].isin(["fail", "error"])
    listed = mine.assign(
        run="library0 1.1",
        outcome=mine["outcome"].mask(failed, "known"),
        known=mine["known"] + mine["failed"].where(failed, 0),
        failed=mine["failed"].mask(failed, 0),
    )
    cases = tables.cases[tables.cases["run"] == "library0 1.0"]
    bad = cases["outcome"].isin(["fail", "error"])
    cases = [cases, cases.assign(run="library0 1.1", outcome=cases["outcome"].mask(bad, "known"))]
    changed = dataclasses.replace(tables, clauses=pd.concat([mine, listed]), cases=pd.concat(cases))
    tab = written(changed, known, "differences")
    assert failed.any()
    assert "0 verdicts are worse, 0 better, 0 changed" in tab.locator("#changes .lead").inner_text()


@slow
def test_identical_failures_of_several_versions_are_shown_once(written):
    tables, known = results(2, 40, 2, 60, 6)
    both = {}
    for name in ("clauses", "cases"):
        mine = getattr(tables, name)
        mine = mine[mine["run"] == "library0 1.0"]
        both[name] = pd.concat([mine, mine.assign(run="library0 1.1")])
    clause = both["cases"][both["cases"]["outcome"] == "fail"]["clause"].iloc[0]
    tab = written(dataclasses.replace(tables, **both), known, f"clause={clause}")
    summaries = tab.locator(".detail:visible .part").first.locator("summary").all_inner_texts()
    assert len(summaries) == 1
    assert "library0 1.0, library0 1.1" in summaries[0]


@slow
def test_records_that_differ_only_far_behind_still_differ(written):
    tables, known = results(2, 40, 1, 60, 6)
    first, second = tables.runs["run"].iloc[:2]
    mine = tables.records[tables.records["run"] == first].assign(text="x" * 900)
    theirs = mine.assign(run=second, text="x" * 899 + "y")
    tab = written(
        dataclasses.replace(tables, records=pd.concat([mine, theirs])), known, "matrix&level=recorded"
    )
    assert {"A", "B"} <= set(tab.locator("#clauses td.o span").all_inner_texts())


@slow
def test_areas_are_those_of_the_clauses_in_whatever_order(written):
    tables, known = results(2, 40, 2, 60, 6)
    some = tables.clauses[tables.clauses["area"] != "clipping"]
    about = dict(reversed(known.items()))
    tab = written(dataclasses.replace(tables, clauses=some), about, "matrix&area=warmup")
    assert sorted(shown(tab)) == sorted(name for name in known if known[name].area == "warmup")
    tab.get_by_role("button", name="Reset").click()
    assert set(shown(tab)) == set(some["clause"])  # a clause that nobody was asked is not listed


def test_a_step_in_history_links_to_its_commit(watched):
    tab = watched().go("history")
    first = tab.locator("figure:visible").first
    assert "rows=3" in first.inner_text()
    link = first.get_by_role("link")
    assert link.get_attribute("href") == f"https://example.org/commit/{20:040x}"


def test_the_gpu_has_its_place_in_history_until_there_is_one(tmp_path):
    tables, known = results(2, 40, 2, 60, 6)
    runs = tables.runs.assign(kind=tables.runs["kind"].replace("bench", "asv"))
    said = "Empty: no result in these files was measured over commits on a GPU."
    for gpu in ("NVIDIA H100", None):
        made = dataclasses.replace(tables, runs=runs.assign(gpu=gpu))
        text = page.write(made, known, tmp_path).read_text(encoding="utf-8")
        assert (said in text) == (gpu is None)


def test_speeds_are_shown_by_device_with_memory_and_the_first_step(watched):
    tab = watched().go("speed")
    assert tab.locator("h3:visible").all_inner_texts() == ["8 cores (cpu)", "NVIDIA H200 (cuda)"]
    assert tab.locator("figure:visible").count() == 4
    first = tab.locator("table:visible").nth(1).locator("tbody tr").first
    heads = tab.locator("table:visible").nth(1).locator("thead th").all_inner_texts()
    cells = dict(zip(heads[1:], first.locator("td").all_inner_texts(), strict=True))
    cells = {head: " ".join(text.split()) for head, text in cells.items()}
    assert cells["implementation"].endswith(" native")
    assert cells["threads"] == "2 / 1"
    assert (cells["extra memory"], cells["first step"]) == ("1 MB", "20 ms")
    assert (cells["throughput"], cells["noise"]) == ("10 GB/s bound: 4×", "±4 %")


@slow
def test_no_column_of_the_speeds_is_cut_and_a_phone_scrolls_beside_the_task(watched):
    for width, scrolls in ((1440, False), (390, True)):
        tab = watched(viewport={"width": width, "height": 900}).go("speed")
        box = "document.querySelector('.scroll:has(> .speeds)')"
        assert tab.evaluate(f"{box}.scrollWidth > {box}.clientWidth") == scrolls
        assert tab.locator(".speeds tbody th").first.bounding_box()["width"] < width / 2


# --- strangers' text --------------------------------------------------------------------------------


@slow
def test_hostile_text_is_shown_and_does_not_run(watched):
    one = watched("hostile")
    for where in [*VIEWS, *(f"clause={clause}" for clause in clauses(40))]:
        tab = one.go(where)
    everything = tab.evaluate("document.body.textContent")
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("main img, main script, svg[onload]").count() == 0
    assert tab.locator("a[href^='javascript']").count() == 0
    for text in ("</script><script>window.hacked = 1</script>", "{{ 7 * 7 }}", "日本語 עברית", "\\u2028"):
        assert text in everything
    for text in ("\\u202egnp.exe", "\\u2066<b>\\u2069", "\\u200b", "\\x1b[31m"):
        assert text in everything  # what turns text around, or hides in it, is an escape
    assert not re.search("[\u202e\u2066\u2069\u200b\ufeff\x1b\x07]", everything)
    assert "x" * 5000 not in everything


def test_data_in_the_page_cannot_end_its_element():
    text = as_json({"a": "</script><!--<script>", "b": "\u2028\ud800"})
    assert "<" not in text
    assert text.isascii()


def test_the_policy_allows_this_script_and_nothing_else(sites):
    text = sites["plain"].read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src &#39;sha256-") or "default-src" in policy
    assert "unsafe" not in policy
    assert "style=" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)


def test_an_address_for_commits_is_checked(tmp_path):
    with pytest.raises(ValueError, match="begins with https://"):
        page.write(tables_of({}), {}, tmp_path, commit_url="javascript:alert({commit})")
    assert list(tmp_path.iterdir()) == []


# --- for everybody ----------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_an_accessibility_checker_finds_nothing(watched, width, scheme, sample):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    one = watched(color_scheme=scheme, viewport={"width": width, "height": 900})
    for where in sample.choose([*VIEWS, "clause=KEYED-000"], 4):
        tab = one.go(where)
        found = axe.run(tab)
        assert found.violations_count == 0, f"{where}: {found.generate_report()}"


@slow
def test_a_phone_scrolls_tables_and_not_the_page(watched):
    one = watched(viewport={"width": 390, "height": 844})
    for where in [*VIEWS, "clause=KEYED-000"]:
        tab = one.go(where)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, where
        for link in tab.locator("nav a").all():
            box = link.bounding_box()
            assert 0 <= box["x"] <= 390 - box["width"], (where, link.inner_text())
    tab = one.go("matrix")
    scroll = "document.querySelector('.tall .scroll')"
    assert tab.evaluate(f"{scroll}.scrollWidth <= {scroll}.clientWidth"), (
        "statement and verdict without scrolling"
    )
    assert tab.locator("#clauses .statement").first.is_visible()
    assert tab.locator("#clauses td.o:not(.unsupported)").first.is_visible()
    for where, inside in (("overview", ".scroll:has(> .ranked)"), ("differences", ".behaviour")):
        box = one.go(where).locator(inside)
        assert box.evaluate("box => box.scrollWidth <= box.clientWidth"), f"{where} without scrolling"


@slow
def test_print_is_a_handout_of_every_view(watched):
    tab = watched().go("overview")
    pages = len(re.findall(rb"/Type\s*/Page\b", tab.pdf(format="A4")))
    assert pages <= 6 * tab.locator(".card").count()
    tab.emulate_media(media="print")
    assert tab.locator("main > section:visible").count() == len(VIEWS)
    assert not tab.get_by_role("navigation").is_visible()
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    bad = ":has(.fail, .error, .known, .unexpected-pass)"
    rows = tab.locator("#clauses tr:not(.detail):visible")
    assert rows.count() == tab.locator(f"#clauses tr:not(.detail){bad}").count() > 0


# --- how fast a filter is ---------------------------------------------------------------------------


def measure(path, **environment):
    command = [sys.executable, "-m", "keyedopt.tools.reaction", str(path), "--rounds", "1"]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.complete
def test_the_reaction_to_every_filter_is_measured(browser, sites):
    done = measure(sites["plain"])
    assert (done.returncode, done.stderr) == (0, "")
    said = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert said == [*KEYS, "all"]
    assert all(
        re.search(r": median \d+ ms, worst \d+ ms, of \d+ keys$", line) for line in done.stdout.splitlines()
    )


@pytest.mark.complete
def test_what_cannot_be_measured_is_said_in_one_line(browser, sites, tmp_path):
    (tmp_path / "playwright.py").write_text("raise ImportError", encoding="utf-8")
    here = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    for done, said in (
        (measure(sites["plain"], PYTHONPATH=here), "pip install 'keyedopt[browser]'"),
        (measure(sites["plain"], CHROMIUM="/nowhere"), "playwright install chromium"),
        (measure(sites["empty"]), "not a page of `keyedopt report` with clauses in it"),
        (measure(tmp_path / "none.html"), "not a page of `keyedopt report` with clauses in it"),
    ):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("keyedopt: ")
        assert done.stderr.count("\n") == 1
        assert said in done.stderr
