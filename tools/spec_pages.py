"""The specification as pages: ``python -m keyedopt.tools.spec_pages`` writes them.

``CLAUSES.md`` lists every clause; ``MATRIX.md`` shows, for every public method and situation, the
clauses of the cell or why there are none; the last section of the README of ``conformance/`` lists the
defects found. A test holds them to the data.
"""

from pathlib import Path

from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.run.case_sources import cases_by_clause

FOLDER = Path(__file__).parents[1] / "conformance"
README = FOLDER / "README.md"
HEADING = "## Findings"
NOTE = "Made by `python -m keyedopt.tools.spec_pages`; edit the TOML files beside it instead."


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def clauses_page() -> str:
    """Return the page of clauses, by area."""
    total = {level: sum(c.level == level for c in spec.clauses().values()) for level in spec.LEVELS}
    lines = ["# Clauses", "", NOTE, ""]
    lines += [f"Suite {spec.SUITE_VERSION}: {', '.join(f'{n} {level}' for level, n in total.items())}.", ""]
    for area in spec.areas().values():
        lines += [
            f"## {area.name}: {area.title}",
            "",
            f"Names: {', '.join(f'`{n}`' for n in area.names)}.",
            "",
        ]
        for clause in area.clauses:
            source = f"{spec.sources()[clause.document].title}: {clause.heading}"
            lines += [f"**{clause.id}** ({clause.level}, since {clause.since}). {_escaped(clause.statement)}"]
            lines += [f"*Source*: {_escaped(source)}."]
            if clause.rationale:
                lines += [f"*Why*: {_escaped(clause.rationale)}"]
            cases = ", ".join(f"`{case.file}::{case.name}`" for case in cases_by_clause().get(clause.id, ()))
            lines += [f"*Cases*: {cases}.", ""]
    return "\n".join(lines)


def cell(area: spec.Area, method: str, situation: str) -> tuple[list[str], list[str]]:
    """Return the clauses of a cell, and the reasons given for there being none.

    A reason that speaks of every method or every situation holds where no clause does.
    """
    covering = [clause.id for clause in area.clauses if f"{method}/{situation}" in clause.covers]
    reasons = [
        entry.reason
        for entry in area.nothing
        if entry.holds(method, situation)
        and not (covering and ("*" in entry.methods or "*" in entry.situations))
    ]
    return covering, reasons


def matrix_page() -> str:
    """Return the page of the matrix, by area; reasons are numbered footnotes."""
    lines = ["# The matrix the clauses were found with", "", NOTE, ""]
    lines += [
        "A row is a public method, a column a situation; a small number is a reason below the table.",
        "",
    ]
    for area in spec.areas().values():
        lines += [f"## {area.name}", "", "| | " + " | ".join(spec.situations()) + " |"]
        lines += ["|---|" + "---|" * len(spec.situations())]
        footnotes: list[str] = []
        for method in area.methods:
            row = []
            for situation in spec.situations():
                covering, reasons = cell(area, method, situation)
                numbers = []
                for reason in reasons:
                    if reason not in footnotes:
                        footnotes.append(reason)
                    numbers.append(f"<sup>{footnotes.index(reason) + 1}</sup>")
                short = [clause.removeprefix(f"{area.prefix}-") for clause in covering]
                row.append(" ".join([*short, *numbers]))
            lines.append(f"| `{method}` | " + " | ".join(row) + " |")
        lines += [""]
        lines += [f"{number}. {_escaped(reason)}" for number, reason in enumerate(footnotes, 1)]
        lines += [""]
    return "\n".join(lines)


def readme_page() -> str:
    """Return the README of ``conformance/`` with its last section made anew: defects of libraries."""
    kept = README.read_text(encoding="utf-8").partition(HEADING)[0]
    lines = [HEADING, "", NOTE.replace("the TOML files beside it", "the docstrings in `findings/`"), ""]
    lines += [
        "Defects of published libraries, with the last version that has them, or with those that do where",
        "others do not. Each script needs torch and the library alone, and exits with 1 where the defect is",
        "there; `python -m keyedopt.conformance.findings` runs all of them.",
        "",
        "| clauses | library | what happens | reproducer |",
        "|---|---|---|---|",
    ]
    for finding in findings():
        about = f"{finding.library} {finding.versions or CHECKED[finding.library]}"
        link = f"[{finding.path.stem.removeprefix(f'{finding.library}_')}](findings/{finding.path.name})"
        lines.append(f"| {' '.join(finding.clauses)} | {about} | {_escaped(finding.summary)} | {link} |")
    return kept + "\n".join(lines) + "\n"


#: The last versions on which they were run.
CHECKED = {"fbgemm": "1.9.0", "torch": "2.15.0", "torchft": "0.2.0", "torchrec": "1.9.2"}

PAGES = {
    FOLDER / "spec" / "CLAUSES.md": clauses_page,
    FOLDER / "spec" / "MATRIX.md": matrix_page,
    README: readme_page,
}


def main() -> None:
    """Write the pages beside the data."""
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
