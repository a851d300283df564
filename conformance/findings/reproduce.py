"""``keyedopt findings [TEXT]``: which of the defects found are still there?

Runs the reproducers whose name contains TEXT, or all, and prints a line each. Exits with 1 if a defect
is still there, with 0 if all that could be run are fixed, with 2 if a reproducer broke down.
"""

from keyedopt.conformance.findings import findings, run
from keyedopt.conformance.results.errors import KeyedoptError


def main(text: str = "") -> int:
    """Run the reproducers whose name contains a text, and return the exit code.

    Raises:
        KeyedoptError: there is none.
    """
    chosen = [finding for finding in findings() if text in finding.path.stem]
    if not chosen:
        raise KeyedoptError(f"there is no finding whose name contains {text!r}; see conformance/README.md")
    for finding in chosen:
        if not finding.installed:
            print(f"{'not run':8} {finding.path.stem}: {finding.library} is not installed")
    worst = 0
    for finding, code, output in run([finding for finding in chosen if finding.installed]):
        word = {0: "fixed", 1: "defect"}.get(code, "broken")
        print(f"{word:8} {finding.path.stem}: {finding.summary}")
        if code not in (0, 1):
            print(output)
        worst = max(worst, code if code in (0, 1) else 2)
    return worst
