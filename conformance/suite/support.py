"""What the cases of the suite share: expectations, small builders, deterministic inputs.

This module uses torch and the standard library alone, because a failing case is written out as a
stand-alone script that begins with this very file (see ``keyedopt replay``).
"""

import contextlib
import copy
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

#: Whether kernels run in Triton's interpreter, which takes minutes for a million sums.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Mismatch(AssertionError):  # noqa: N818 - it is what a case reports, not an error of ours
    """What a case raises when an implementation does not do what is expected of it."""

    def __init__(self, expected: str, seen: object) -> None:
        self.expected = expected
        self.seen = seen if isinstance(seen, str) else _ordered(seen)
        super().__init__(f"expected {expected}; seen {self.seen}")


def _ordered(value: object) -> str:
    """Write a value; a set in order, so that two runs say the same."""
    if isinstance(value, set | frozenset) and value:
        return "{" + ", ".join(sorted(map(repr, value))) + "}"
    return repr(value)


# --- expectations ---------------------------------------------------------------------------------


def expect(ok: object, expected: str, seen: object) -> None:
    """Raise `Mismatch` unless ``ok``."""
    if not ok:
        raise Mismatch(expected, seen)


def expect_equal(seen: object, expected: object, what: str) -> None:
    """Expect plain Python values to be equal."""
    expect(seen == expected, f"{what} == {_ordered(expected)}", seen)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits (NaN equals the same NaN)."""
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.coalesce(), other.coalesce()
        return same_bits(one.indices(), other.indices()) and same_bits(one.values(), other.values())
    if one.device.type == "meta":
        return True
    raw = (tensor.detach().cpu().contiguous().reshape(-1) for tensor in (one, other))
    return torch.equal(*(tensor.view(torch.uint8) for tensor in raw))


def expect_bits(seen: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Expect two tensors to be bit-identical."""
    expect(same_bits(seen, expected), f"{what} bit-identical to {_text(expected)}", _text(seen))


def expect_close(
    seen: torch.Tensor | float, expected: torch.Tensor | float, what: str, ulps: float = 4
) -> None:
    """Expect values within ``ulps`` units in the last place.

    The unit is that of ``seen``'s dtype (float64 for a Python number) at the larger of the two
    magnitudes, element by element; equal infinities and two NaNs agree.
    """
    have = torch.as_tensor(seen, dtype=None if isinstance(seen, torch.Tensor) else torch.float64)
    want = torch.as_tensor(expected, dtype=torch.float64)
    expect(have.shape == want.shape, f"{what} of shape {tuple(want.shape)}", tuple(have.shape))
    info = torch.finfo(have.dtype)
    exact = have.detach().cpu().double()
    larger = torch.maximum(exact.abs(), want.abs())
    unit = torch.exp2(torch.floor(torch.log2(larger.clamp(min=info.smallest_normal)))) * info.eps
    agree = (exact == want) | (exact.isnan() & want.isnan()) | ((exact - want).abs() <= ulps * unit)
    expect(agree.all(), f"{what} within {ulps:g} ULP of {_text(want)}", _text(have))


def ulp_error(seen: torch.Tensor, exact: torch.Tensor, before: torch.Tensor | float = 0.0) -> float:
    """Return the largest error in units in the last place of ``seen``'s dtype.

    The unit is taken at the larger of the exact values before and after, element by element; the error
    of what is not finite and should be, or the other way round, is infinite.
    """
    errors = ulp_errors(seen, exact, before)
    return float(errors.max()) if errors.numel() else 0.0


