"""Wrappers of one library around the keyed optimizers of another: the reference and torchrec."""

import copy
import functools
import importlib.util
import os
import warnings

import pytest
import torch

from keyedopt import reference
from keyedopt.conformance.suite.support.doubles import ForeignKeyed

if importlib.util.find_spec("torchrec") is None:
    if os.environ.get("KEYEDOPT_REQUIRE_TORCHREC") == "1":
        raise ModuleNotFoundError("KEYEDOPT_REQUIRE_TORCHREC=1 asks for torchrec, which is not installed")
    pytest.skip("torchrec is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec.optim.clipping
    import torchrec.optim.keyed
    import torchrec.optim.warmup


class Torchrec:
    """The names of torchrec on one object, as those of the reference are."""

    CombinedOptimizer = torchrec.optim.keyed.CombinedOptimizer
    KeyedOptimizerWrapper = torchrec.optim.keyed.KeyedOptimizerWrapper
    OptimizerWrapper = torchrec.optim.keyed.OptimizerWrapper
    GradientClipping = torchrec.optim.clipping.GradientClipping
    GradientClippingOptimizer = torchrec.optim.clipping.GradientClippingOptimizer
    WarmupOptimizer = torchrec.optim.warmup.WarmupOptimizer
    WarmupPolicy = torchrec.optim.warmup.WarmupPolicy
    WarmupStage = torchrec.optim.warmup.WarmupStage


PAIRS = pytest.mark.parametrize(
    ("outer", "inner"),
    [(reference, Torchrec), (Torchrec, reference), (reference, reference), (Torchrec, Torchrec)],
    ids=["reference around torchrec", "torchrec around reference", "reference", "torchrec"],
)
KINDS = pytest.mark.parametrize("kind", ["wrapper", "combined", "clipping", "warmup"])


@pytest.fixture(autouse=True)
def _classes_as_they_were(monkeypatch):
    """Undo what torch does to torchrec's classes when an instance is copied."""
    for name in ("OptimizerWrapper", "KeyedOptimizerWrapper", "GradientClippingOptimizer", "WarmupOptimizer"):
        kind = getattr(Torchrec, name)
        monkeypatch.setattr(kind, "step", kind.__dict__["step"])


def keyed(library, param):
    """Make Adam by key."""
    return library.KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.Adam, lr=0.1))


def wrap(library, kind, optimizer):
    """Put something of a library around an optimizer."""
    if kind == "combined":
        return library.CombinedOptimizer([("k", optimizer)])
    if kind == "clipping":
        return library.GradientClippingOptimizer(optimizer, library.GradientClipping.NORM, 0.5)
    if kind == "warmup":
        stages = [library.WarmupStage(library.WarmupPolicy.LINEAR, max_iters=8, value=0.25)]
        return library.WarmupOptimizer(optimizer, stages, lr=0.5)
    return library.OptimizerWrapper(optimizer)


def build(outer, inner, kind):
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = keyed(inner, param)
    return wrap(outer, kind, optimizer), optimizer, param


def train(optimizer, param, steps):
    for step in range(steps):
        param.grad = torch.tensor([0.5, -1.0, 2.0]) * (step + 1)
        optimizer.step()


@PAIRS
@KINDS
def test_a_foreign_optimizer_steps_like_an_own_one(outer, inner, kind):
    wrapped, _, param = build(outer, inner, kind)
    own, _, expected = build(reference, reference, kind)
    train(wrapped, param, 3)
    train(own, expected, 3)
    assert torch.equal(param, expected)


@PAIRS
@KINDS
def test_a_checkpoint_resumes_through_a_foreign_wrapper(outer, inner, kind):
    saved, optimizer, param = build(outer, inner, kind)
    saved.save_param_groups(True)
    train(saved, param, 3)
    state = copy.deepcopy(saved.state_dict())
    key = "k.p" if kind == "combined" else "p"
    assert set(state["state"]) == {key, "__warmup"} if kind == "warmup" else {key}
    assert [group["params"] for group in state["param_groups"]] == [[key]]

    fresh, resumed, _ = build(outer, inner, kind)
    fresh.save_param_groups(True)
    train(fresh, next(iter(resumed.params.values())), 1)
    fresh.load_state_dict(state)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for name, value in optimizer.state[param].items():
        assert torch.equal(fresh.state_dict()["state"][key][name], value)


