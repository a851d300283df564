"""Compare the precision of two implementations.

    keyedopt precision REFERENCE OTHER

Both are results that ``keyedopt check --output`` wrote. Cases record errors in units in the last place (ULP)
of the dtype, by quantity: those of one golden trajectory, and the median of the worst errors of many draws.
The medians are compared: the median may be at most the larger of twice the reference's and one ULP. The
worst error of a single draw varies too much to be compared; the case itself holds it to a budget.

The bound is at least one ULP because a result with a smaller error is one of the two numbers of the dtype
next to the exact value, and arithmetic that rounds more than once cannot choose between them: if the
reference is off by a tenth of an ULP, the other number is off by nine tenths, which twice the reference's
error would forbid.

Prints the quantities beyond the bound and the number of comparisons. Exit codes: 1 if a quantity is beyond
the bound, 2 on bad input.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.model import Result, read
from keyedopt.conformance.results.untrusted import number, one_line, text

#: The bound: at most TIMES the reference's error, or UNITS in the last place if that is larger.
TIMES, UNITS = 2.0, 1.0


@dataclass(frozen=True)
class Comparison:
    """The errors of one quantity in one case, in ULP: medians of the worst of many draws."""

    case: str
    quantity: str
    dtype: str
    reference: float
    other: float

    def holds(self) -> bool:
        """Whether the error is within the bound."""
        return self.other <= max(TIMES * self.reference, UNITS)

    def __str__(self) -> str:
        what = f"{self.case} {self.quantity} ({self.dtype})"
        return f"{what}: {self.other:g} ULP, against {self.reference:g} of the reference"


def median_errors(result: Result) -> dict[tuple[str, str, str], float]:
    """Return the medians of errors in ULP, by case, quantity and dtype; infinity if not finite."""
    found: dict[tuple[str, str, str], float] = {}
    for case in result.cases:
        errors = case.observed.get("errors") if isinstance(case.observed, Mapping) else None
        for record in errors if isinstance(errors, list) else ():
            if text(record, "unit", None) == "ULP" and "draws" in record:
                key = (case.case, text(record, "quantity"), text(record, "dtype"))
                found[key] = number(record, "error", math.inf)
    return found


def compare(reference: Result, other: Result) -> Iterator[Comparison]:
    """Yield the comparison of each quantity that both have measured."""
    known = median_errors(reference)
    for key, error in median_errors(other).items():
        if key in known:
            yield Comparison(*key, known[key], error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two files and return the exit code; see the module's docstring."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 2:
        print("give two result files: of the reference, and of the other implementation", file=sys.stderr)
        return 2
    try:
        reference, other = (read(Path(name)) for name in given)
        compared = list(compare(reference, other))
    except (OSError, KeyedoptError) as error:
        print(f"keyedopt: {one_line(str(error))}", file=sys.stderr)
        return 2
    beyond = [one for one in compared if not one.holds()]
    if not compared:
        print("the two results have no median of errors in common", file=sys.stderr)
        return 2
    for one in beyond:
        print(one)
    bound = f"the larger of {TIMES:g} times the reference's error and {UNITS:g} ULP"
    print(f"{len(compared)} compared, {len(beyond)} beyond {bound}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
