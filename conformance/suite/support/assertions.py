"""Assertions of the cases: expected and seen values, errors in ULPs, raised exceptions.

Tensors may be on any device; they are compared on the CPU.
"""

import copy
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.described import MissingName


class Mismatch(AssertionError):  # noqa: N818 - it is what a case reports, not an error of ours
    """A case raises this error when an implementation does not meet an expectation."""

    def __init__(self, expected: str, seen: object) -> None:
        self.expected = expected
        self.seen = seen if isinstance(seen, str) else _ordered(seen)
        super().__init__(f"expected {expected}; seen {self.seen}")

    def add(self, more: str) -> None:
        """Add a clause to what was seen."""
        self.seen = f"{self.seen}; {more}"
        self.args = (f"expected {self.expected}; seen {self.seen}",)


class Late(Mismatch):
    """A case raises this error when processes that it started reached the time limit."""


def _ordered(value: object) -> str:
    """Format a value, with sets in order, so that two runs give the same text."""
    if isinstance(value, set | frozenset) and value:
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    return repr(value)


def expect(ok: object, expected: str, seen: object) -> None:
    """Raise `Mismatch` unless ``ok``."""
    if not ok:
        raise Mismatch(expected, seen)


def expect_equal(seen: object, expected: object, what: str) -> None:
    """Expect plain Python values to be equal."""
    expect(seen == expected, f"{what} == {_ordered(expected)}", seen)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits (NaN equals the same NaN)."""
    one, other = map(torch.Tensor.detach, (one, other))  # an attribute of a tensor could answer otherwise
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.coalesce(), other.coalesce()
        return same_bits(one.indices(), other.indices()) and same_bits(one.values(), other.values())
    raw = (tensor.cpu().contiguous().reshape(-1) for tensor in (one, other))
    return torch.equal(*(tensor.view(torch.uint8) for tensor in raw))


def expect_bits(seen: torch.Tensor | None, expected: torch.Tensor, what: str) -> None:
    """Expect two tensors to be bit-identical; None differs from every tensor."""
    if seen is None or not same_bits(seen, expected):
        raise Mismatch(f"{what} bit-identical to {_text(expected)}", f"{unlike(seen, expected)}{_text(seen)}")


def expect_close(
    seen: torch.Tensor | float, expected: torch.Tensor | float, what: str, ulps: float = 4
) -> None:
    """Expect values within ``ulps`` units in the last place.

    The unit is that of ``seen``'s dtype (float64 for a Python number) at the larger of the two
    magnitudes, element by element; equal infinities and two NaNs agree.
    """
    have = torch.as_tensor(seen, dtype=None if isinstance(seen, torch.Tensor) else torch.float64)
    want = exactly(expected)
    expect(have.shape == want.shape, f"{what} of shape {tuple(want.shape)}", tuple(have.shape))
    info = torch.finfo(have.dtype)
    exact = exactly(have)
    larger = torch.maximum(exact.abs(), want.abs())
    unit = torch.exp2(torch.floor(torch.log2(larger.clamp(min=info.smallest_normal)))) * info.eps
    agree = (exact == want) | (exact.isnan() & want.isnan()) | ((exact - want).abs() <= ulps * unit)
    if not agree.all():
        raise Mismatch(
            f"{what} within {ulps:g} ULP of {_text(want)}", f"{unlike(have, want, ~agree)}{_text(have)}"
        )


def exactly(value: torch.Tensor | float) -> torch.Tensor:
    """Return a number or a tensor as a float64 tensor on the CPU, detached."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor.detach(value).cpu().double()
    return torch.as_tensor(value, dtype=torch.float64)


def ulp_error(seen: torch.Tensor, exact: torch.Tensor, before: torch.Tensor | float = 0.0) -> float:
    """Return the largest error in units in the last place of ``seen``'s dtype.

    The unit is taken at the larger of the exact values before and after, elementwise. The error is infinite
    if only one of the two values is finite.
    """
    errors = ulp_errors(seen, exact, before)
    return float(errors.max()) if errors.numel() else 0.0


