"""The documentation builds without a warning, its links lead somewhere, and its examples run."""

import functools
import html
import http.server
import re
import runpy
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from keyedopt import fused, reference
from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings

ROOT = Path(__file__).parents[1]

pytest_plugins = "watching"  # its browser


class Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[name] for name in ("id", "name") if attrs.get(name)}
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        elif tag in ("script", "img", "link", "iframe"):
            self.loads += [attrs[name] for name in ("src", "href") if attrs.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
    }


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    def log_message(self, *args):
        pass


@pytest.fixture
def address(site):
    """Serve the documentation: from files a browser would load no style sheets."""
    handler = functools.partial(Handler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


#: A page of each kind.
KINDS = (
    "index",
    "started",
    "concepts",
    "design",
    "api/fused",
    "api/reference",
    "clauses/keyed",
    "findings/torchrec",
    "tutorials/vendor",
    "howto/pipelines",
    "panel",
    "trust",
    "search",
)


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_an_accessibility_checker_finds_nothing(address, browser, scheme, width, sample):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    tab, said, asked = context.new_page(), [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    for kind in sample.choose(KINDS, 2):
        tab.goto(f"{address}/{kind}.html")
        found = axe.run(tab)
        assert found.violations_count == 0, f"{kind}: {found.generate_report()}"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, kind
    assert said == []
    assert [url for url in asked if not url.startswith(address)] == []
    context.close()


def test_copied_documents_link_findings_and_their_own_sections(pages):
    assert {"#optimizers-of-other-formulas", "findings/torchao.html#torchao-rows-share-blocks"} <= {
        *pages["panel.html"].links
    }
    assert "howto/clauses.html" in pages["contributing.html"].links


def test_the_versions_page_has_the_table_with_dates(site):
    page = (site / "versions.html").read_text(encoding="utf-8")
    rows = [re.findall(r"<td><p>(.*?)</p></td>", row) for row in re.findall(r"<tr.*?</tr>", page, re.S)[1:]]
    assert {row[0].rpartition(".")[0] for row in rows} >= {"2.11", "2.12", "2.13", "2.14", "2.15"}
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\d", row[2]) for row in rows)


def test_links_inside_lead_to_a_page_and_a_place(pages):
    wrong = []
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, place = link.partition("#")
            target = ((Path("/") / name).parent / path).resolve().as_posix()[1:] if path else name
            if path and not target.endswith(".html"):
                continue
            if target not in pages or (place and unquote(place) not in pages[target].ids):
                wrong.append((name, link))
    assert not wrong


@pytest.mark.parametrize("package", [reference, fused], ids=lambda package: package.__name__)
def test_the_api_pages_show_public_names_by_subject_and_nothing_internal(pages, package):
    made = runpy.run_path(str(ROOT / "docs" / "pages.py"))
    assert sorted(name for names in made["GROUPS"].values() for name in names) == sorted(fused.__all__)
    ids = pages[f"api/{package.__name__.rpartition('.')[2]}.html"].ids
    assert {name.lower().replace("_", "-") for name in package.__all__} <= ids
    shown = {place.rpartition(".")[2] for place in ids if place.startswith("keyedopt.")}
    assert "step" in shown
    assert shown & {*made["INTERNAL"]} == set()


def test_the_api_pages_show_types_defaults_and_ranges(site):
    page = (site / "api" / "fused.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page.partition('id="keyedopt.fused.AccumulateSGD"')[2]))
    for shown in ("lr: float | Tensor = 1e-3", "dampening – τ, at least 0", ">>> from keyedopt.fused import"):
        assert shown in text[:4000]
    assert "Return type" not in page, "text before a colon in Returns: is taken for a type"
    signatures = re.findall(r'<dt class="sig sig-object py" id="keyedopt[.\w]+">(.*?)</dt>', page, re.S)
    shown = [html.unescape(re.sub(r"<[^>]+>", "", one)) for one in signatures]
    classes = [one for one in shown if one.strip().startswith("class")]
    assert len(classes) >= 20
    assert [one for one in shown if "~" in one or "<factory>" in one] == []
    assert [one for one in classes if "*args" in one] == []


def test_nothing_is_loaded_from_elsewhere(pages):
    assert not [load for page in pages.values() for load in page.loads if re.match(r"(https?:)?//", load)]


def test_every_clause_and_finding_has_an_address(pages):
    for area in spec.areas().values():
        assert {clause.id.lower() for clause in area.clauses} <= pages[f"clauses/{area.name}.html"].ids
    for one in findings():
        assert one.path.stem.replace("_", "-") in pages[f"findings/{one.library}.html"].ids


@pytest.mark.parametrize(
    "name", ["README.md", "docs/started.md", "docs/howto/large_tables.md", "docs/howto/norms.md"]
)
def test_the_python_of_a_document_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    exec("\n".join(blocks), {})


def test_the_readme_is_short_and_its_links_lead_to_files():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / link).exists(), link


def test_reports_from_the_field_name_clauses_that_can_reject():
    text = (ROOT / "docs/field.md").read_text(encoding="utf-8")
    rejecting, _, without = text.partition("## Without a clause")
    rows = re.findall(r"^\| \[([\w.-]+/[\w.-]+)#(\d+)\]\((\S+)\) \| (.+) \| (.+) \|$", text, re.M)
    assert len(rows) == text.count("\n| [")
    assert len({row[:2] for row in rows}) == len(rows)
    for repository, number, address, _, _ in rows:
        assert address in {f"https://github.com/{repository}/{kind}/{number}" for kind in ("issues", "pull")}
    found = [row for row in rows if f"#{row[1]}]" in rejecting]
    assert len(found) >= 40
    for row in found:
        for clause in row[4].split():
            assert spec.clauses()[clause].level in ("must", "should"), clause
    assert set(re.findall(r"[A-Z]+-\d{3}", without)) <= set(spec.clauses())
