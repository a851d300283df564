"""Arithmetic for the same plain loops: exact, rounded to a floating-point dtype, or with bounds of rounding.

The loops of `formulas` mark the places where an implementation may choose an order: of the terms of a sum, of
the factors of a product, and between two forms that are mathematically equal. Exact arithmetic uses the first
order; rounded arithmetic uses a random one, so that many runs show how far correct implementations may
differ.
"""

import functools
import math
import random
import struct
from collections.abc import Collection, Sequence
from typing import Any, Self

from mpmath import mp, mpf

mp.dps = 60

#: Bits of precision, and the exponents of the smallest and largest normal numbers.
FORMATS = {"float64": (53, -1022, 1023), "float32": (24, -126, 127), "bfloat16": (8, -126, 127)}
FORMATS["float16"] = (11, -14, 15)
SINGLE = struct.Struct("f")


class Exact:
    """Arithmetic with sixty digits that always uses the first order."""

    def number(self, value: float) -> Any:
        """Return an exact number from a Python float."""
        return mpf(value)

    scalar = number

    def sqrt(self, value: Any) -> Any:
        """Return √x."""
        return mp.sqrt(value)

    def power(self, value: Any, exponent: float) -> Any:
        """Return x to a power of at least 0."""
        return mp.power(value, exponent)

    def total(self, terms: Sequence[Any]) -> Any:
        """Return the sum of some numbers."""
        return sum(terms, mpf(0))

    def product(self, over: Sequence[Any], under: Sequence[Any] = ()) -> Any:
        """Multiply some numbers and divide by others; return 0 if a factor is 0, also for 0/0."""
        result = mpf(1)
        if any(value == 0 for value in over):
            return mpf(0)
        for value in over:
            result *= value
        for value in under:
            result /= value
        return result

    def either(self, place: str) -> bool:
        """Return one of two forms, at a marked place of a formula."""
        return True


class Rounded(Exact):
    """Arithmetic of a dtype, with every operation rounded to it, in random orders.

    Python floats represent the numbers exactly and round correctly for these widths. Scalars (learning rates,
    betas) stay Python floats until they are combined with a number, and are then used as float32, as in torch
    and in every kernel. In half of the runs, a product that is added is not rounded before, as in a fused
    multiply-add, which compilers use where the hardware has it.
    """

    def __init__(self, dtype: str, seed: int) -> None:
        self.kind = kind(dtype, contracted=seed % 4 > 1)
        self.random = random.Random(seed)
        self.habits: dict[str, float] | None = {} if seed % 2 else None
        self.least = math.ldexp(1.0, FORMATS[dtype][1])

    def number(self, value: float) -> Any:
        """Return a number of the dtype."""
        return self.kind(value)

    def scalar(self, value: float) -> Any:
        """Return a Python float."""
        return float(value)

    def sqrt(self, value: Any) -> Any:
        """Return √x; keep a plain Python float one."""
        return type(value)(math.sqrt(value)) if value >= 0 else math.nan

    def power(self, value: Any, exponent: float) -> Any:
        """Return x to a power of at least 0."""
        return self.kind(float(value) ** exponent)

    def total(self, terms: Sequence[Any]) -> Any:
        """Return the sum in random order."""
        shuffled = self.random.sample(list(terms), len(terms))
        result = self.kind(0.0)
        for term in shuffled:
            result = result + term
        return result

    def product(self, over: Sequence[Any], under: Sequence[Any] = ()) -> Any:
        """Multiply and divide in random order.

        A run with fixed habits may multiply by the rounded reciprocal instead of dividing, as fast code does.
        """
        if any(value == 0 for value in over):
            return self.kind(0.0)
        operations = [(value, False) for value in over] + [(value, True) for value in under]
        result: Any = 1.0
        for value, divide in self.random.sample(operations, len(operations)):
            if not divide:
                result = result * value
            elif value == 0:
                result = result * math.inf
            elif self._reciprocal() and self.least <= abs(float(value)) <= 1 / self.least:
                result = result * (1.0 / value)
            else:
                result = result / value
        return result

    def either(self, place: str) -> bool:
        """Choose a form at random, or, in a run with fixed habits, always the same form at the same place.

        Code always evaluates the same form, so that all its roundings may go in the same direction.
        """
        habits = (0.5,) if self.habits is None else (0.0, 0.5, 1.0)
        known = {} if self.habits is None else self.habits
        return self.random.random() < known.setdefault(place, self.random.choice(habits))

    def _reciprocal(self) -> bool:
        return self.habits is not None and self.either("quotient")


