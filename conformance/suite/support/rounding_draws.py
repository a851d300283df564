"""Helpers for cases of stochastic rounding: two tables of one size, and the numbers that they draw."""

import warnings
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import exactly, expect, expect_bits, expect_equal
from keyedopt.conformance.suite.support.embedding import collection, jagged, tables_of
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.inputs import INTERPRETED, parameters
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory

DRAW_WIDTH, DRAW_STEPS = (64, 4) if INTERPRETED else (512, 8)
#: Two tables of one size.
DRAW_TABLES = (("t", 8, DRAW_WIDTH, ("f",)), ("u", 8, DRAW_WIDTH, ("g",)))


def seeded_tables(
    impl: Any, optimizer: str, dtype: str, how: str = "", seed: int | None = 7, **options: Any
) -> tuple[Any, Any]:
    """Make a module of two tables, and what takes its steps: a wrapper that clips jointly, or nothing.

    Args:
        impl: the implementation.
        optimizer: of the tables, of 1.5 and -1.5; a step of gradients of one is a quarter of their unit.
        dtype: of the tables.
        how: "groups" if each table has a group of its own, "joint" if updates are deferred, or both.
        seed: of stochastic rounding; None for none.
        options: more options of the optimizer.
    """
    options = {"lr": torch.finfo(getattr(torch, dtype)).eps / 4, **options}
    more: dict[str, Any] = {} if seed is None else {"rounding_seed": seed}
    module = collection(impl, optimizer, options, DRAW_TABLES, dtype=dtype, **more)
    if "groups" in how:
        apply_in_backward(impl, getattr(torch.optim, optimizer), [tables_of(module)["u"]], options)
    with torch.no_grad():
        for sign, table in zip((1, -1), tables_of(module).values(), strict=True):
            table.fill_(sign * 1.5)
    if "joint" not in how:
        return module, None
    dense = impl.KeyedOptimizerWrapper(parameters(1), torch_factory(torch.optim.SGD, lr=1.0))
    whole = impl.CombinedOptimizer([module.fused_optimizer, dense])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:  # the bound is never reached
            return module, impl.GradientClippingOptimizer(whole, impl.GradientClipping.NORM, 1e9)
        except ValueError:  # joint clipping may be refused
            return module, None


def train_seeded(module: Any, whole: Any, steps: int) -> torch.Tensor:
    """Train both tables with gradients of one, and return their rows."""
    bags = jagged({name: [[row] for row in range(8)] for name in ("f", "g")})
    for _ in range(steps):
        torch.autograd.backward([output.sum() for output in module(bags).values()])
        if whole is not None:
            whole.step()
    return torch.cat([table.detach() for table in tables_of(module).values()])


def expect_own_draws(impl: Any, optimizer: str, dtype: str, how: str = "", **options: Any) -> None:
    """Expect steps, tables and rows to draw numbers of their own, and the same seed to draw the same."""
    unit = torch.finfo(getattr(torch, dtype)).eps
    rows = train_seeded(*seeded_tables(impl, optimizer, dtype, how, **options), DRAW_STEPS)
    again = train_seeded(*seeded_tables(impl, optimizer, dtype, how, **options), DRAW_STEPS)
    expect_bits(again, rows, "tables with the same seed")
    if rows.dtype.itemsize > 2:
        plain = train_seeded(*seeded_tables(impl, optimizer, dtype, how, None, **options), DRAW_STEPS)
        expect_bits(rows, plain, "tables that are not rounded")
        return
    # Each step moves an element by 1 unit with probability 1/4.
    # The variances of 3/16 add up; with equal draws in each step they grow faster.
    # The bounds are at least 4 standard deviations of the mean and 7 of the variance.
    moved = (1.5 * exactly(rows).sign() - exactly(rows)) / unit
    mean, variance = (float(of(moved)) / DRAW_STEPS for of in (torch.mean, torch.var))
    expect(abs(mean - 1 / 4) <= 1 / 32, "a mean of 1/4 unit in each step", mean)
    expect(1 / 8 <= variance <= 9 / 32, "a variance of 3/16 in each step", variance)
    expect_equal(len(torch.unique(moved, dim=0)), 16, "rows with draws of their own")
