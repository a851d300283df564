"""A result as Markdown, and the tables and code spans that all Markdown of keyedopt is made of."""

from collections.abc import Iterable, Sequence

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Result
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import failing, judge, level_of, other_reasons, worst_of


def code(text: str, limit: int = 300) -> str:
    r"""Write untrusted text as code in a cell of a table, which shows markup instead of rendering it.

    >>> code("<b>|`x`")
    "`<b>\\|'x'`"
    """
    safe = one_line(text, limit).replace("`", "'").replace("|", "\\|")
    return f"`{safe}`" if safe else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table after an empty line, or nothing if it has no rows.

    Args:
        head: the titles of the columns.
        rows: the cells, which are written as they are.
        right: the titles of columns that are aligned to the right.

    >>> table(["a", "b"], [["x", 1]], right=["b"])
    ['', '| a | b |', '|---|---:|', '| x | 1 |']
    """
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    line = "|".join("---:" if title in right else "---" for title in head)
    return ["", f"| {' | '.join(head)} |", f"|{line}|", *lines] if lines else []


def markdown(result: Result) -> str:
    """Return the verdict, the counts by area, and the clauses that did not hold."""
    verdict = judge(result)
    about, suite = result.implementation, result.suite
    lines = [
        f"## {code(about['name'])} {code(about['version'])}: {verdict.headline}",
        "",
        f"{str(verdict.checked).capitalize()}. Gate {verdict.gate}; "
        f"torch {code(result.environment['torch'])}, {code(result.environment['device'])}; "
        f"suite {code(suite['version'])} ({code(suite['hash'])}); {code(result.started)}.",
    ]
    counts = [
        [area, *(f"{row[name].passed}/{row[name].total}" if name in row else "" for name in spec.LEVELS)]
        for area, row in verdict.counts.items()
    ]
    lines += table(["area", *spec.LEVELS], counts, right=spec.LEVELS)
    if verdict.unsupported:
        lines += ["", f"Not claimed: {', '.join(verdict.unsupported)}."]
    bad = [(clause, worst_of(result, clause)) for clause in failing(verdict)]
    cells = [
        [worst.outcome, code(clause), level_of(clause), code(worst.expected), code(worst.seen)]
        for clause, worst in bad
    ]
    lines += table(["outcome", "clause", "level", "expected", "seen"], cells)
    others = other_reasons(verdict)
    lines += ["", *(f"- {code(reason)}" for reason in others)] if others else []
    return "\n".join(lines) + "\n"
