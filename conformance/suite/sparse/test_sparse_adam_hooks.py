"""SparseAdam: the six kinds of hooks, as documented."""

import copy
import pickle
from typing import Any

import pytest

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.inputs import moments, parameter, train_sparse

STATE_KINDS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
KINDS = ("step_pre", "step_post", *STATE_KINDS)


def trained_optimizer(impl: Any, steps: int = 1) -> tuple[Any, Any]:
    """Make an optimizer of one table that has taken some steps."""
    weight = parameter(5, 2)
    optimizer = impl.SparseAdam([weight], lr=0.25)
    train_sparse(optimizer, [weight], steps)
    return optimizer, weight


def register(optimizer: Any, kind: str, hook: Any, **options: Any) -> Any:
    """Register a hook, by the kind's name."""
    return getattr(optimizer, f"register_{kind}_hook")(hook, **options)


def trigger(impl: Any, optimizer: Any, kind: str) -> None:
    """Trigger the event of a kind of hook once."""
    if kind.startswith("step"):
        optimizer.step()
    elif kind.startswith("state_dict"):
        optimizer.state_dict()
    else:
        # saved by an optimizer without hooks, so that no hook of another kind runs
        optimizer.load_state_dict(impl.SparseAdam([parameter(5, 2)], lr=0.5).state_dict())


class Noting:
    """A hook that records its calls; a class, so that it can be pickled."""

    def __init__(self, events: list[str], name: str = "hook") -> None:
        self.events = events
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        """Record the call."""
        self.events.append(self.name)


@pytest.mark.clause("SPARSE-062")
@pytest.mark.needs("SparseAdam", "SparseAdam.closure")
def test_step_pre_hook(impl):
    """A step pre-hook receives the optimizer and the arguments, once, before anything changes."""
    optimizer, weight = trained_optimizer(impl)
    before = weight.detach().clone()
    seen: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda one, args, kwargs: seen.append((one, dict(kwargs), weight.detach().clone()))
    )
    closure = lambda: None  # noqa: E731
    train_sparse(optimizer, [weight], 0)
    optimizer.step(closure=closure)
    expect_equal(len(seen), 1, "calls of the hook")
    expect(seen[0][0] is optimizer, "the optimizer", type(seen[0][0]))
    expect_equal(seen[0][1], {"closure": closure}, "the keyword arguments")
    expect_unchanged([before], [seen[0][2]], "the parameter when the hook is called")


@pytest.mark.clause("SPARSE-063")
@pytest.mark.needs("SparseAdam", "SparseAdam.closure")
@pytest.mark.parametrize("by", ["keyword", "position"])
def test_step_pre_hook_replaces_arguments(impl, by):
    """Arguments that a step pre-hook returns replace the given ones."""
    optimizer, _ = trained_optimizer(impl)
    called: list[str] = []

    def hook(one: Any, args: Any, kwargs: Any) -> Any:
        if by == "keyword":
            return args, {**kwargs, "closure": lambda: called.append("new")}
        return (*args[:-1], lambda: called.append("new")), kwargs

    optimizer.register_step_pre_hook(hook)
    if by == "keyword":
        optimizer.step(closure=lambda: called.append("old"))
    else:
        optimizer.step(lambda: called.append("old"))
    expect_equal(called, ["new"], "the closures that were called")


@pytest.mark.clause("SPARSE-064")
@pytest.mark.needs("SparseAdam", "SparseAdam.closure")
def test_step_pre_hooks_in_order(impl):
    """Step hooks run in the order of registration, each with the previous one's arguments."""
    optimizer, _ = trained_optimizer(impl)
    events: list[str] = []

    def first(one: Any, args: Any, kwargs: Any) -> Any:
        events.append("first")
        return args, {"closure": lambda: events.append("closure")}

    def second(one: Any, args: Any, kwargs: Any) -> None:
        events.append(f"second with {sorted(kwargs)}")

    optimizer.register_step_pre_hook(first)
    optimizer.register_step_pre_hook(second)
    optimizer.register_step_post_hook(Noting(events, "third"))
    optimizer.register_step_post_hook(Noting(events, "fourth"))
    optimizer.step()
    expect_equal(events, ["first", "second with ['closure']", "closure", "third", "fourth"], "the order")


@pytest.mark.clause("SPARSE-065")
@pytest.mark.parametrize("wrong", [5, [], [1, 2, 3], "text"])
def test_step_pre_hook_returns_nonsense(impl, wrong):
    """A step pre-hook that returns neither None nor a pair raises; nothing changes."""
    optimizer, weight = trained_optimizer(impl)
    train_sparse(optimizer, [weight], 1)
    before = snapshot([weight, dict(optimizer.state[weight])])
    optimizer.register_step_pre_hook(lambda *_: tuple(wrong) if isinstance(wrong, list) else wrong)
    expect_raises(optimizer.step, Exception, expected=f"an error for {wrong!r}")
    expect_unchanged(before, [weight, dict(optimizer.state[weight])], "parameter and state")


