"""A result in the formats that others read: JUnit for CI, Markdown for a pull request."""

from pathlib import Path
from xml.etree import ElementTree

from keyedopt.conformance import spec
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.untrusted import clean, one_line
from keyedopt.conformance.results.verdict import (
    GREEN,
    failing,
    headline,
    judge,
    level_of,
    other_reasons,
    worst_of,
)

FORMATS = (".json", ".xml", ".md")


def write(result: Result, path: Path) -> Path:
    """Write a result in the format that the name of the file asks for; return where it is.

    A partial result goes beside the name that was asked for (``x.partial.json``), so that it is
    never taken for a complete one and replaces none.
    """
    target = path if result.complete else path.with_name(f"{path.stem}.partial{path.suffix}")
    if path.suffix == ".json":
        results.write(result, target)
        results.journal_path(path).unlink(missing_ok=True)
    else:
        results.write_atomically(target, junit(result) if path.suffix == ".xml" else markdown(result))
    return target


def junit(result: Result) -> str:
    """Return a result as JUnit XML: a suite for each area, a test for each case, and one for the gate."""
    name = one_line(result.implementation["name"])
    root = ElementTree.Element("testsuites", name=f"keyedopt {name} {result.implementation['version']}")
    for area in spec.areas().values():
        ids = {clause.id for clause in area.clauses}
        cases = [case for case in result.cases if case.clauses and case.clauses[0] in ids]
        if cases:
            tests = [_testcase(f"{name}.{area.name}", case) for case in cases]
            _suite(root, f"{name}.{area.name}", tests, result.started)
    gate = ElementTree.Element("testcase", classname="gate", name="gate")
    reasons = judge(result).reasons
    if reasons:
        ElementTree.SubElement(gate, "failure", message=one_line("; ".join(reasons)), type="red")
    _suite(root, "gate", [gate], result.started)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ElementTree.Element, name: str, tests: list[ElementTree.Element], started: str) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(tests)), timestamp=started)
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(test.find(tag) is not None for test in tests)))
    suite.set("time", f"{sum(float(test.get('time', 0)) for test in tests):.3f}")
    suite.extend(tests)


def _testcase(classname: str, case: Case) -> ElementTree.Element:
    test = ElementTree.Element(
        "testcase",
        classname=classname,
        name=one_line(f"{' '.join(case.clauses)} {case.case}"),
        time=f"{case.seconds:.3f}",
    )
    if case.outcome in ("unsupported", "known"):
        why = case.known.get("reason") or case.seen
        ElementTree.SubElement(test, "skipped", message=one_line(f"{case.outcome}: {why}"))
    elif case.outcome not in GREEN:
        tag = "error" if case.outcome == "error" else "failure"
        said = one_line(f"expected {case.expected}; seen {case.seen}")
        ElementTree.SubElement(test, tag, message=said, type=case.outcome).text = clean(case.trace)
    return test


def _code(text: str) -> str:
    """Write text as code in a cell of a table: what a stranger's message holds is shown and not obeyed."""
    safe = one_line(text, 300).replace("`", "'").replace("|", "\\|")
    return f"`{safe}`" if safe else ""


def markdown(result: Result) -> str:
    """Return a result as a Markdown summary: counts, then the clauses that did not hold."""
    verdict = judge(result)
    about = result.implementation
    gate = "green" if verdict.green else "red"
    lines = [f"## {_code(about['name'])} {about['version']}: {headline(result, verdict)}", ""]
    lines += [
        f"Gate {gate}; torch {result.environment['torch']}, {result.environment['device']}; "
        f"suite {result.suite['version']} ({result.suite['hash']}); {result.started}."
    ]
    lines += ["", "| area | must | should | observe |", "|---|---:|---:|---:|"]
    for area, row in verdict.counts.items():
        cells = [f"{row[level].passed}/{row[level].total}" if level in row else "" for level in spec.LEVELS]
        lines.append(f"| {area} | {' | '.join(cells)} |")
    if verdict.unsupported:
        lines += ["", f"Unsupported: {', '.join(verdict.unsupported)}."]
    bad = failing(verdict)
    if bad:
        lines += ["", "| outcome | clause | level | expected | seen |", "|---|---|---|---|---|"]
    for clause in bad:
        worst = worst_of(result, clause)
        lines.append(
            f"| {worst.outcome} | {clause} | {level_of(clause)} "
            f"| {_code(worst.expected)} | {_code(worst.seen)} |"
        )
    others = other_reasons(verdict)
    lines += ["", *(f"- {_code(reason)}" for reason in others)] if others else []
    return "\n".join(lines) + "\n"
