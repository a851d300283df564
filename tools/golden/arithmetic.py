"""Two kinds of arithmetic for the same plain loops: exact, and rounded to a floating-point dtype.

The loops of `formulas` mark the places where an implementation may choose an order: of the terms of a sum, of
the factors of a product, and between two forms that are mathematically equal. Exact arithmetic uses the first
order; rounded arithmetic uses a random one, so that many runs show how far correct implementations may differ.
"""

import math
import random
import struct
from collections.abc import Sequence
from typing import Any

from mpmath import mp, mpf

mp.dps = 60

#: Bits of precision, and the exponents of the smallest and largest normal numbers.
FORMATS = {"float64": (53, -1022, 1023), "float32": (24, -126, 127), "bfloat16": (8, -126, 127)}
FORMATS["float16"] = (11, -14, 15)
SINGLE = struct.Struct("f")


class Exact:
    """Sixty digits, and always the first order."""

    def number(self, value: float) -> Any:
        """Return a number; a double is taken as it is."""
        return mpf(value)

    scalar = number

    def sqrt(self, value: Any) -> Any:
        """Return √x."""
        return mp.sqrt(value)

    def total(self, terms: Sequence[Any]) -> Any:
        """Add some numbers up."""
        return sum(terms, mpf(0))

    def product(self, over: Sequence[Any], under: Sequence[Any] = ()) -> Any:
        """Multiply some numbers and divide by others; 0 where a factor is 0, also over 0."""
        result = mpf(1)
        if any(value == 0 for value in over):
            return mpf(0)
        for value in over:
            result *= value
        for value in under:
            result /= value
        return result

    def either(self, place: str) -> bool:
        """Choose between two forms, at a place of a formula."""
        return True


class Rounded(Exact):
    """Numbers of a dtype, every operation rounded to it, in random orders.

    Doubles hold them, and round correctly for these widths. Scalars (rates, betas) stay doubles until they
    meet a number, and take part as float32, as they do in torch and in every kernel.
    """

    def __init__(self, dtype: str, seed: int) -> None:
        self.kind = kind(dtype)
        self.random = random.Random(seed)
        self.habits: dict[str, float] | None = {} if seed % 2 else None
        self.least = math.ldexp(1.0, FORMATS[dtype][1])

    def number(self, value: float) -> Any:
        """Return a number of the dtype."""
        return self.kind(value)

    def scalar(self, value: float) -> Any:
        """Return a double."""
        return float(value)

    def sqrt(self, value: Any) -> Any:
        """Return √x; a plain double stays one."""
        return type(value)(math.sqrt(value)) if value >= 0 else math.nan

    def total(self, terms: Sequence[Any]) -> Any:
        """Add up in random order."""
        shuffled = self.random.sample(list(terms), len(terms))
        result = self.kind(0.0)
        for term in shuffled:
            result = result + term
        return result

    def product(self, over: Sequence[Any], under: Sequence[Any] = ()) -> Any:
        """Multiply and divide in random order.

        Who has habits may have that to multiply by the rounded reciprocal, where division is dear.
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
        """Choose by a coin or, out of habit, at a place always or never the first form.

        Code evaluates the same form all the time, so that its roundings may all go the same way.
        """
        habits = (0.5,) if self.habits is None else (0.0, 0.5, 1.0)
        known = {} if self.habits is None else self.habits
        return self.random.random() < known.setdefault(place, self.random.choice(habits))

    def _reciprocal(self) -> bool:
        return self.habits is not None and self.either("quotient")


def kind(dtype: str) -> type[float]:
    """Return the type of the numbers of a dtype: a float that rounds after every operation."""
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
        __slots__ = ()

        def __new__(cls, value: float) -> "Number":
            return super().__new__(cls, nearest(value))

        def __add__(self, other: Any) -> Any:
            return Number(float(self) + operand(other))

        def __sub__(self, other: Any) -> Any:
            return Number(float(self) - operand(other))

        def __rsub__(self, other: Any) -> Any:
            return Number(operand(other) - float(self))

        def __mul__(self, other: Any) -> Any:
            return Number(float(self) * operand(other))

        def __truediv__(self, other: Any) -> Any:
            return Number(float(self) / operand(other)) if other else Number(math.copysign(math.inf, self))

        def __rtruediv__(self, other: Any) -> Any:
            return Number(operand(other) / float(self))

        def __neg__(self) -> Any:
            return Number(-float(self))

        __radd__, __rmul__ = __add__, __mul__

    return Number
