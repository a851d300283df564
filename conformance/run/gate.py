"""The gate of a run of pytest without the runner: its exit status means what that of a check means."""

from __future__ import annotations

import datetime
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from keyedopt.conformance import expectations, spec
from keyedopt.conformance.results.model import Case, Result, case_from
from keyedopt.conformance.results.verdict import FAILING, judge
from keyedopt.conformance.run.engine import Engine
from keyedopt.conformance.run.outcomes import HEAD, found_in
from keyedopt.conformance.targets.smoke import examine


class Gate:
    """The plugin that ``--level`` or ``--expectations`` registers beside `Engine`.

    A known failure is an expected failure of pytest. The exit status is 0 if the gate is green, else 1.

    Raises:
        ExpectationsError: the list of known failures cannot be read.
    """

    def __init__(self, config: pytest.Config, engine: Engine) -> None:
        option = config.getoption
        self._level = option("--level") or "should"
        self._path = expectations.find(option("--expectations")) if option("--expectations") else Path()
        self._known = expectations.read(self._path) if option("--expectations") else ()
        imports = option("--keyedopt-import") or ()
        target = option("--implementation")
        self._about = examine(target, engine.device, engine.dtypes, imports, lambda areas: None)
        if self._about["problem"]:
            raise expectations.ExpectationsError(self._about["problem"])
        self._cases: dict[str, Case] = {}
        self._said = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Note the outcome of a case, and report a known failure as an expected one."""
        report = yield
        head = item.stash.get(HEAD, None)
        if head is not None and (call.when == "call" or call.excinfo is not None):
            error = call.excinfo.value if call.excinfo is not None else None
            case = case_from({**head, **found_in(item, error)})
            self._cases[case.case] = case
            judged = self._result((case,)).cases[0]
            if judged.outcome == "known":
                report.outcome, report.wasxfail = "skipped", judged.known["reason"]
        return report

    def _result(self, cases: tuple[Case, ...]) -> Result:
        """Return the result of these cases, with known failures marked."""
        result = Result(
            implementation=self._about["implementation"],
            environment=self._about["environment"],
            suite={"version": spec.SUITE_VERSION, "hash": spec.suite_hash()},
            options={"level": self._level, "clauses": sorted({i for case in cases for i in case.clauses})},
            started=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            seconds=0.0,
            complete=True,
            cases=cases,
        )
        return expectations.apply(result, self._known, self._path) if self._known else result

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Set the exit status: 0 if the gate is green, 1 if it is red; errors of pytest stay."""
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and self._cases:
            result = self._result(tuple(self._cases.values()))
            verdict = judge(result)
            broken = session.testsfailed > sum(case.outcome in FAILING for case in result.cases)
            green = verdict.green and not broken  # a test that is not of the suite failed
            session.exitstatus = 0 if green else 1
            reasons = "; ".join([*verdict.reasons, *(["other tests failed"] if broken else [])])
            self._said = f"gate: {'green' if green else 'red'} (exit {session.exitstatus}); {verdict.checked}"
            self._said += f"\n{reasons}" if reasons else ""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the gate and why it is red."""
        if self._said:
            terminalreporter.write_line(self._said)
