"""Compare the precision of two implementations.

    python -m keyedopt.conformance.results.precision REFERENCE OTHER

Both are results that ``keyedopt check --output`` wrote. A case that measures errors records them in units in
the last place of the dtype, quantity by quantity, and besides those of one golden trajectory the median of
the worst errors of many draws. That median is compared: it may be at most twice that of the reference, or one
ULP if that is larger. The worst error of one draw, a matter of luck, is held to its budget by the case.

Below one ULP the result is one of the two numbers of the dtype between which the right one is, and no
arithmetic that rounds more than once can say which: where the reference happens to be a tenth of an ULP off,
the other of the two is nine tenths off, and twice the error would forbid it.

Prints what is beyond, and how many were compared; exits with 1 if something is beyond, 2 on bad input.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keyedopt.conformance.results.model import Result, ResultError, read

#: As precise as the reference: at most so many times its error, or one unit in the last place.
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
        """Whether the other is as precise."""
        return self.other <= max(TIMES * self.reference, UNITS)

    def __str__(self) -> str:
        what = f"{self.case} {self.quantity} ({self.dtype})"
        return f"{what}: {self.other:g} ULP, against {self.reference:g} of the reference"


def median_errors(result: Result) -> dict[tuple[str, str, str], float]:
    """Return the medians of errors in ULP, by case, quantity and dtype; infinite where it is not finite."""
    found: dict[tuple[str, str, str], float] = {}
    for case in result.cases:
        for record in case.observed.get("errors", ()) if isinstance(case.observed, Mapping) else ():
            if record.get("unit") == "ULP" and "draws" in record:
                error = record["error"]
                key = (case.case, str(record["quantity"]), str(record["dtype"]))
                found[key] = math.inf if error is None else float(error)
    return found


def compare(reference: Result, other: Result) -> Iterator[Comparison]:
    """Compare what both have measured."""
    known = median_errors(reference)
    for key, error in median_errors(other).items():
        if key in known:
            yield Comparison(*key, known[key], error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two files; see the head of this file."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 2:
        print("give two results: that of the reference, and that of another", file=sys.stderr)
        return 2
    try:
        reference, other = (read(Path(name)) for name in given)
    except (OSError, ResultError) as error:
        print(error, file=sys.stderr)
        return 2
    compared = list(compare(reference, other))
    beyond = [one for one in compared if not one.holds()]
    if not compared:
        print("no median of errors was measured in both", file=sys.stderr)
        return 2
    for one in beyond:
        print(one)
    bound = f"the larger of {TIMES:g} times the reference's error and {UNITS:g} ULP"
    print(f"{len(compared)} compared, {len(beyond)} beyond {bound}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
