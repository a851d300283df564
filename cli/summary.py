"""The summary of ``keyedopt check``: counts by area and level, failing clauses, the verdict."""

import shlex
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Result
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import (
    FAILING,
    GREEN,
    Count,
    Verdict,
    cases_of,
    failing,
    level_of,
    other_reasons,
    worst_of,
)
from keyedopt.conformance.targets.find import registered

#: The colours of lines on a terminal.
STYLES = {"fail": "red", "error": "red", "unexpected-pass": "yellow", "known": "yellow"}


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def ran(result: Result) -> str:
    """Return the number of cases that ran, and the seconds. A case that is unsupported did not run."""
    count = sum(case.outcome != "unsupported" for case in result.cases)
    return f"{count} cases in {result.seconds:.1f} s"


def show_all(judged: Mapping[str, tuple[Result, Verdict] | str]) -> None:
    """Print one table of the verdicts on several targets; a text says why a target has none."""
    table = Table(box=None, pad_edge=False)
    for column in ("target", "verdict", "gate", *spec.LEVELS[:2]):
        table.add_column(column)
    for target, found in judged.items():
        if isinstance(found, str):
            table.add_row(one_line(target), "no verdict: see above", "red", style="red")
            continue
        _, verdict = found
        rows = verdict.counts.values()
        ratios = [_ratio([row[level] for row in rows if level in row]) for level in spec.LEVELS[:2]]
        style = "green" if verdict.green else "red"
        table.add_row(one_line(target), one_line(verdict.headline), verdict.gate, *ratios, style=style)
    console = _console()
    console.print()
    console.print(table)


def show(result: Result, verdict: Verdict, verbose: bool = False) -> None:
    """Print the summary of a run; known failures are counted unless `verbose`."""
    console = _console()
    about = result.implementation
    table = Table(box=None, pad_edge=False)
    table.add_column("area")
    for level in spec.LEVELS:
        table.add_column(level, justify="right")
    for area, row in verdict.counts.items():
        table.add_row(area, *(_ratio([row[level]] if level in row else []) for level in spec.LEVELS))
    rows = verdict.counts.values()
    table.add_section()
    table.add_row("all", *(_ratio([row[level] for row in rows if level in row]) for level in spec.LEVELS))
    console.print(table)
    if verdict.unsupported:
        console.print(f"unsupported (not claimed): {', '.join(verdict.unsupported)}")
    if verdict.unchecked:
        console.print(f"not checked, as their cases are unsupported: {_few(verdict.unchecked)}")
    others = about.get("not_optimizers")
    if others:
        names = one_line(_few(others))
        console.print(
            f"not subclasses of torch.optim.Optimizer: {names}; this single cause makes many clauses about "
            "parameter groups, state and hooks fail",
            style="yellow",
        )
    known = [clause for clause in failing(verdict) if verdict.clauses[clause] == "known"]
    for clause in failing(verdict):
        if verbose or clause not in known:
            console.print(_line(result, clause), style=STYLES.get(verdict.clauses[clause]))
    if known and not verbose:
        console.print(f"{len(known)} known, unchanged (-v shows them)", style="yellow")
    for reason in other_reasons(verdict):
        console.print(one_line(f"red   {reason}"), style="red")
    where = f"torch {result.environment['torch']}, {result.environment['device']}"
    if result.environment.get("backend"):
        where += f", backend {result.environment['backend']}"
    console.print(
        one_line(f"{about['name']} {about['version']} ({where}): {verdict.headline}; {verdict.checked}"),
        style="bold",
    )
    count = len(verdict.reasons)
    why = "" if verdict.green else f" ({count} reason{'s' if count != 1 else ''})"
    console.print(f"gate: {verdict.gate}{why}; {ran(result)}", style="green" if verdict.green else "red")


def next_steps(verdict: Verdict, written: str | None, target: str, imports: Iterable[str] = ()) -> list[str]:
    """Return the commands that explain the first failing clause and repeat its case on the target.

    Args:
        verdict: of the check.
        written: the file of the result, if there is one.
        target: as it was given.
        imports: the modules that the check imported first.
    """
    bad = [clause for clause in failing(verdict) if verdict.clauses[clause] in FAILING]
    if not bad:
        return []
    file = shlex.quote(written) if written is not None else "FILE.json"
    before = "" if written is not None else "give --output FILE.json, then "
    named = "" if target in registered() else f" --target {shlex.quote(target)}"
    first = "".join(f" --import {shlex.quote(name)}" for name in imports)
    again = f"keyedopt replay {file} {bad[0]} --run{named}{first}"
    return [f"why:   keyedopt explain {bad[0]}", f"again: {before}{again}"]


def _few(names: Sequence[str], many: int = 6) -> str:
    """Join names with commas; of a long list show only the first ones."""
    if len(names) <= many:
        return ", ".join(names)
    return f"{', '.join(names[: many - 1])} and {len(names) - many + 1} more"


def _ratio(counts: list[Count]) -> str:
    return f"{sum(c.passed for c in counts)}/{sum(c.total for c in counts)}" if counts else ""


def _line(result: Result, clause: str) -> str:
    """Return a line about the most serious case of a clause: what was expected and what was seen."""
    worst = worst_of(result, clause)
    bad = [case for case in cases_of(result, clause) if case.outcome not in (*GREEN, "unsupported")]
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    line = f"{worst.outcome:5} {clause} [{level_of(clause)}] "
    if worst.outcome == "unexpected-pass":
        line += f"is listed as a known failure, but passes  ({worst.case}{more})"
    else:
        line += f"expected {worst.expected}; seen {worst.seen}  ({worst.case}{more})"
    if worst.known:
        line += f"  known: {worst.known['reason']} ({worst.known['link']})"
    return one_line(line)
