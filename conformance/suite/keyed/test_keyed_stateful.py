"""Keyed optimizers: stateful objects of PyTorch's stateful protocol, and nested state."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import ones, tensor, zeros
from keyedopt.conformance.suite.support.doubles import Stateful
from keyedopt.conformance.suite.support.inputs import parameters


class Saved:
    """An object that has state_dict but not load_state_dict."""

    def __init__(self):
        self.calls = 0

    def state_dict(self):
        """Return a small state."""
        return {"calls": self.calls}


class Counting:
    """A stateful object whose state is a number, and that counts its loads."""

    def __init__(self, number):
        self.number = number
        self.loads = 0

    def state_dict(self):
        """Return the number."""
        return {"number": self.number}

    def load_state_dict(self, state_dict):
        """Store the number."""
        self.loads += 1
        self.number = state_dict["number"]


def keyed(impl, entries):
    """Make an optimizer with the given state, one entry per parameter, and no groups."""
    params = parameters(len(entries))
    return impl.KeyedOptimizer(params, dict(zip(params.values(), entries, strict=True)), [])


@pytest.mark.clause("KEYED-052")
def test_stateful_objects_load_their_own_state(impl):
    """Each stateful object, also nested, receives its own state dict once."""
    one, two = Counting(1), Counting(2)
    optimizer = keyed(impl, [{"object": one, "deep": {"object": two}}])
    saved = snapshot(optimizer.state_dict())
    one.number, two.number = 8, 9
    optimizer.load_state_dict(saved)
    expect_equal((one.number, two.number), (1, 2), "numbers of the objects")
    expect_equal((one.loads, two.loads), (1, 1), "loads of each object")
    expect(next(iter(optimizer.state.values()))["object"] is one, "the object itself in the state", "another")


@pytest.mark.clause("KEYED-052")
def test_stateful_tensors_are_filled(impl):
    """A stateful object that copies in place keeps the identity of its tensors."""
    held = tensor([1.0, 2.0])
    optimizer = keyed(impl, [{"object": Stateful(held)}])
    optimizer.load_state_dict({"state": {"p0": {"object": {"tensor": tensor([5.0, 6.0])}}}})
    expect_bits(held, torch.tensor([5.0, 6.0]), "the tensor of the object")


@pytest.mark.clause("KEYED-053")
@pytest.mark.parametrize("where", ["first", "last"])
def test_an_object_that_refuses_undoes_the_load(impl, where):
    """If a stateful object raises in a load, it and all else are restored."""
    refusing = Stateful(tensor([1.0, 2.0]), refuse=True)
    entries = [
        {"m": ones(2), "n": 1, "object": Stateful(tensor([3.0, 4.0]))},
        {"m": ones(2), "n": 1, "object": Stateful(tensor([5.0, 6.0]))},
    ]
    entries[0 if where == "first" else 1]["object"] = refusing
    optimizer = keyed(impl, entries)
    given = snapshot(optimizer.state_dict())
    for entry in given["state"].values():
        entry["m"].fill_(9.0)
        entry["n"] = 9
        entry["object"]["tensor"].fill_(9.0)
    before = snapshot(optimizer.state_dict())
    expect_raises(lambda: optimizer.load_state_dict(given), Exception, expected="an error: an object refuses")
    expect_unchanged(before, optimizer.state_dict(), "state after a load in which an object raised")


@pytest.mark.clause("KEYED-053")
def test_a_later_fault_undoes_what_an_object_took(impl):
    """If state after a stateful object does not fit, the object is restored."""
    entries = [{"object": Stateful(ones(2))}, {"m": ones(3)}]
    optimizer = keyed(impl, entries)
    given = {"p0": {"object": {"tensor": zeros(2)}}, "p1": {"other": zeros(3)}}
    before = snapshot(optimizer.state_dict())
    expect_raises(lambda: optimizer.load_state_dict({"state": given}), Exception, expected="an error")
    expect_unchanged(before, optimizer.state_dict(), "state after a failed load")


@pytest.mark.clause("KEYED-054")
def test_an_object_is_never_replaced_by_its_state(impl):
    """An object without load_state_dict is not replaced, or the load raises."""
    entry = {"object": Saved(), "m": ones(2)}
    optimizer = keyed(impl, [entry])

    outcome(lambda: optimizer.load_state_dict({"state": {"p0": {"object": {"calls": 3}, "m": zeros(2)}}}))
    outcome(lambda: optimizer.load_state_dict(snapshot(optimizer.state_dict())))
    expect(
        isinstance(entry["object"], Saved), "the object itself in the state", type(entry["object"]).__name__
    )


@pytest.mark.clause("KEYED-055")
@pytest.mark.parametrize("given", ["tensor", "number"])
def test_an_object_does_not_get_what_is_no_state(impl, given):
    """A tensor or a number in place of an object's state raises an error."""
    target = Counting(1)
    optimizer = keyed(impl, [{"object": target, "m": ones(2)}])
    wrong = zeros(2) if given == "tensor" else 3.0
    expect_raises(
        lambda: optimizer.load_state_dict({"state": {"p0": {"object": wrong, "m": zeros(2)}}}),
        Exception,
        expected=f"an error for a {given} in the place of an object's state",
    )
    expect_equal((target.number, target.loads), (1, 0), "state of the object, and how often it was loaded")


@pytest.mark.clause("KEYED-056")
def test_nested_state_is_saved_and_loaded_in_place(impl, dtype):
    """State in nested mappings is loaded in place at every level."""
    number = getattr(torch, dtype)
    inner = ones(3, dtype=number)
    optimizer = keyed(impl, [{"a": {"b": {"m": inner, "n": 1}}}])
    saved = snapshot(optimizer.state_dict())
    saved["state"]["p0"]["a"]["b"]["m"].fill_(2.0)
    saved["state"]["p0"]["a"]["b"]["n"] = 5
    optimizer.load_state_dict(saved)
    expect_bits(inner, torch.full((3,), 2.0, dtype=number), "the live nested tensor")
    expect_equal(optimizer.state_dict()["state"]["p0"]["a"]["b"]["n"], 5, "the nested number")


@pytest.mark.clause("KEYED-056")
def test_keys_that_are_no_text(impl):
    """Nested state may have numbers as keys."""
    optimizer = keyed(impl, [{0: {1: ones(2)}}])
    optimizer.load_state_dict({"state": {"p0": {0: {1: zeros(2)}}}})
    expect_bits(optimizer.state_dict()["state"]["p0"][0][1], torch.zeros(2), "state under 0, 1")