def ulp_errors(seen: torch.Tensor, exact: torch.Tensor, before: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return the error of each element, as `ulp_error` takes them."""
    info = torch.finfo(seen.dtype)
    have = seen.detach().cpu().double()
    larger = torch.maximum(exact.abs(), torch.as_tensor(before, dtype=torch.float64).abs())
    unit = torch.exp2(torch.floor(torch.log2(larger.clamp(min=info.smallest_normal)))) * info.eps
    agree = (have == exact) | (have.isnan() & exact.isnan())
    return torch.where(agree, 0.0, ((have - exact).abs() / unit).nan_to_num(nan=math.inf))


def error_budget(worst: float) -> float:
    """Return what an error may be, given the worst of many orders of the same formula in the same dtype."""
    return max(2.0, 2.0 * worst)


def worst_of_orders(
    formula: Callable[[torch.Generator], torch.Tensor],
    exact: torch.Tensor,
    before: torch.Tensor | float = 0.0,
    orders: int = 32,
) -> float:
    """Return the worst error of a formula that evaluates in a dtype, in an order drawn from a generator."""
    generators = (torch.Generator().manual_seed(order) for order in range(orders))
    return max(ulp_error(formula(generator), exact, before) for generator in generators)


def expect_within(
    seen: torch.Tensor, exact: torch.Tensor, budget: float, what: str, before: torch.Tensor | float = 0.0
) -> float:
    """Expect an error of at most ``budget`` units in the last place; return it, to be recorded."""
    expect(seen.shape == exact.shape, f"{what} of shape {tuple(exact.shape)}", tuple(seen.shape))
    error = ulp_error(seen, exact, before)
    expect(error <= budget, f"{what} within {budget:g} ULP of {_text(exact)}", f"{error:g} in {_text(seen)}")
    return error


def expect_raises(
    action: Callable[[], object],
    *kinds: type[BaseException],
    mentions: Sequence[str] = (),
    expected: str,
) -> BaseException:
    """Expect ``action`` to raise one of ``kinds`` with every text of ``mentions`` in its message."""
    try:
        result = action()
    except Exception as error:
        if type(error).__name__ == "MissingName":  # it is the case that asks for what is not there
            raise
        text = str(error)
        seen = f"{type(error).__name__}: {text}"
        expect(isinstance(error, kinds), expected, seen)
        missing = [mention for mention in mentions if mention not in text]
        expect(not missing, f"{expected}, with {missing} in its message", seen)
        return error
    raise Mismatch(expected, f"no error, returned {_text(result)}")


def expect_derived(cls: type, base: type) -> None:
    """Expect a class to be derived from ``base``, or from the class of the same name that it extends.

    The latter is how an adapter looks whose classes each subclass one of another library and no more.
    """
    same = [each for each in base.__mro__ if each.__name__ == base.__name__]
    expect(any(issubclass(cls, each) for each in same), f"a subclass of {base.__name__}", cls.__mro__)


def outcome(action: Callable[[], object]) -> str:
    """Say what ``action`` does, for cases that observe: its result or its kind of error."""
    try:
        result = action()
    except Exception as error:
        return f"raises {type(error).__name__}"
    return f"returns {_text(result)}"


def snapshot(tree: Any) -> Any:
    """Clone every tensor of a nested structure; other leaves are deep-copied."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: snapshot(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [snapshot(value) for value in tree]
    return copy.deepcopy(tree)


def expect_unchanged(before: Any, tree: Any, what: str) -> None:
    """Expect ``tree`` to be, bit by bit, what `snapshot` took."""
    if isinstance(before, torch.Tensor):
        expect(isinstance(tree, torch.Tensor), f"{what} still a tensor", type(tree).__name__)
        expect(same_bits(tree, before), f"{what} unchanged, {_text(before)}", _text(tree))
    elif isinstance(before, dict):
        expect(isinstance(tree, Mapping), f"{what} still a mapping", type(tree).__name__)
        expect_equal(set(tree), set(before), f"keys of {what}")
        for key, value in before.items():
            expect_unchanged(value, tree[key], f"{what}[{key!r}]")
    elif isinstance(before, list):
        expect_equal(len(tree), len(before), f"length of {what}")
        for index, value in enumerate(before):
            expect_unchanged(value, tree[index], f"{what}[{index}]")
    else:
        expect_equal(tree, before, what)


def _text(value: object) -> str:
    """Write a value on one line, and a long one shortened."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return f"meta tensor {tuple(value.shape)}"
        flat = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        if flat.numel() > 300:  # what is cut off below need not be written
            flat = flat.reshape(-1)[:300]
        value = f"{flat.tolist()} ({str(flat.dtype).removeprefix('torch.')})"
    text = " ".join((value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


# --- inputs ---------------------------------------------------------------------------------------


def _numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Make fixed numbers in (-1, 1), no two alike, the same on every machine and version."""
    count = math.prod(shape)
    flat = [math.fmod((index + 1) * 0.6180339887 + seed * 0.7548776662, 1.0) for index in range(count)]
    return (torch.tensor(flat, dtype=torch.float64) * 2 - 1).reshape(tuple(shape))


def parameter(*shape: int, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> torch.nn.Parameter:
    """Make a parameter with fixed values in (-1, 1)."""
    return torch.nn.Parameter(_numbers(shape, seed).to(device, getattr(torch, dtype)))


def parameters(
    n: int = 2, shape: Sequence[int] = (3,), dtype: str = "float32", device: str = "cpu"
) -> dict[str, torch.nn.Parameter]:
    """Make ``n`` parameters with the keys ``p0``, ``p1``, …"""
    return {f"p{index}": parameter(*shape, dtype=dtype, device=device, seed=index) for index in range(n)}


def _listed(params: Any) -> list[torch.Tensor]:
    return list(params.values()) if isinstance(params, Mapping) else list(params)


def set_grads(params: Any, seed: int = 1, scale: float = 1.0) -> None:
    """Give every parameter (of a mapping or a list) a fixed dense gradient in (-scale, scale)."""
    for index, param in enumerate(_listed(params)):
        fixed = _numbers(param.shape, 101 * seed + index) * scale
        param.grad = fixed.to(param.device, param.dtype)


def values(params: Any) -> list[torch.Tensor]:
    """Clone the values of the parameters of a mapping or a list."""
    return [param.detach().clone() for param in _listed(params)]


def train(optimizer: Any, params: Any, steps: int, seed: int = 1) -> None:
    """Take ``steps`` steps, each on another fixed gradient."""
    for step in range(steps):
        set_grads(params, seed=seed + step)
        optimizer.step()


def set_sparse_grad(param: Any, rows: Sequence[int], seed: int = 1, scale: float = 1.0) -> None:
    """Give a parameter a fixed sparse gradient: these rows, repeated ones included, uncoalesced."""
    fixed = _numbers((len(rows), *param.shape[1:]), 101 * seed) * scale
    indices = torch.tensor([list(rows)], dtype=torch.int64, device=param.device)
    listed = fixed.to(param.device, param.dtype)
    param.grad = torch.sparse_coo_tensor(indices, listed, tuple(param.shape), check_invariants=True)


def train_sparse(optimizer: Any, params: Any, steps: int, seed: int = 1) -> None:
    """Take ``steps`` steps, each on another fixed sparse gradient that leaves out some rows, repeats some."""
    for step in range(steps):
        for index, param in enumerate(_listed(params)):
            first = (seed + step + index) % len(param)
            set_sparse_grad(param, [first, (first + 2) % len(param), first], seed=seed + step + 7 * index)
        optimizer.step()


# --- optimizers -----------------------------------------------------------------------------------


def sgd(impl: Any, params: Mapping[str, Any], lr: float = 0.1, **options: Any) -> Any:
    """Wrap ``torch.optim.SGD`` in the implementation's `KeyedOptimizerWrapper`."""
    return impl.KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=lr, **options))


