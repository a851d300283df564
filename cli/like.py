"""``keyedopt check TARGET --like OTHER``: whether a target behaves like another one."""

from keyedopt.cli.report import clauses
from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.model import Result
from keyedopt.reports.diff import CompareError, difference
from keyedopt.reports.load import from_result


def likeness(model: Result, found: Result) -> tuple[str, bool]:
    """Return the differences, a line each and a summary with the exit code, and whether there are none.

    Raises:
        ResultError: the two runs have no case in common.
    """
    one, other = (from_result(run, clauses()) for run in (model, found))
    try:
        different = difference(one, other, strict=True)
    except CompareError as error:
        raise ResultError(f"the two targets cannot be compared: {error}") from error
    count = len(different.changes)
    lines = [f"like: {different.before}", f"target: {different.after}"]
    lines += [f"note: {note}" for note in different.notes]
    lines += [change.line(like=True) for change in different.changes]
    said = f"{count} difference{'' if count == 1 else 's'} (exit 1)" if count else "no difference (exit 0)"
    lines.append(f"{said}; compared: {different.counted()}")
    return "\n".join(lines) + "\n", not count
