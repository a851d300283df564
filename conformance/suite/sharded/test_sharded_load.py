"""Loading state that ranks share: on all ranks or on none, also onto other placements and rank counts."""

import functools
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_equal,
    same_bits,
)
from keyedopt.conformance.suite.support.device import full, zeros
from keyedopt.conformance.suite.support.doubles import Stateful
from keyedopt.conformance.suite.support.ranks import on_each_rank
from keyedopt.conformance.suite.support.sharded import (
    PLACEMENTS,
    distributed,
    everywhere,
    gathered,
    local_parts,
    one_by_one,
    rank,
    size,
    table,
)

pytestmark = [
    pytest.mark.on_ranks,
    pytest.mark.needs("KeyedOptimizerWrapper", "CombinedOptimizer", "WarmupOptimizer"),
]

#: What is wrong with the state on one rank.
WRONG = ("shape", "kind", "missing parameter", "missing entry", "not a mapping", "groups")
WRAPPINGS = ("plain", "combined", "clipping", "warmup")


def fresh(impl: Any, wrapping: str = "plain", placement: str = "row", seed: int = 0) -> Any:
    """Return an optimizer of two DTensors and a plain parameter, with state of this seed."""
    params = {key: torch.nn.Parameter(distributed(table(5, seed=n), placement)) for n, key in enumerate("ab")}
    params["plain"] = torch.nn.Parameter(table(2, seed=3))
    optimizer = impl.KeyedOptimizerWrapper(params, one_by_one(torch.optim.Adagrad, lr=0.5))
    if wrapping == "combined":
        optimizer = impl.CombinedOptimizer([("one", optimizer)])
    elif wrapping == "clipping":
        optimizer = impl.GradientClippingOptimizer(optimizer, impl.GradientClipping.NORM, 1.0)
    elif wrapping == "warmup":
        stage = impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=9, value=0.1)
        optimizer = impl.WarmupOptimizer(optimizer, [stage], lr=0.5)
    optimizer.save_param_groups(True)
    optimizer.init_state()
    fill(optimizer, seed)
    return optimizer


def fill(optimizer: Any, seed: int) -> None:
    """Write numbers of a seed to the accumulated squares."""
    with torch.no_grad():
        for number, (_, entry) in enumerate(sorted(optimizer.state_dict()["state"].items())):
            for part in local_parts(entry["sum"]) if "sum" in entry else ():
                part.fill_(seed + number)


def contents(optimizer: Any) -> list[torch.Tensor]:
    """Return copies of all state tensors on this rank."""
    entries = [entry for _, entry in sorted(optimizer.state_dict()["state"].items())]
    tensors = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
    return [part.clone() for value in tensors for part in local_parts(value)]


def spoil(saved: dict[str, Any], wrong: str) -> Any:
    """Return a state dict with a defect."""
    key = sorted(key for key in saved["state"] if key.endswith("b"))[0]
    entry = dict(saved["state"][key])
    changes: dict[str, Any] = {
        "shape": {**entry, "sum": zeros(7, 7)},
        "kind": {**entry, "sum": 3.0},
        "missing entry": {"step": entry["step"]},
        "not a mapping": [1],
    }
    if wrong == "groups":
        return {**saved, "param_groups": []}
    state = {**saved["state"], key: changes.get(wrong)}
    if wrong == "missing parameter":
        del state[key]
    return {**saved, "state": state}


def expect_refused(optimizer: Any, saved: Any, ranks: list[int]) -> None:
    """Expect a ValueError that names the ranks with a defect, on all ranks, and no change on any."""
    before = contents(optimizer)
    error = error_of(lambda: optimizer.load_state_dict(saved))
    after = contents(optimizer)
    same = all(same_bits(*pair) for pair in zip(before, after, strict=True))
    for number, (text, kept) in enumerate(everywhere((error, same))):
        expect(text.startswith("ValueError"), f"a ValueError on rank {number}", text or "no error")
        expect(kept, f"no change on rank {number}", "changed state")
        if size() > 1:
            names = [one for one in range(size()) if f"rank {one}:" in text]
            expect_equal(names, ranks, f"ranks that the error on rank {number} names")


@pytest.mark.clause("SHARD-007", "SHARD-008")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@on_each_rank
def test_a_rank_refuses(impl: Any, wrapping: str) -> None:
    """If one rank refuses a state, all ranks raise, none has changed, and errors name rank and reason."""
    saved = fresh(impl, wrapping, seed=10).state_dict()
    for number, wrong in enumerate(WRONG):
        refusing = number % size()
        optimizer = fresh(impl, wrapping, seed=1)
        mine = spoil(saved, wrong) if rank() == refusing else saved
        expect_refused(optimizer, mine, [refusing])
    optimizer = fresh(impl, wrapping, seed=1)
    optimizer.load_state_dict(saved)
    wanted = contents(fresh(impl, wrapping, seed=10))
    for seen, one in zip(contents(optimizer), wanted, strict=True):
        expect_bits(seen, one, "state that was loaded")
    other, optimizer = (fresh(impl, wrapping, "row of two dimensions", seed) for seed in (10, 1))
    saved, last = other.state_dict(), size() - 1
    expect_refused(optimizer, spoil(saved, "shape") if rank() == last else saved, [last])


