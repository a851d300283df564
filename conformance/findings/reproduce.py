"""``keyedopt findings [TEXT]``: show which known defects the installed versions have.

Runs the reproducers whose name contains TEXT, or all, and prints one line for each. Exits with 1 if a defect
is present, with 0 if every defect that could be checked is fixed, and with 2 if a reproducer crashed.
"""

from keyedopt.conformance.findings import findings, run
from keyedopt.conformance.results.errors import KeyedoptError, did_you_mean


def main(text: str = "") -> int:
    """Run the reproducers whose name contains a text, and return the exit code.

    Raises:
        KeyedoptError: there is none.
    """
    chosen = [finding for finding in findings() if text in finding.path.stem]
    if not chosen:
        near = did_you_mean(text, {name for one in findings() for name in (one.path.stem, one.library)})
        raise KeyedoptError(
            f"there is no finding whose name contains {text!r}; see conformance/README.md{near}"
        )
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
