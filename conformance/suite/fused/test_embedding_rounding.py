"""Embedding modules: stochastic rounding of tables in half precision, with a seed."""

import copy

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_bits,
    expect_raises,
    snapshot,
)
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    tables_and_state,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.rounding_draws import (
    DRAW_STEPS,
    expect_own_draws,
    seeded_tables,
    train_seeded,
)

#: Momentum in half precision, too.
NARROW = {"optimizer_state_dtypes": {"momentum1": torch.bfloat16}}


@pytest.mark.clause("FUSED-086")
@pytest.mark.plain_only("it compares two tables")
@pytest.mark.needs(
    "EmbeddingBagCollection.rounding_seed", "GradientClippingOptimizer", "apply_optimizer_in_backward"
)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("how", ["groups", "joint", "joint groups"])
def test_draws_of_groups_and_deferred_steps(impl, how, optimizer, dtype):
    """Tables of unlike groups draw numbers of their own, also in steps of a joint norm."""
    expect_own_draws(impl, optimizer, dtype, how)


@pytest.mark.clause("FUSED-086", "FUSED-096")
@pytest.mark.plain_only("it compares two tables")
@pytest.mark.needs("EmbeddingBagCollection.rounding_seed", "Adam", "Adam.optimizer_state_dtypes")
def test_draws_with_momentum_in_half_precision(impl, dtype):
    """Tables draw numbers of their own, and the momentum beside them is the one of tables without a seed."""
    if getattr(torch, dtype).itemsize == 2:
        expect_own_draws(impl, "Adam", dtype, **NARROW)
    entries = []
    for seed in (7, None):
        module, _ = seeded_tables(impl, "Adam", dtype, seed=seed, **NARROW)
        fit(module, jagged({"f": BAGS["f"], "g": BAGS["g"]}), steps=DRAW_STEPS)
        entries.append(module.fused_optimizer.state_dict()["state"])
    for name in ("t", "u"):
        rounded, near = (entry[f"{name}.weight"][f"{name}.momentum1"] for entry in entries)
        # To nearest or stochastically, an error is less than a unit; nine tenths stay in the next step.
        unit = exactly(near).abs().max() * torch.finfo(torch.bfloat16).eps
        off = (exactly(rounded) - exactly(near)).abs().max() / unit
        expect(float(off) <= 15, f"momentum of {name} within 15 units of its largest", float(off))


@pytest.mark.clause("FUSED-086")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.rounding_seed")
def test_draws_of_numbers_of_all_sizes(impl, dtype):
    """A number is rounded to one of its two neighbours, also to one that is subnormal in float16."""
    module = collection(impl, tables=[("t", 8, 64, ("f",))], dtype=dtype, rounding_seed=7)
    table = tables_of(module)["t"]
    sizes = torch.exp2(-torch.arange(512.0).reshape(8, 64) / 20)  # from 1 down to 2^-25
    with torch.no_grad():
        table.copy_(sizes * (1 - 2 * (torch.arange(64.0) % 2)))
    before = exactly(table).clone()
    train_rows(module, range(8), before)
    exact = 0.875 * before
    info = torch.finfo(table.dtype)
    unit = info.eps * torch.exp2(exact.abs().clamp(min=info.tiny).log2().floor())
    off = float(((exactly(table) - exact) / unit).abs().max())
    expect(off < 1 + 1e-6, "errors of less than one unit", off)


@pytest.mark.clause("FUSED-068")
@pytest.mark.plain_only("it compares two tables")
@pytest.mark.needs("EmbeddingBagCollection.rounding_seed", "Adam", "GradientClippingOptimizer")
@pytest.mark.parametrize("how", ["", "groups", "joint"], ids=["one group", "groups", "joint"])
def test_resumed_draws(impl, how, dtype):
    """A resumed run of an algorithm that counts its steps continues bit for bit, with the same seed."""
    module, whole = seeded_tables(impl, "Adam", dtype, how)
    train_seeded(module, whole, 2)
    saved = snapshot(tables_and_state(module))
    wanted = train_seeded(module, whole, 3)
    other, around = seeded_tables(impl, "Adam", dtype, how)
    with torch.no_grad():
        for name, table in tables_of(other).items():
            table.copy_(saved["tables"][name])
    other.fused_optimizer.load_state_dict({"state": saved["state"]})
    expect_bits(train_seeded(other, around, 3), wanted, "the tables of the resumed run")


@pytest.mark.clause("FUSED-048")
@pytest.mark.needs("EmbeddingBagCollection.rounding_seed", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_draws_of_copies(impl, optimizer, dtype):
    """A copy of a module with a seed trains like the original, bit for bit."""
    module, _ = seeded_tables(impl, optimizer, dtype)
    train_seeded(module, None, 2)
    copied = copy.deepcopy(module)
    expect_bits(train_seeded(copied, None, 2), train_seeded(module, None, 2), "the tables of the copy")


@pytest.mark.clause("FUSED-034")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.rounding_seed")
@pytest.mark.parametrize("seed", [-1, 2**64, 0.5])
def test_bad_rounding_seeds(impl, seed):
    """A seed of stochastic rounding that is negative, huge or not an integer raises an error."""
    collection(impl, tables=ONE_TABLE, rounding_seed=7)
    expect_raises(
        lambda: collection(impl, tables=ONE_TABLE, rounding_seed=seed),
        ValueError,
        TypeError,
        OverflowError,
        expected=f"an error for the seed {seed}",
    )