@PAIRS
@KINDS
def test_a_checkpoint_moves_between_the_libraries(outer, inner, kind):
    saved, _, param = build(outer, outer, kind)
    train(saved, param, 3)
    fresh, _, other = build(inner, inner, kind)
    train(fresh, other, 1)
    fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    with torch.no_grad():
        other.copy_(param)
    train(saved, param, 2)
    train(fresh, other, 2)
    assert torch.equal(param, other)


@KINDS
def test_a_refused_load_is_undone_in_a_foreign_optimizer(kind):
    wrapped, optimizer, param = build(reference, Torchrec, kind)
    second = torch.nn.Parameter(torch.ones(2))
    whole = reference.CombinedOptimizer([("first", wrapped), ("second", keyed(Torchrec, second))])
    train(whole, param, 1)
    second.grad = torch.ones(2)
    whole.step()
    before = {name: value.clone() for name, value in optimizer.state[param].items()}
    state = copy.deepcopy(whole.state_dict())
    first = next(key for key in state["state"] if key.endswith("p") and key.startswith("first"))
    state["state"][first]["exp_avg"].fill_(9.0)
    del state["state"]["second.p"]["exp_avg"]
    with pytest.raises(ValueError, match="second"):
        whole.load_state_dict(state)
    for name, value in before.items():
        assert torch.equal(optimizer.state[param][name], value)


def test_groups_of_a_foreign_wrapper_are_combined_without_loss():
    wrapper, _, _ = build(Torchrec, Torchrec, "wrapper")
    wrapper.save_param_groups(True)
    combined = reference.CombinedOptimizer([("a", wrapper)])
    combined.save_param_groups(True)
    assert [group["params"] for group in combined.state_dict()["param_groups"]] == [["a.p"]]


@KINDS
def test_a_foreign_wrapper_around_a_combination_keeps_its_entry(kind):
    param = torch.nn.Parameter(torch.ones(3))
    combined = reference.CombinedOptimizer([("k", keyed(reference, param))])
    outer = wrap(Torchrec, kind, combined)
    train(outer, param, 2)
    expected = {"combined": {"k.k.p"}, "warmup": {"k.p", "__warmup"}}.get(kind, {"k.p"})
    assert set(outer.state_dict()["state"]) == expected


@PAIRS
def test_init_state_and_zero_grad_go_through(outer, inner):
    wrapped, optimizer, param = build(outer, inner, "combined")
    wrapped.init_state()
    assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
    wrapped.zero_grad(set_to_none=True)
    assert param.grad is None


class Flagless(ForeignKeyed):
    """A keyed optimizer that always saves its groups, and has no flag that says so."""

    def __init__(self, params):
        super().__init__(params)
        del self.defaults["_save_param_groups"]

    def state_dict(self):
        self.defaults["_save_param_groups"] = True
        saved = super().state_dict()
        del self.defaults["_save_param_groups"]
        return saved

    def load_state_dict(self, state_dict):
        self.defaults["_save_param_groups"] = True
        super().load_state_dict(state_dict)
        del self.defaults["_save_param_groups"]


def test_a_saved_dictionary_tells_whether_a_member_without_a_flag_saves_groups():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    members = [Flagless({"p": param}) for param in params]
    combined = reference.CombinedOptimizer([("a", members[0]), ("b", members[1])])
    for param in params:
        param.grad = torch.ones(2)
    combined.step()
    saved = copy.deepcopy(combined.state_dict())
    assert [group["params"] for group in saved["param_groups"]] == [["a.p"], ["b.p"]]
    assert [member.saves for member in members] == [1, 1]
    saved["param_groups"][1]["lr"] = 0.25
    combined.load_state_dict(saved)
    assert [member.param_groups[0]["lr"] for member in members] == [0.1, 0.25]
    mixed = reference.CombinedOptimizer([("a", members[0]), ("b", keyed(reference, params[1]))])
    with pytest.raises(ValueError, match="save_param_groups"):
        mixed.state_dict()
