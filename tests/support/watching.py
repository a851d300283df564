"""Fixtures that open pages in a browser, and hold in the end that nothing was said or asked of a network."""

import os
import re
import shutil
from pathlib import Path

import pytest
from reports_data import HOSTILE, results

from keyedopt.reports import page
from keyedopt.reports.tables import tables_of
from keyedopt.tools.reaction import FLAGS

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"


@pytest.fixture(scope="module")  # of a process, only one may run at a time
def browser():
    """Start Chromium; skip where it is missing, unless it has to be there (CI)."""
    required = os.environ.get("KEYEDOPT_REQUIRE_CHROMIUM") == "1"
    if not Path(CHROMIUM).exists() and not required:
        pytest.skip("Chromium is not installed")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        if required:
            raise
        pytest.skip("playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="session")
def sites(tmp_path_factory):
    """Write pages: of ordinary results, of hostile ones, of none."""
    made = {
        "plain": results(4, 80, 3, 2000, 40),
        "hostile": results(len(HOSTILE), 40, 2, 600, 12, text=HOSTILE),
        "empty": (tables_of({}), {}),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in made}
    url = "https://example.org/commit/{commit}"
    return {name: page.write(*made[name], folders[name], commit_url=url) for name in made}


class Watched:
    """A page, and all that it says, throws or asks of the network."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**options)
        self.tab = self.context.new_page()
        self.said, self.asked = [], []
        self.path = path
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.said.append("a dialog"), dialog.dismiss()))
        self.context.route(re.compile(r"^(?!file:)"), self._refuse)
        self.tab.on("request", lambda request: self.asked.append(request.url))

    def _refuse(self, route):
        self.asked.append(route.request.url)
        route.abort()

    def go(self, where):
        self.tab.goto(f"{self.path.as_uri()}#{where}")
        return self.tab

    def quiet(self):
        """Hold that nothing was said and that nothing but the file was asked for."""
        assert self.said == []
        assert {url.partition("#")[0] for url in self.asked} == {self.path.as_uri()}


@pytest.fixture
def watched(browser, sites):
    """Open pages, and hold in the end that they were quiet."""
    opened = []

    def call(site="plain", **options):
        opened.append(Watched(browser, sites[site], **options))
        return opened[-1]

    yield call
    for one in opened:
        one.quiet()
        one.context.close()


@pytest.fixture
def written(browser, tmp_path):
    """Write a page of tables and open it, and hold in the end that it was quiet."""
    opened = []

    def call(tables, known, where):
        opened.append(Watched(browser, page.write(tables, known, tmp_path)))
        return opened[-1].go(where)

    yield call
    for one in opened:
        one.quiet()
        one.context.close()


def shown(tab, wanted=None):
    """Return the clauses that the matrix shows, as soon as they are as many as it says, or those wanted."""
    ids = """() => [document.getElementById("count").textContent, Array.from(document.querySelectorAll(
        "#clauses tr:not(.detail):not([hidden]) button"), button => button.textContent)]"""
    for _ in range(200):
        said, found = tab.evaluate(ids)  # a string as a function would be refused by the policy of the page
        if said.startswith(f"{len(found)} ") and (wanted is None or sorted(wanted) == sorted(found)):
            return found
        tab.wait_for_timeout(25)
    raise AssertionError(f"the matrix says {said}, and shows {len(found)} clauses")