@pytest.mark.clause("SPARSE-066")
def test_step_post_hook(impl):
    """A step post-hook receives the optimizer and the arguments, once, after the update."""
    optimizer, weight = trained_optimizer(impl)
    seen: list[Any] = []
    optimizer.register_step_post_hook(
        lambda one, args, kwargs: seen.append((one, dict(kwargs), weight.detach().clone()))
    )
    train_sparse(optimizer, [weight], 1)
    expect_equal(len(seen), 1, "calls of the hook")
    expect(seen[0][0] is optimizer, "the optimizer", type(seen[0][0]))
    expect_equal(seen[0][1], {}, "the keyword arguments")
    expect_unchanged([weight], [seen[0][2]], "the parameter since the hook was called")


@pytest.mark.clause("SPARSE-067")
@pytest.mark.needs("SparseAdam", "SparseAdam.closure")
@pytest.mark.parametrize("closure", [True, False])
def test_step_hook_arguments(impl, closure):
    """Observe how many positional arguments a step hook receives, with or without the optimizer."""
    optimizer, _ = trained_optimizer(impl)
    seen: list[str] = []
    optimizer.register_step_pre_hook(
        lambda one, args, kwargs: seen.append(f"{len(args)}, optimizer: {any(x is one for x in args)}")
    )
    optimizer.step(*([lambda: None] if closure else []))
    return seen


@pytest.mark.clause("SPARSE-068")
@pytest.mark.parametrize("kind", ["step_pre", "state_dict_pre", "load_state_dict_pre"])
def test_pre_hook_raises(impl, kind):
    """The caller receives an error of a pre-hook, and nothing changes."""
    optimizer, weight = trained_optimizer(impl)
    before = snapshot([weight, dict(optimizer.state[weight]), optimizer.param_groups[0]["lr"]])

    def hook(*_: Any) -> None:
        raise ZeroDivisionError("from the hook")

    register(optimizer, kind, hook)
    expect_raises(lambda: trigger(impl, optimizer, kind), ZeroDivisionError, expected="the hook's error")
    now = [weight, dict(optimizer.state[weight]), optimizer.param_groups[0]["lr"]]
    expect_unchanged(before, now, "parameter, state and learning rate")


@pytest.mark.clause("SPARSE-069")
@pytest.mark.parametrize("kind", KINDS)
def test_once_an_event(impl, kind):
    """A hook runs once for each event of its kind, and for no other event."""
    optimizer, _ = trained_optimizer(impl)
    events: list[str] = []
    register(optimizer, kind, Noting(events))
    trigger(impl, optimizer, kind)
    expect_equal(len(events), 1, "calls of the hook after one event")
    for other in KINDS:
        if other.removesuffix("_pre").removesuffix("_post") != kind.removesuffix("_pre").removesuffix(
            "_post"
        ):
            trigger(impl, optimizer, other)
    expect_equal(len(events), 1, "calls of the hook after events of other kinds")


@pytest.mark.clause("SPARSE-070")
@pytest.mark.parametrize("kind", KINDS)
def test_handles(impl, kind):
    """The handle of a hook removes this hook and no other."""
    optimizer, _ = trained_optimizer(impl)
    events: list[str] = []
    handle = register(optimizer, kind, Noting(events, "removed"))
    register(optimizer, kind, Noting(events, "kept"))
    handle.remove()
    trigger(impl, optimizer, kind)
    expect_equal(events, ["kept"], "the hooks that were called")


@pytest.mark.clause("SPARSE-071")
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_prepend(impl, kind):
    """State-dict hooks run in the order of registration, those registered with prepend first."""
    optimizer, _ = trained_optimizer(impl)
    events: list[str] = []
    register(optimizer, kind, Noting(events, "first"))
    register(optimizer, kind, Noting(events, "second"))
    register(optimizer, kind, Noting(events, "prepended"), prepend=True)
    trigger(impl, optimizer, kind)
    expect_equal(events, ["prepended", "first", "second"], "the order")


@pytest.mark.clause("SPARSE-072")
def test_state_dict_pre_hook(impl):
    """A state_dict pre-hook runs before the state is collected, so its changes are included."""
    optimizer, _ = trained_optimizer(impl)

    def hook(one: Any) -> None:
        one.param_groups[0]["lr"] = 0.5

    optimizer.register_state_dict_pre_hook(hook)
    expect_equal(optimizer.state_dict()["param_groups"][0]["lr"], 0.5, "the learning rate in the state_dict")


