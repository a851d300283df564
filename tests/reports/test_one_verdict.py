"""Command line, page, badge, Markdown and JUnit give the same verdict, and show how much was checked."""

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from generated_results import AREAS, drawn, musts, whole
from sampling import chosen

from keyedopt.cli.summary import show, show_gate
from keyedopt.conformance import spec
from keyedopt.conformance.results import DEFINITIONS, output
from keyedopt.conformance.results.verdict import WORDS, judge

ROOT = Path(__file__).parents[2]
#: Clauses and musts of the area `wrapper`.
MUSTS, ALL = musts("wrapper"), len(spec.areas()["wrapper"].clauses)
OF = len(MUSTS)
COMBINED = len(spec.areas()["combined"].clauses)


def lost(*names):
    """Return outcomes of clauses that could not be checked."""
    return dict.fromkeys(names, "unsupported")


def said(clauses, of_musts, asked=ALL, of=OF):
    return f"checked {clauses} of {asked} clauses, {of_musts} of {of} musts on cpu"


#: Results, each with its verdict, how much of it was checked, and the gate.
EXAMPLES = {
    "everything": (whole(), "conformant", said(ALL, OF), "green"),
    "no-musts": (whole(outcomes={"must": "unsupported"}), "not conformant", said(ALL - OF, 0), "red"),
    "one-must": (whole(outcomes=lost(*MUSTS[1:])), "partly checked", said(ALL - OF + 1, 1), "green"),
    "all-but-one": (whole(outcomes=lost(MUSTS[0])), "partly checked", said(ALL - 1, OF - 1), "green"),
    "no-shoulds": (whole(outcomes={"should": "unsupported"}), "conformant", said(OF + 1, OF), "green"),
    "known": (whole(outcomes={MUSTS[0]: "known"}), "not conformant", said(ALL, OF), "green"),
    "missing": (whole(outcomes={MUSTS[0]: None}), "not conformant", said(ALL - 1, OF - 1), "red"),
    "unexpected": (whole(outcomes={MUSTS[0]: "unexpected-pass"}), "conformant", said(ALL, OF), "red"),
    "error": (whole(outcomes={"should": "error"}), "conformant", said(ALL, OF), "red"),
    "no-claims": (whole(areas=()), "no verdict", said(0, 0, 0, 0), "red"),
    "required": (whole(options={"require_areas": ["keyed"]}), "conformant", said(ALL, OF), "red"),
    "required-lost": (
        whole(outcomes=lost(MUSTS[0]), options={"require_areas": ["wrapper"]}),
        *("partly checked", said(ALL - 1, OF - 1), "red"),
    ),
    "one-blank-area": (
        whole(areas=("wrapper", "combined"), outcomes=lost(*musts("combined"))),
        "not conformant",
        said(ALL + COMBINED - len(musts("combined")), OF, ALL + COMBINED, OF + len(musts("combined"))),
        "red",
    ),
    "a-part": (
        whole(areas=AREAS, options={"areas": ["wrapper"]}),
        *("conformant (areas wrapper only)", said(ALL, OF), "green"),
    ),
    "a-part-fails": (
        whole(outcomes={MUSTS[0]: "fail"}, options={"dtypes": ["float32"]}),
        *("not conformant (dtypes float32 only)", said(ALL, OF), "red"),
    ),
    "hostile": (
        whole(options={"dtypes": ["`|<b>"]}),
        *("conformant (dtypes ???b? only)", said(ALL, OF), "green"),
    ),
}
GENERATED = [drawn(seed) for seed in range(40)]
RESULTS = {
    **{name: (whole_, "acme") for name, (whole_, *_) in EXAMPLES.items()},
    **{made.implementation["name"]: (made, made.implementation["name"]) for made in GENERATED},
}


@pytest.fixture(scope="module")
def reported(request, tmp_path_factory):
    """Write the results of the chosen tests, and a report of all; return the folders of both."""
    from keyedopt.cli import report

    folder, site = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("site")
    wanted = {*EXAMPLES, *(made.implementation["name"] for made in chosen(request, "made"))}
    for name, (made, _) in RESULTS.items():
        if name not in wanted:
            continue
        about = {**made.implementation, "name": name}
        made = type(made)(**{**vars(made), "implementation": about})
        for suffix in output.FORMATS:
            output.write(made, folder / f"{name}{suffix}")
    forms = ["html", "markdown", "badge", "csv"]
    report.report([folder], site, forms, False, "", lambda why: pytest.fail(why))
    return folder, site


def of_command(made, capsys):
    show(made, judge(made))
    show_gate(made, judge(made), None)
    *_, line, gate = capsys.readouterr().out.splitlines()
    verdict, checked = re.search(r"\): (.*); (checked \d.*)$", line).groups()
    return verdict, checked, re.match(r"gate: (\w+)", gate)[1]


def of_page(site, name):
    text = (site / "index.html").read_text(encoding="utf-8")
    card = re.search(rf'<article class="card" aria-label="{name} 1.2.3">(.*?)</article>', text, re.S)[1]
    verdict = re.search(r'<span class="chip [a-z]+">(.*?)</span>', card)[1]
    checked, _, gate = re.search(r"<small>(checked .*?)</small>", card)[1].partition("; gate ")
    return html.unescape(verdict), checked, gate


def of_badge(site, name):
    root = ElementTree.parse(site / f"{name}-1.2.3.svg").getroot()
    label = root.get("aria-label").removeprefix(f"keyedopt: {name} 1.2.3: ")
    return tuple(label.split(" | ")[:2])