def adam(impl: Any, params: Mapping[str, Any], lr: float = 0.1, **options: Any) -> Any:
    """Wrap ``torch.optim.Adam`` in the implementation's `KeyedOptimizerWrapper`."""
    return impl.KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adam, lr=lr, **options))


def adagrad(impl: Any, params: Mapping[str, Any], lr: float = 0.1, **options: Any) -> Any:
    """Wrap ``torch.optim.Adagrad`` in the implementation's `KeyedOptimizerWrapper`."""
    return impl.KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adagrad, lr=lr, **options))


def warmup_stages(impl: Any, listed: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Make the implementation's `WarmupStage` objects from literals: policies are given by name."""
    return [
        impl.WarmupStage(
            **{**fields, "policy": impl.WarmupPolicy[fields["policy"]]} if "policy" in fields else fields
        )
        for fields in listed
    ]


class Recorder(torch.optim.Optimizer):
    """Change nothing; note at each step the gradients that arrive and the rates in force.

    ``received`` holds, for each step, a clone of every gradient (None where there is none);
    ``rates`` the ``lr`` of every group. The closure, if any, is called ``evaluations`` times.
    """

    def __init__(self, params: Any, lr: float = 0.1, evaluations: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.evaluations = evaluations
        self.received: list[list[torch.Tensor | None]] = []
        self.rates: list[list[Any]] = []

    def step(self, closure: Any = None) -> Any:
        """Note the gradients after each evaluation of the closure."""
        loss = None
        for _ in range(self.evaluations if closure is not None else 1):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.received.append(
                [
                    None if param.grad is None else param.grad.detach().clone()
                    for group in self.param_groups
                    for param in group["params"]
                ]
            )
        self.rates.append([group["lr"] for group in self.param_groups])
        return loss


def recording(impl: Any, params: Mapping[str, Any], **options: Any) -> tuple[Any, Any]:
    """Make a keyed optimizer around a `Recorder`, and return both."""
    made: list[Recorder] = []

    def factory(listed: Any) -> Recorder:
        made.append(Recorder(listed, **options))
        return made[0]

    keyed = impl.KeyedOptimizerWrapper(params, factory)
    return keyed, made[0]


def clipping(
    impl: Any, params: Mapping[str, Any], kind: str = "NORM", max_gradient: float = 1.0, **options: Any
) -> tuple[Any, Any]:
    """Make a clipping optimizer around a `Recorder`, and return both."""
    keyed, recorder = recording(impl, params)
    chosen = getattr(impl.GradientClipping, kind)
    return impl.GradientClippingOptimizer(keyed, chosen, max_gradient, **options), recorder


def p_norm(numbers: Sequence[Any], p: float = 2.0) -> float:
    """Compute a p-norm with Python numbers, exactly summed and without overflow."""
    sizes = [abs(number) for number in numbers]
    largest = max(sizes, default=0.0)
    if math.isinf(p) or largest == 0.0:
        return float(largest)
    return float(largest * math.fsum((size / largest) ** p for size in sizes) ** (1 / p))


class Stateful:
    """An object that follows PyTorch's stateful protocol; it can be told to refuse a load."""

    def __init__(self, tensor: torch.Tensor, refuse: bool = False) -> None:
        self.tensor = tensor
        self.refuse = refuse

    def state_dict(self) -> dict[str, Any]:
        """Return the tensor, aliased."""
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the tensor in place; a refusing object writes first and then raises."""
        self.tensor.detach().copy_(state_dict["tensor"])
        if self.refuse:
            raise RuntimeError("this object refuses to load")


# --- surroundings ---------------------------------------------------------------------------------


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """Set up torch.distributed with one gloo rank, in memory and without a network."""
    from torch import distributed

    store = distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()
