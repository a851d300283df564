"""``keyedopt check TARGET --like OTHER``: does it behave like the original?"""

from keyedopt.cli.report import clauses
from keyedopt.conformance.results.model import Result, ResultError
from keyedopt.reports import changes
from keyedopt.reports.diff import CannotCompare, difference
from keyedopt.reports.read import from_result


def likeness(model: Result, found: Result) -> tuple[str, bool]:
    """Return what is different, a line each and a summary, and whether nothing is.

    Raises:
        ResultError: the two have run no case in common.
    """
    one, other = (from_result(run.to_dict(), clauses()) for run in (model, found))
    try:
        different = difference(one, other, strict=True)
    except CannotCompare as why:
        raise ResultError(f"nothing can be said: {why}") from why
    count = len(different.changes)
    lines = [f"like: {different.before}", f"target: {different.after}"]
    lines += [f"note: {note}" for note in different.notes]
    lines += [changes.differs(change) for change in different.changes]
    counted = ", ".join(f"{number} {what}" for what, number in different.compared.items())
    lines.append(f"{f'{count} differences' if count else 'no difference'}; compared: {counted}")
    return "\n".join(lines) + "\n", not count
