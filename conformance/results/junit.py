"""A result as JUnit XML, for CI."""

from xml.etree import ElementTree

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.untrusted import clean, one_line
from keyedopt.conformance.results.verdict import GREEN, judge, shown


def junit(result: Result) -> str:
    """Return a result as JUnit XML: a suite for each area, a test for each case, and one for the gate.

    The suite of the gate has the verdict and the number of checked clauses as properties.
    """
    name = one_line(result.implementation["name"])
    verdict = judge(result)
    root = ElementTree.Element(
        "testsuites", name=one_line(f"keyedopt {name} {result.implementation['version']}")
    )
    for area in spec.areas().values():
        ids = {clause.id for clause in area.clauses}
        cases = [case for case in result.cases if case.clauses and case.clauses[0] in ids]
        if cases:
            tests = [_testcase(f"{name}.{area.name}", case) for case in cases]
            _suite(root, f"{name}.{area.name}", tests, result.started)
    gate = ElementTree.Element("testcase", classname="gate", name="gate")
    if verdict.reasons:
        ElementTree.SubElement(gate, "failure", message=one_line("; ".join(verdict.reasons)), type="red")
    suite = _suite(root, "gate", [gate], result.started)
    properties = ElementTree.Element("properties")
    for key, value in (
        ("verdict", verdict.headline),
        ("checked", str(verdict.checked)),
        ("gate", verdict.gate),
    ):
        ElementTree.SubElement(properties, "property", name=key, value=one_line(value))
    suite.insert(0, properties)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(
    root: ElementTree.Element, name: str, tests: list[ElementTree.Element], started: str
) -> ElementTree.Element:
    started = one_line(started)
    suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(tests)), timestamp=started)
    for count, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(count, str(sum(test.find(tag) is not None for test in tests)))
    suite.set("time", f"{sum(float(test.get('time', 0)) for test in tests):.3f}")
    suite.extend(tests)
    return suite


def _testcase(classname: str, case: Case) -> ElementTree.Element:
    test = ElementTree.Element(
        "testcase",
        classname=classname,
        name=one_line(f"{' '.join(case.clauses)} {case.case}"),
        time=f"{case.seconds:.3f}",
    )
    if case.outcome in ("unsupported", "known"):
        why = case.known.get("reason") or case.seen
        ElementTree.SubElement(
            test,
            "skipped",
            message=one_line(f"{why}" if why.startswith(shown(case)) else f"{shown(case)}: {why}"),
        )
    elif case.outcome not in GREEN:
        tag = "error" if case.outcome == "error" else "failure"
        said = one_line(f"expected {case.expected}; seen {case.seen}")
        ElementTree.SubElement(test, tag, message=said, type=case.outcome).text = clean(case.trace)
    return test