def of_report(site, name):
    text = (site / "report.md").read_text(encoding="utf-8")
    cells = re.search(rf"^\| `{name} 1.2.3` \| (.*)$", text, re.M)[1].split(" | ")
    return cells[0], cells[2], cells[1]


def written(folder, name, suffix):
    paths = [folder / f"{name}{partial}{suffix}" for partial in ("", ".partial")]
    return next(path for path in paths if path.exists())


def of_markdown(folder, name):
    text = written(folder, name, ".md").read_text(encoding="utf-8")
    verdict = re.match(r"## `[\w-]+` `1.2.3`: (.*)$", text, re.M)[1]
    checked, gate = re.search(r"^Checked (.*?)\. Gate (\w+);", text, re.M).groups()
    return verdict, f"checked {checked}", gate


def of_junit(folder, name):
    root = ElementTree.parse(written(folder, name, ".xml"))
    values = {each.get("name"): each.get("value") for each in root.iter("property")}
    failed = root.find("testsuite[@name='gate']/testcase/failure") is not None
    assert failed == (values["gate"] == "red")
    return values["verdict"], values["checked"], values["gate"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gets_its_verdict_everywhere(name, reported, capsys):
    folder, site = reported
    made, *expected = EXAMPLES[name]
    expected = tuple(expected)
    assert of_command(made, capsys) == expected
    assert of_page(site, name) == expected
    assert of_badge(site, name) == expected[:2]
    assert of_report(site, name) == expected
    assert of_markdown(folder, name) == expected
    assert of_junit(folder, name) == expected


@pytest.mark.complete(sample=6)
@pytest.mark.parametrize("made", GENERATED, ids=lambda made: made.implementation["name"])
def test_a_generated_result_gets_the_same_verdict_everywhere(made, reported, capsys):
    folder, site = reported
    name = made.implementation["name"]
    expected = of_command(made, capsys)
    assert of_markdown(folder, name) == expected
    assert of_junit(folder, name) == expected
    if made.complete:
        assert of_page(site, name) == expected
        assert of_badge(site, name) == expected[:2]
        assert of_report(site, name) == expected
    else:
        assert expected[0] == "PARTIAL: the run was interrupted, there is no verdict"
        text = (site / "report.md").read_text(encoding="utf-8")
        assert re.search(rf"{name}.partial.json`: `it is of an interrupted run", text)


def test_generated_results_have_every_verdict():
    """The comparison above says nothing of a verdict that no result has."""
    complete = [judge(made) for made in GENERATED if made.complete]
    assert {verdict.word for verdict in complete} == set(WORDS)
    assert {verdict.green for verdict in complete} == {True, False}
    assert any(verdict.scope for verdict in complete)
    assert len(complete) < len(GENERATED)


@pytest.mark.parametrize("drawn_result", GENERATED[:20], ids=lambda made: made.implementation["name"])
def test_the_verdict_follows_the_rule(drawn_result):
    """The rule, written once more and without any code of the verdict."""
    best = ("error", "fail", "known", "unexpected-pass", "pass", "observed", "unsupported")
    options, claimed = drawn_result.options, drawn_result.implementation["areas"]
    outcomes, caused = {}, {}
    for case in drawn_result.cases:
        outcomes.setdefault(case.clauses[0], []).append(case.outcome)
        if case.outcome in ("fail", "error", "known", "unexpected-pass"):
            caused[case.clauses[0]] = caused.get(case.clauses[0], True) and bool(case.cause)
    worst = {clause: min(seen, key=best.index) for clause, seen in outcomes.items()}
    asked = [
        clause
        for clause in spec.clauses().values()
        if clause.area in claimed
        and clause.area in (options.get("areas") or claimed)
        and clause.id in (options.get("clauses") or spec.clauses())
        and not clause.accelerator  # the results are of a CPU
    ]
    seen = {}
    for clause in asked:
        if clause.level == "must":
            seen.setdefault(clause.area, []).append(worst.get(clause.id))
    bad = {clause.id for clause in asked if clause.level == "must"}
    bad = {clause for clause in bad if worst.get(clause) in ("error", "fail", "known", None)}
    failed = any(not caused.get(clause, False) for clause in bad)
    lost = [area.count("unsupported") for area in seen.values()]
    none = any(count == len(area) for count, area in zip(lost, seen.values(), strict=True))
    if not drawn_result.complete or all(worst.get(clause.id) == "unsupported" for clause in asked):
        expected = "no verdict"
    elif failed or none:
        expected = "not conformant"
    elif any(caused.values()):
        expected = "could not be judged"
    else:
        expected = "partly checked" if any(lost) else "conformant"
    assert judge(drawn_result).word == expected


def test_level_verdict_and_gate_are_defined_in_the_same_words_everywhere(reported, run_line):
    def words(text):
        return " ".join(re.sub(r"[│*_`>#]", " ", html.unescape(text)).split())

    said = {"page": (reported[1] / "index.html").read_text(encoding="utf-8")}
    said["--help"] = run_line("check", "--help").stdout
    for name in ("README.md", "docs/concepts.md", "conformance/README.md"):
        said[name] = (ROOT / name).read_text(encoding="utf-8")
    for place, text in said.items():
        missing = [term for term, meaning in DEFINITIONS.items() if words(meaning) not in words(text)]
        assert missing == [], place