def ulp_errors(seen: torch.Tensor, exact: torch.Tensor, before: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return the error of each element, as defined by `ulp_error`."""
    info = torch.finfo(seen.dtype)
    have, exact = exactly(seen), exactly(exact)
    larger = torch.maximum(exact.abs(), exactly(before).abs())
    unit = torch.exp2(torch.floor(torch.log2(larger.clamp(min=info.smallest_normal)))) * info.eps
    agree = (have == exact) | (have.isnan() & exact.isnan())
    return torch.where(agree, 0.0, ((have - exact).abs() / unit).nan_to_num(nan=math.inf))


def error_budget(worst: float) -> float:
    """Return the error budget, given the worst error of many orders of the formula in the same dtype."""
    return max(2.0, 2.0 * worst)


def worst_of_orders(
    formula: Callable[[torch.Generator], torch.Tensor],
    exact: torch.Tensor,
    before: torch.Tensor | float = 0.0,
    orders: int = 32,
) -> float:
    """Return the worst error of a formula, evaluated in a dtype and in randomly drawn orders."""
    generators = (torch.Generator().manual_seed(order) for order in range(orders))
    return max(ulp_error(formula(generator), exact, before) for generator in generators)


def expect_within(
    seen: torch.Tensor, exact: torch.Tensor, budget: float, what: str, before: torch.Tensor | float = 0.0
) -> float:
    """Expect an error of at most ``budget`` units in the last place; return it, to be recorded."""
    expect(seen.shape == exact.shape, f"{what} of shape {tuple(exact.shape)}", tuple(seen.shape))
    errors = ulp_errors(seen, exact, before)
    error = float(errors.max()) if errors.numel() else 0.0
    if not error <= budget:
        said = unlike(seen, exact, ~(errors <= budget), errors) or f"{error:g} ULP, "
        raise Mismatch(f"{what} within {budget:g} ULP of {_text(exact)}", f"{said}{_text(seen)}")
    return error


def expect_raises(
    action: Callable[[], object],
    *kinds: type[BaseException],
    mentions: Sequence[str] = (),
    expected: str,
) -> BaseException:
    """Expect ``action`` to raise one of ``kinds`` with every text in ``mentions`` in its message."""
    try:
        result = action()
    except Exception as error:
        if isinstance(error, MissingName):  # the case asked for a name that the implementation lacks
            raise
        if isinstance(error, Mismatch):  # another expectation of the case, inside the action
            raise
        unknown = isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
        if unknown and not issubclass(TypeError, kinds):
            raise  # the case asked for an argument that the implementation lacks
        text = str(error)
        seen = f"{type(error).__name__}: {text}"
        expect(isinstance(error, kinds), _of_kinds(expected, kinds), seen)
        missing = [mention for mention in mentions if mention not in text]
        expect(not missing, f"{expected}, with {missing} in its message", seen)
        return error
    raise Mismatch(_of_kinds(expected, kinds), f"no error, returned {_text(result)}")


def error_of(action: Callable[[], object]) -> str:
    """Return the type and text of the error of `action`, of any kind, or an empty string if there is none."""
    try:
        action()
    except (MissingName, Mismatch):  # errors of the case, not of the implementation
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _of_kinds(expected: str, kinds: Sequence[type[BaseException]]) -> str:
    """Return the text of an expectation with the names of the expected errors.

    >>> _of_kinds("an error for lr=-1", [ValueError, TypeError]), _of_kinds("a ValueError", [ValueError])
    ('an error for lr=-1 (ValueError or TypeError)', 'a ValueError')
    """
    names = [kind.__name__ for kind in kinds]
    said = Exception in kinds or any(name in expected for name in names)
    return expected if said else f"{expected} ({' or '.join(names)})"


def expect_derived(cls: type, base: type) -> None:
    """Expect a class to be derived from ``base``, or from the class of the same name that ``base`` extends.

    The second case allows adapters whose classes each only subclass one class of another library.
    """
    same = [each for each in base.__mro__ if each.__name__ == base.__name__]
    expect(any(issubclass(cls, each) for each in same), f"a subclass of {base.__name__}", cls.__mro__)


def outcome(action: Callable[[], object]) -> str:
    """Return the result of ``action``, or its kind of error, as text, for cases that observe."""
    try:
        result = action()
    except Exception as error:
        if isinstance(error, MissingName):  # as above
            raise
        return f"raises {type(error).__name__}"
    return f"returns {_text(result)}"


def snapshot(tree: Any) -> Any:
    """Clone every tensor of a nested structure; other leaves are deep-copied."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_make"):  # a named tuple, which code reads by name
        return tree._make(snapshot(value) for value in tree)
    if isinstance(tree, list | tuple):
        return [snapshot(value) for value in tree]
    return tree if type(tree) in (bool, int, float, str, type(None)) else copy.deepcopy(tree)


