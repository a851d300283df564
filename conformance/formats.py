"""A result in the formats that others read: JUnit for CI, Markdown for a pull request."""

from pathlib import Path
from xml.etree import ElementTree

from keyedopt.conformance import result as results
from keyedopt.conformance import spec
from keyedopt.conformance.result import Result
from keyedopt.conformance.verdict import GREEN, SEVERITY, cases_of, judge

FORMATS = (".json", ".xml", ".md")


def one_line(text: str) -> str:
    """Put text on one line, with control characters shown and not obeyed."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def write(result: Result, path: Path) -> Path:
    """Write a result in the format that the name of the file asks for; return where it is.

    A partial result goes beside the name that was asked for (``x.partial.json``), so that it is
    never taken for a complete one and replaces none.
    """
    if not result.complete:
        path = path.with_name(f"{path.stem}.partial{path.suffix}")
    if path.suffix == ".json":
        results.write(result, path)
        path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
        original = path.name.replace(".partial.json", ".json")
        path.with_name(f"{original}.partial").unlink(missing_ok=True)
    else:
        text = junit(result) if path.suffix == ".xml" else markdown(result)
        results.write_atomically(path, text)
    return path


def junit(result: Result) -> str:
    """Return a result as JUnit XML: a suite for each area, a test for each case."""
    known = spec.clauses()
    verdict = judge(result)
    about = result.implementation
    root = ElementTree.Element("testsuites", name=f"keyedopt {about['name']} {about['version']}")
    for area in spec.areas():
        cases = [
            case
            for case in result.cases
            if case.clauses and known.get(case.clauses[0]) and known[case.clauses[0]].area == area
        ]
        if not cases:
            continue
        suite = ElementTree.SubElement(root, "testsuite", name=f"{about['name']}.{area}")
        bad = [case for case in cases if case.outcome in ("fail", "unexpected-pass")]
        suite.set("tests", str(len(cases)))
        suite.set("failures", str(len(bad)))
        suite.set("errors", str(sum(case.outcome == "error" for case in cases)))
        suite.set("skipped", str(sum(case.outcome in ("unsupported", "known") for case in cases)))
        suite.set("time", f"{sum(case.seconds for case in cases):.3f}")
        suite.set("timestamp", result.started)
        for case in cases:
            test = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{about['name']}.{area}",
                name=f"{' '.join(case.clauses)} {case.case}",
                time=f"{case.seconds:.3f}",
            )
            text = one_line(f"expected {case.expected}; seen {case.seen}")
            if case.outcome in ("fail", "error", "unexpected-pass"):
                tag = "error" if case.outcome == "error" else "failure"
                node = ElementTree.SubElement(test, tag, message=text, type=case.outcome)
                node.text = "\n".join(one_line(line) for line in case.trace.splitlines())
            elif case.outcome in ("unsupported", "known"):
                reason = case.known.get("reason", "the area is not claimed")
                ElementTree.SubElement(test, "skipped", message=one_line(f"{case.outcome}: {reason}"))
    if verdict.reasons and (result.expectations.get("problems") or not result.complete):
        suite = ElementTree.SubElement(root, "testsuite", name="gate", tests="1", failures="1")
        test = ElementTree.SubElement(suite, "testcase", classname="gate", name="gate")
        ElementTree.SubElement(test, "failure", message=one_line("; ".join(verdict.reasons)))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _cell(text: str) -> str:
    safe = one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return safe.replace("`", "'")


def markdown(result: Result) -> str:
    """Return a result as a Markdown summary: counts, then the clauses that did not hold."""
    verdict = judge(result)
    known = spec.clauses()
    about = result.implementation
    state = "conformant" if verdict.conformant else "not conformant"
    if not result.complete:
        state = "PARTIAL: the run was interrupted"
    gate = "green" if verdict.green else "red"
    lines = [f"## {_cell(about['name'])} {_cell(about['version'])}: {state}", ""]
    lines += [f"Gate {gate}; torch {_cell(result.environment['torch'])}, "
              f"{_cell(result.environment['device'])}; suite {result.suite['version']} "
              f"({result.suite['hash']}); {result.started}.", ""]  # fmt: skip
    lines += ["| area | must | should | observe |", "|---|---:|---:|---:|"]
    for area, row in verdict.counts.items():
        cells = [f"{row[level].passed}/{row[level].total}" if level in row else "" for level in spec.LEVELS]
        lines.append(f"| {area} | {' | '.join(cells)} |")
    if verdict.unsupported:
        lines += ["", f"Unsupported: {', '.join(verdict.unsupported)}."]
    bad = [clause for clause, outcome in verdict.clauses.items() if outcome not in (*GREEN, "unsupported")]
    if bad:
        lines += ["", "| outcome | clause | level | expected | seen |", "|---|---|---|---|---|"]
    order = {level: index for index, level in enumerate(spec.LEVELS)}
    for clause in sorted(bad, key=lambda item: (order[known[item].level], item)):
        worst = min(cases_of(result, clause), key=lambda case: SEVERITY.index(case.outcome))
        lines.append(
            f"| {worst.outcome} | {clause} | {known[clause].level} "
            f"| {_cell(worst.expected)} | {_cell(worst.seen)} |"
        )
    lines += [f"- {_cell(problem)}" for problem in result.expectations.get("problems", ())]
    return "\n".join(lines) + "\n"