@pytest.mark.clause("SHARD-007")
@on_each_rank
def test_a_rank_refuses_the_groups_of_parameters_without_state(impl: Any) -> None:
    """If one rank refuses the groups of sharded parameters that have no state, no rank loads its groups."""
    params = {"p": torch.nn.Parameter(distributed(table(4), "row"))}
    optimizer = impl.KeyedOptimizerWrapper(params, one_by_one(torch.optim.SGD, lr=0.5))
    optimizer.save_param_groups(True)
    groups = [{**optimizer.state_dict()["param_groups"][0], "lr": 0.25}]
    refusing = size() - 1
    given = {"state": {}, "param_groups": [] if rank() == refusing else groups}
    expect_refused(optimizer, given, [refusing])
    expect_equal(everywhere(optimizer.param_groups[0]["lr"]), [0.5] * size(), "rates of all ranks")


@pytest.mark.clause("SHARD-007")
@on_each_rank
def test_an_object_refuses(impl: Any) -> None:
    """If a stateful object refuses its state on one rank, it is restored, and no rank loads anything."""

    def make(seed: int, refuse: bool) -> tuple[Any, Any]:
        param = torch.nn.Parameter(distributed(table(4), "row"))
        held = Stateful(full((2,), float(seed)), refuse)
        sums = distributed(full((4, 4), float(seed)), "row")
        state = {param: {"sum": sums, "window": held}}
        return impl.KeyedOptimizer({"p": param}, state, [{"params": [param]}]), held

    saved = make(7, False)[0].state_dict()
    optimizer, held = make(1, rank() == size() - 1)
    expect_refused(optimizer, saved, [size() - 1])
    expect_equal(held.tensor.tolist(), [1.0, 1.0], "tensor of the object")


@pytest.mark.clause("SHARD-009")
@on_each_rank
def test_other_placements(impl: Any) -> None:
    """State with another placement is redistributed, or refused on all ranks."""
    for given in PLACEMENTS[:3]:
        for live in PLACEMENTS[:3]:
            optimizer, source = (
                fresh(impl, placement=live, seed=1),
                fresh(impl, placement=given),
            )
            state = source.state_dict()["state"]
            with torch.no_grad():
                for key in "ab":
                    state[key]["sum"].copy_(distributed(table(5, seed=5), given))
            wanted = [table(5, seed=5)] * 2
            error = error_of(functools.partial(optimizer.load_state_dict, source.state_dict()))
            if error:
                expect(given != live and error.startswith("ValueError"), "a load", error)
                wanted = [torch.full((5, 4), 1.0), torch.full((5, 4), 2.0)]
            sums = [gathered(optimizer.state_dict()["state"][key]["sum"]) for key in "ab"]
            for seen, one in zip(sums, wanted, strict=True):
                expect_bits(seen, one, f"state by {given}, loaded to {live}")


@pytest.mark.clause("SHARD-009")
@on_each_rank
def test_other_placements_in_another_order_of_parameters(impl: Any) -> None:
    """If ranks list parameters in different orders, the state of each is redistributed, or refused by all."""
    params = {}
    for placement in ("row", "column"):
        made = {
            key: torch.nn.Parameter(distributed(table(5, seed=n), placement)) for n, key in enumerate("ab")
        }
        params[placement] = {key: made[key] for key in sorted(made, reverse=rank() % 2 == 1)}
    make = one_by_one(torch.optim.Adagrad, lr=0.5)
    source, optimizer = (impl.KeyedOptimizerWrapper(one, make) for one in params.values())
    for seed, each in enumerate((source, optimizer)):
        each.init_state()
        fill(each, 10 * seed)
    error = error_of(lambda: optimizer.load_state_dict(source.state_dict()))
    expect(not error or error.startswith("ValueError"), "a load, or a ValueError", error)
    for number, key in enumerate("ab"):
        seen = gathered(optimizer.state_dict()["state"][key]["sum"])
        expect_bits(seen, torch.full((5, 4), number + (10.0 if error else 0.0)), f"state of {key}")


@pytest.mark.clause("SHARD-009")
@pytest.mark.parametrize("wrapping", WRAPPINGS[1:])
@on_each_rank
def test_other_placements_in_a_wrapper(impl: Any, wrapping: str) -> None:
    """In a wrapper, too, state with another placement is redistributed, or refused on all ranks."""
    for given, live in (PLACEMENTS[:2], PLACEMENTS[1::-1]):
        optimizer, source = fresh(impl, wrapping, live, seed=1), fresh(impl, wrapping, given, seed=10)
        refused = error_of(functools.partial(optimizer.load_state_dict, source.state_dict()))
        expect(not refused or refused.startswith("ValueError"), "a load, or a ValueError", refused)
        wanted = fresh(impl, wrapping, live, seed=1 if refused else 10)
        for seen, one in zip(contents(optimizer), contents(wanted), strict=True):
            expect_bits(seen, one, f"state by {given}, loaded to {live}")


@pytest.mark.clause("SHARD-010")
@on_each_rank
def test_placements_that_differ(impl: Any) -> None:
    """If ranks pass state of different placements, all raise an error, and none has changed or hangs."""
    optimizer = fresh(impl, seed=1)
    rows, columns = (
        fresh(impl).state_dict(),
        fresh(impl, placement="column").state_dict(),
    )
    before = contents(optimizer)
    error = error_of(lambda: optimizer.load_state_dict(columns if rank() == 0 else rows))
    if size() > 1:
        expect(error.startswith("ValueError"), "a ValueError", error or "no error")
        for seen, one in zip(contents(optimizer), before, strict=True):
            expect_bits(seen, one, "state after an error")
