"""Accelerators: embedding modules."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    FUSED_OPTIMIZERS,
    collection,
    fit,
    jagged,
    lookups,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.second_device import elsewhere, other_device
from keyedopt.conformance.suite.support.synchronizations import host_synchronizations

WEIGHTS = {"f": [[0.5, 2.0, -1.0], [3.0]], "g": [[], [0.25, 1.5]], "h": [[1.0, -2.0], [0.5]]}


@pytest.mark.clause("DEV-020")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_tables_on_another_index(impl, optimizer):
    """Tables on another index train as on the first, bit by bit, and leave it current."""
    module = torch.get_device_module(the_device())
    there = other_device("second")
    before = module.current_device()
    here, moved = (collection(impl, optimizer, device=device) for device in (the_device(), there))
    for seed in range(3):
        fit(here, jagged(BAGS), seed=seed)
        fit(moved, jagged(BAGS, device=str(there)), seed=seed)
    for name, table in tables_of(here).items():
        expect_bits(tables_of(moved)[name].detach(), table.detach(), f"table {name}")
    expect_equal(elsewhere(tables_and_state(moved), there), [], "devices of other tables and state")
    expect_equal(module.current_device(), before, "the current device")


@pytest.mark.clause("DEV-021")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("which", ["cpu", "second"])
@pytest.mark.parametrize("part", ["values", "offsets", "weights", "all"])
def test_features_elsewhere(impl, which, part):
    """Indices, offsets or weights on another device are refused, and no table changes."""
    there = other_device(which)
    module = collection(impl, weighted=True)
    fit(module, jagged(BAGS, WEIGHTS))
    before = snapshot(tables_and_state(module))
    features = jagged(BAGS, WEIGHTS)
    number = ("values", "offsets", "weights").index(part) if part != "all" else None
    features["f"] = tuple(
        one.to(there) if number in (place, None) else one for place, one in enumerate(features["f"])
    )
    expect_raises(
        lambda: lookups(module, features).backward(), ValueError, RuntimeError, expected="a refusal"
    )
    expect_unchanged(before, tables_and_state(module), "tables and state")


@pytest.mark.clause("DEV-022")
@pytest.mark.needs("EmbeddingBagCollection")
def test_waits_of_a_lookup(impl):
    """Observe how often the host waits for the device in a lookup and its backward pass."""
    module = collection(impl, "RowWiseAdagrad")
    fit(module, jagged(BAGS), steps=2)
    features = jagged(BAGS)
    with host_synchronizations(the_device()) as waits:
        sum(output.sum() for output in module(features).values()).backward()
    return {"waits": len(waits)}


@pytest.mark.clause("DEV-023")
@pytest.mark.needs("EmbeddingBagCollection", "RowWiseAdagrad")
@pytest.mark.parametrize("which", ["cpu", "second"])
@pytest.mark.parametrize("steps", [0, 2])
def test_tables_that_move(impl, steps, which):
    """Tables that move train on as tables on the device that loaded their checkpoint, with their state."""
    there = other_device(which)
    here, moved = (collection(impl, "RowWiseAdagrad", device=device) for device in (the_device(), there))
    for seed in range(steps):
        fit(moved, jagged(BAGS, device=str(there)), seed=seed)
    here.load_state_dict(moved.state_dict())
    here.fused_optimizer.load_state_dict(moved.fused_optimizer.state_dict())
    moved.to(the_device())
    for module in (here, moved):
        fit(module, jagged(BAGS), steps=2, seed=7)
    expect_equal(elsewhere(tables_and_state(moved), the_device()), [], "devices of other tables and state")
    expect_unchanged(snapshot(tables_and_state(here)), tables_and_state(moved), "tables and state")
