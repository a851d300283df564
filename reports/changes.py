"""A difference between two runs, as text for a terminal and as Markdown."""

from collections.abc import Mapping

from keyedopt.reports.diff import KINDS, Change, Difference
from keyedopt.reports.plain import code, one_line

#: How a change is called by whether it is worse.
WORDS: Mapping[bool | None, str] = {True: "worse", False: "better", None: "changed"}
#: Rows of a table in Markdown; a comment on a pull request has an end.
ROWS = 100


def text(found: Difference) -> str:
    """Return a difference as lines for a terminal."""
    lines = [f"before: {found.before}", f"after: {found.after}"]
    lines += [f"note: {note}" for note in found.notes]
    lines += [line(change) for change in found.changes]
    return "\n".join([*map(one_line, lines), *summary(found)]) + "\n"


def line(change: Change) -> str:
    """Return a change as one line."""
    level = f" [{change.level}]" if change.level else ""
    head = f"{WORDS[change.worse]} {change.kind} {change.what}{level} {change.before} -> {change.after}"
    return one_line(f"{head}  ({change.detail})" if change.detail else head)


def differs(change: Change) -> str:
    """Return a change as one line, where neither side is the earlier one."""
    return one_line(
        f"differs {change.kind} {change.what} [{change.level}] {change.before} | {change.after}"
        f"  ({change.detail})"
    )


def summary(found: Difference) -> list[str]:
    """Say how many changes of each kind there are, and how much was compared."""
    lines = []
    for kind, title in KINDS.items():
        some = [change.worse for change in found.changes if change.kind == kind]
        counts = {word: some.count(worse) for worse, word in WORDS.items() if worse in some}
        if some:
            lines.append(
                f"{title}: {len(some)} ({', '.join(f'{count} {word}' for word, count in counts.items())})"
            )
    counted = ", ".join(f"{count} {what}" for what, count in found.compared.items())
    return [*lines, f"compared: {counted}; {len(found.worse) or 'nothing'} worse"]


def markdown(found: Difference) -> str:
    """Return a difference as Markdown: what the runs were, then a table for each kind of change."""
    lines = [f"## {code(found.before)} to {code(found.after)}", ""]
    lines += [f"- {said}" for said in summary(found)]
    lines += [f"- note: {code(note, 1000)}" for note in found.notes]
    for kind, title in KINDS.items():
        some = [change for change in found.changes if change.kind == kind]
        if some:
            lines += ["", f"### {title.capitalize()}", "", "| | what | level | before | after | where |"]
            lines.append("|---|---|---|---|---|---|")
        for change in some[:ROWS]:
            cells = (code(cell) for cell in (change.before, change.after, change.detail))
            lines.append(
                f"| {WORDS[change.worse]} | {code(change.what)} | {change.level} | {' | '.join(cells)} |"
            )
        if len(some) > ROWS:
            lines += ["", f"and {len(some) - ROWS} more"]
    return "\n".join(lines) + "\n"