def expect_unchanged(before: Any, tree: Any, what: str) -> None:
    """Expect ``tree`` to equal, bit by bit, its earlier `snapshot`."""
    if isinstance(before, torch.Tensor):
        expect(isinstance(tree, torch.Tensor), f"{what} still a tensor", type(tree).__name__)
        if not same_bits(tree, before):
            raise Mismatch(f"{what} unchanged, {_text(before)}", f"{unlike(tree, before)}{_text(tree)}")
    elif isinstance(before, dict):
        expect(isinstance(tree, Mapping), f"{what} still a mapping", type(tree).__name__)
        expect_equal(set(tree), set(before), f"keys of {what}")
        for key, value in before.items():
            expect_unchanged(value, tree[key], f"{what}[{key!r}]")
    elif isinstance(before, list | tuple):
        expect_equal(len(tree), len(before), f"length of {what}")
        for index, value in enumerate(before):
            expect_unchanged(value, tree[index], f"{what}[{index}]")
    else:
        expect(same_value(tree, before), f"{what} == {_ordered(before)}", tree)


def same_value(one: Any, other: Any, compared: frozenset[int] = frozenset()) -> bool:
    """Whether two values are one object, equal, or of one class and in the same state.

    Most objects equal only themselves, and so differ from their copies.

    Args:
        one: a value.
        other: another value, perhaps a deep copy from before.
        compared: the objects that are being compared, so that cycles end.
    """
    if one is other or id(one) in compared:
        return True
    if type(one) is not type(other):
        return bool(one == other)
    if isinstance(one, torch.Tensor):
        return same_bits(one, other)
    compared |= {id(one)}
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_value(one[key], other[key], compared) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other, [compared] * len(one)))
    if bool(one == other):
        return True
    state = _state_of(one)
    return bool(state) and same_value(state, _state_of(other), compared)


def _state_of(value: Any) -> list[Any]:
    """Return what an object would be copied from; nothing of a number or a function, whose copy is itself."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    try:
        made = () if copy.copy(value) is value else value.__reduce_ex__(4)
    except Exception as error:
        kind = type(value).__name__
        raise MissingName(
            f"a {kind} has no state to compare: {error}", name=f"{kind}.__reduce_ex__"
        ) from None
    # what follows the first three parts are iterators over elements
    return [list(part) if index > 2 and part else part for index, part in enumerate(made)]


def unlike(
    seen: object,
    expected: torch.Tensor,
    wrong: torch.Tensor | None = None,
    ulps: torch.Tensor | None = None,
) -> str:
    """Say how many elements differ, the greatest difference, and where.

    Of single numbers, and of tensors that cannot be compared element by element, nothing is said.

    Args:
        seen: the value of an implementation.
        expected: what it should be.
        wrong: the elements that are beyond the tolerance; None if there is none, so that only equals agree.
        ulps: the difference of each element in units in the last place; None is the absolute difference.

    >>> unlike(torch.tensor([1.0, 1.5]), torch.tensor([1.0, 0.5]))
    '1 of 2 differ, most by 1 at [1]: 1.5, not 0.5; '
    """
    if not isinstance(seen, torch.Tensor) or seen.shape != expected.shape or expected.numel() < 2:
        return ""
    if {seen.layout, expected.layout} != {torch.strided} or "meta" in (
        seen.device.type,
        expected.device.type,
    ):
        return ""
    have, want = exactly(seen), exactly(expected)
    agree = (have == want) | (have.isnan() & want.isnan()) if wrong is None else ~wrong
    if agree.all():
        return ""
    gaps = (have - want).abs() if ulps is None else ulps
    ranked = torch.where(agree, -1.0, gaps.nan_to_num(nan=math.inf, posinf=math.inf)).reshape(-1)
    place = torch.unravel_index(ranked.argmax(), have.shape)
    found, wanted, gap = (float(value[place]) for value in (have, want, gaps))
    where = ", ".join(str(int(number)) for number in place)
    count = f"{int((~agree).sum())} of {have.numel()}"
    most = f"{gap:.3g}{'' if ulps is None else ' ULP'}"
    return f"{count} differ, most by {most} at [{where}]: {found:.6g}, not {wanted:.6g}; "


def _text(value: object) -> str:
    """Format a value on one line, and shorten a long one."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return f"meta tensor {tuple(value.shape)}"
        flat = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        if flat.numel() > 300:  # the rest would be cut off below
            flat = flat.reshape(-1)[:300]
        value = f"{flat.tolist()} ({str(flat.dtype).removeprefix('torch.')})"
    if isinstance(value, torch.optim.Optimizer):
        return f"an optimizer of the class {type(value).__name__}"
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def p_norm(numbers: Sequence[Any], p: float = 2.0) -> float:
    """Compute a p-norm with Python numbers, exactly summed and without overflow."""
    sizes = [abs(number) for number in numbers]
    largest = max(sizes, default=0.0)
    if math.isinf(p) or largest == 0.0:
        return float(largest)
    return float(largest * math.fsum((size / largest) ** p for size in sizes) ** (1 / p))