@pytest.mark.clause("SPARSE-073")
@pytest.mark.parametrize("how", ["in place", "returned", "both"])
def test_state_dict_post_hook(impl, how):
    """A state_dict post-hook may modify or replace the previous hook's state_dict."""
    optimizer, _ = trained_optimizer(impl)

    def modify(one: Any, state_dict: Any) -> None:
        expect(one is optimizer, "the optimizer", type(one))
        state_dict["modified"] = 1

    def replace(one: Any, state_dict: Any) -> Any:
        return {**state_dict, "returned": sorted(state_dict)}

    if how != "returned":
        optimizer.register_state_dict_post_hook(modify)
    if how != "in place":
        optimizer.register_state_dict_post_hook(replace)
    saved = optimizer.state_dict()
    keys = {"in place": ["modified"], "returned": ["returned"], "both": ["modified", "returned"]}[how]
    expect_equal(sorted(saved), sorted([*keys, "param_groups", "state"]), "keys of the state_dict")
    if how == "both":
        expect("modified" in saved["returned"], "what the first hook left", saved["returned"])


@pytest.mark.clause("SPARSE-074")
@pytest.mark.parametrize("how", ["in place", "returned"])
def test_load_state_dict_pre_hook(impl, how):
    """A load pre-hook may modify the state_dict or return another one, which is loaded."""
    optimizer, weight = trained_optimizer(impl)
    saved = trained_optimizer(impl, steps=4)[0].state_dict()

    def hook(one: Any, state_dict: Any) -> Any:
        expect(one is optimizer, "the optimizer", type(one))
        if how == "returned":
            return {**state_dict, "state": {}}
        state_dict["state"] = {}
        return None

    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict(saved)
    for name, moment in moments(optimizer, weight).items():
        expect(not moment.any(), f"no {name} after a load of no state", moment)


@pytest.mark.clause("SPARSE-075")
def test_load_state_dict_pre_hook_gets_a_shallow_copy(impl):
    """A load pre-hook receives a shallow copy of the given dict."""
    optimizer, _ = trained_optimizer(impl)
    saved = copy.deepcopy(trained_optimizer(impl, steps=4)[0].state_dict())
    seen: list[Any] = []

    def hook(one: Any, state_dict: Any) -> None:
        seen.append((state_dict is saved, state_dict["state"] is saved["state"]))
        state_dict["state"] = {}
        state_dict["more"] = 1

    optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict(saved)
    expect_equal(seen, [(False, True)], "whether the hook gets the same dictionary, and the same entries")
    expect_equal(sorted(saved), ["param_groups", "state"], "keys of the dictionary that was given")
    expect_equal(len(saved["state"]), 1, "parameters in the dictionary that was given")


@pytest.mark.clause("SPARSE-076")
def test_load_state_dict_post_hook(impl):
    """A load post-hook receives the optimizer with the loaded state."""
    optimizer, _ = trained_optimizer(impl)
    saved = copy.deepcopy(trained_optimizer(impl, steps=4)[0].state_dict())
    seen: list[Any] = []
    optimizer.register_load_state_dict_post_hook(
        lambda one: seen.append((one is optimizer, copy.deepcopy(one.state_dict()["state"])))
    )
    optimizer.load_state_dict(saved)
    expect_equal([called for called, _ in seen], [True], "whether the hook gets the optimizer")
    expect_unchanged(saved["state"], seen[0][1], "the loaded state, as the hook sees it")


@pytest.mark.clause("SPARSE-077")
def test_load_post_hook_after_a_refused_load(impl):
    """A load that raises runs no post-hook."""
    optimizer, _ = trained_optimizer(impl)
    events: list[str] = []
    optimizer.register_load_state_dict_post_hook(Noting(events))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"].append({**saved["param_groups"][0], "params": []})
    expect_raises(lambda: optimizer.load_state_dict(saved), ValueError, expected="an error for two groups")
    expect_equal(events, [], "calls of the hook")


@pytest.mark.clause("SPARSE-078")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_hooks_in_a_copy(impl, kind, how):
    """Observe whether a copy of the optimizer has its hooks."""
    optimizer, _ = trained_optimizer(impl)
    events: list[str] = []
    register(optimizer, kind, Noting(events))
    copied = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    hooks = getattr(copied, f"_optimizer_{kind}_hooks", {})
    for hook in hooks.values():
        hook.events = events
    trigger(impl, copied, kind)
    return len(events)


@pytest.mark.clause("SPARSE-079")
@pytest.mark.parametrize("kind", ["step_post", "state_dict_post", "load_state_dict_post"])
def test_post_hook_raises(impl, kind):
    """The caller receives an error of a post-hook; the step or the load has taken place."""
    optimizer, weight = trained_optimizer(impl)

    def hook(*_: Any) -> None:
        raise ZeroDivisionError("from the hook")

    register(optimizer, kind, hook)
    if kind == "step_post":
        expect_raises(
            lambda: train_sparse(optimizer, [weight], 1), ZeroDivisionError, expected="the hook's error"
        )
        expect_equal(float(optimizer.state[weight]["step"]), 2.0, "the count of steps")
        return
    expect_raises(lambda: trigger(impl, optimizer, kind), ZeroDivisionError, expected="the hook's error")
    if kind == "load_state_dict_post":
        expect_equal(optimizer.param_groups[0]["lr"], 0.5, "the loaded learning rate")
