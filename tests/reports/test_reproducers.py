"""A failure convinces without keyedopt: the page has the scripts of known defects in itself."""

import json

from making import result

from keyedopt.cli.report import clauses
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results import model
from keyedopt.reports.load import load
from keyedopt.reports.page import render


def test_the_page_has_the_script_of_a_failing_clause_of_the_library(tmp_path):
    finding = next(one for one in findings() if one.library == "torchrec" and one.clauses)
    made = result({"clauses": finding.clauses[:1], "outcome": "fail", "expected": "a", "seen": "b"})
    texts = []
    for name in ("torchrec", "other"):
        made.implementation["name"] = name
        model.write(made, tmp_path / "x.json")
        texts.append(render(load([tmp_path / "x.json"], clauses()), clauses()))
    script = json.dumps(finding.path.read_text(encoding="utf-8"))[1:-1].replace("<", "\\u003c")
    assert script in texts[0]
    assert script not in texts[1]


def test_explain_names_the_scripts_of_a_clause(run_line):
    finding = next(one for one in findings() if one.library == "torchrec" and one.clauses)
    said = run_line("explain", finding.clauses[0]).stdout
    assert f"keyedopt findings {finding.path.stem}" in said
    assert str(finding.path) in said