class Bound(float):
    """A number with a bound of its rounding error, in units of the largest relative error of one operation.

    A Python float is a scalar, which is rounded once.
    """

    __slots__ = ("error",)
    error: float

    def __new__(cls, value: float, error: float = 0.0) -> Self:
        """Return a number with its bound."""
        number = super().__new__(cls, value)
        number.error = error
        return number

    def __add__(self, other: float) -> "Bound":
        value = float(self) + float(other)
        return Bound(value, self.error + _error(other) + abs(value))

    def __mul__(self, other: float) -> "Bound":
        value = float(self) * float(other)
        inherited = abs(float(other)) * self.error + abs(float(self)) * _error(other)
        return Bound(value, inherited + abs(value))

    def __truediv__(self, other: float) -> "Bound":
        return self * Bound(1 / float(other), 1 / abs(float(other)) + _error(other) / float(other) ** 2)

    def __neg__(self) -> "Bound":
        return Bound(-float(self), self.error)

    def __sub__(self, other: float) -> "Bound":
        return self + -other

    def __rsub__(self, other: float) -> "Bound":
        return -self + other

    __radd__, __rmul__ = __add__, __mul__


def _error(value: float) -> float:
    return value.error if isinstance(value, Bound) else abs(value)


class Bounded(Exact):
    """Arithmetic that bounds, to first order, the error of every order and contraction of a formula.

    A quotient may be a product with the rounded reciprocal.

    Args:
        forms: the marked places where the first form is used.
    """

    #: The places of all formulas.
    PLACES = ("mean square", "average", "root", "decay first")

    def __init__(self, forms: Collection[str]) -> None:
        self.forms = forms

    def number(self, value: float) -> Any:
        """Return a number without an error."""
        return Bound(value)

    def scalar(self, value: float) -> Any:
        """Return a Python float."""
        return float(value)

    def sqrt(self, value: Any) -> Any:
        """Return √x; keep a plain Python float one."""
        root = math.sqrt(value)
        if not isinstance(value, Bound):
            return root
        return Bound(root, value.error / (2 * root) + root if root else 0.0)

    def power(self, value: Any, exponent: float) -> Any:
        """Return x to a power of at least 0."""
        result = float(value) ** exponent
        return Bound(result, exponent * value.error * result / value + result if value else 0.0)

    def total(self, terms: Sequence[Any]) -> Any:
        """Return the sum; in any order, a partial sum is at most the sum of the magnitudes."""
        inherited = sum(map(_error, terms))
        return Bound(sum(map(float, terms)), inherited + (len(terms) - 1) * sum(map(abs, map(float, terms))))

    def product(self, over: Sequence[Any], under: Sequence[Any] = ()) -> Any:
        """Multiply and divide; the error does not depend on the order."""
        result = Bound(0.0 if any(value == 0 for value in over) else 1.0)
        if result:
            for value in over:
                result *= value
            for value in under:
                result /= value
        return result

    def either(self, place: str) -> bool:
        """Return whether the first form is used at a marked place of a formula."""
        return place in self.forms


@functools.cache
def kind(dtype: str, contracted: bool = False) -> type[float]:
    """Return the type of the numbers of a dtype: a float that rounds after every operation.

    Args:
        dtype: one of `FORMATS`.
        contracted: whether a sum takes one of its terms unrounded, if that is a product.
    """
    bits, least, most = FORMATS[dtype]
    largest = math.ldexp(2 - 2.0 ** (1 - bits), most)

    def nearest(value: float) -> float:
        if not math.isfinite(value) or value == 0:
            return value
        exponent = max(math.frexp(value)[1] - 1, least)
        rounded = math.ldexp(round(math.ldexp(value, bits - 1 - exponent)), exponent - bits + 1)
        return rounded if abs(rounded) <= largest else math.copysign(math.inf, rounded)

    def operand(other: Any) -> float:
        exact = float(other)
        if isinstance(other, Number) or dtype == "float64" or not math.isfinite(exact):
            return exact
        return float(SINGLE.unpack(SINGLE.pack(exact))[0])

    class Number(float):
        __slots__ = ("exact",)
        exact: float  # before it was rounded, if it is a product that may be contracted

        def __new__(cls, value: float) -> "Number":
            number = super().__new__(cls, nearest(value))
            number.exact = float(number)
            return number

        def __add__(self, other: Any) -> Any:
            return Number(sum(terms(self, other)))

        def __sub__(self, other: Any) -> Any:
            left, right = terms(self, other)
            return Number(left - right)

        def __rsub__(self, other: Any) -> Any:
            return Number(operand(other) - self.exact)

        def __mul__(self, other: Any) -> Any:
            exact = float(self) * operand(other)
            number = Number(exact)
            if contracted:
                number.exact = exact
            return number

        def __truediv__(self, other: Any) -> Any:
            return Number(float(self) / operand(other)) if other else Number(math.copysign(math.inf, self))

        def __rtruediv__(self, other: Any) -> Any:
            return Number(operand(other) / float(self))

        def __neg__(self) -> Any:
            return Number(-float(self))

        __radd__, __rmul__ = __add__, __mul__

    def terms(left: Number, right: Any) -> tuple[float, float]:
        exact = right.exact if isinstance(right, Number) else operand(right)
        return (left.exact if exact == operand(right) else float(left)), exact

    return Number
