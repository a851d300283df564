"""What ``keyedopt check`` prints: counts by area and level, then every failing clause."""

from keyedopt.conformance import spec
from keyedopt.conformance.formats import one_line
from keyedopt.conformance.result import Result
from keyedopt.conformance.verdict import GREEN, SEVERITY, Verdict, cases_of
from rich.console import Console
from rich.table import Table
from rich.text import Text


def failing(verdict: Verdict) -> list[str]:
    """Return the clauses that did not hold, the most serious first: musts, then errors, then ids."""
    known = spec.clauses()
    bad = [clause for clause, outcome in verdict.clauses.items() if outcome not in (*GREEN, "unsupported")]
    return sorted(
        bad,
        key=lambda clause: (
            verdict.clauses[clause] in ("known", "unexpected-pass"),
            spec.LEVELS.index(known[clause].level),
            SEVERITY.index(verdict.clauses[clause]),
            list(spec.areas()).index(known[clause].area),
            clause,
        ),
    )


def headline(result: Result, verdict: Verdict) -> str:
    """Say in one line what was checked and what came out."""
    about = result.implementation
    if not result.complete:
        word = "PARTIAL: the run was interrupted, there is no verdict"
    elif verdict.conformant:
        word = "conformant" if not result.options.get("areas") else "conformant in these areas"
    else:
        word = "not conformant"
    where = f"torch {result.environment['torch']}, {result.environment['device']}"
    return f"{about['name']} {about['version']} ({where}): {word}"


def show(result: Result, verdict: Verdict) -> None:
    """Print the summary of a run."""
    console = Console(highlight=False, soft_wrap=True)
    known = spec.clauses()
    table = Table(title=None, pad_edge=False)
    table.add_column("area")
    for level in spec.LEVELS:
        table.add_column(level, justify="right")
    for area, row in verdict.counts.items():
        counts = [row.get(level) for level in spec.LEVELS]
        table.add_row(area, *(f"{count.passed}/{count.total}" if count else "" for count in counts))
    totals = [[row[level] for row in verdict.counts.values() if level in row] for level in spec.LEVELS]
    table.add_section()
    table.add_row(
        "all",
        *(f"{sum(c.passed for c in row)}/{sum(c.total for c in row)}" if row else "" for row in totals),
    )
    console.print(table)
    if verdict.unsupported:
        console.print(f"unsupported (not claimed): {', '.join(verdict.unsupported)}")
    for clause in failing(verdict):
        cases = [case for case in cases_of(result, clause) if case.outcome not in GREEN]
        worst = min(cases, key=lambda case: SEVERITY.index(case.outcome))
        more = f" (and {len(cases) - 1} more)" if len(cases) > 1 else ""
        line = Text(f"{worst.outcome:5} {clause} [{known[clause].level}] ")
        line.append(one_line(f"expected {worst.expected}; seen {worst.seen}"))
        line.append(f"  ({worst.case}{more})")
        if worst.known:
            line.append(one_line(f"  known: {worst.known['reason']} ({worst.known['link']})"))
        console.print(line)
    for problem in result.expectations.get("problems", ()):
        console.print(Text(one_line(f"expectations: {problem}")))
    console.print(Text(headline(result, verdict)))
    gate = "green" if verdict.green else f"red ({len(verdict.reasons)} reasons)"
    console.print(f"gate: {gate}; {len(result.cases)} cases in {result.seconds:.1f} s")
