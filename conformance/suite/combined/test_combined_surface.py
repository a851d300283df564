"""Combined optimizers: construction and public attributes."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    outcome,
)
from keyedopt.conformance.suite.support.inputs import adam, parameter, parameters, set_grads, sgd, train


def adam_and_sgd(impl: Any, keys: tuple[str, str] = ("a", "b")) -> tuple[Any, list[Any], list[Any]]:
    """Combine Adam and SGD with momentum, each with its own parameter ``p``."""
    params = [parameter(3, seed=1), parameter(2, seed=2)]
    inner = [
        adam(impl, {"p": params[0]}),
        sgd(impl, {"p": params[1]}, momentum=0.9),
    ]
    return impl.CombinedOptimizer(list(zip(keys, inner, strict=True))), inner, params


@pytest.mark.clause("COMB-001")
def test_a_combination_is_a_keyed_optimizer(impl):
    """CombinedOptimizer takes optimizers with and without a key, and is a keyed optimizer."""
    first, second = parameters(2).values()
    combined = impl.CombinedOptimizer([sgd(impl, {"p": first}), ("k", sgd(impl, {"p": second}))])
    expect(isinstance(combined, torch.optim.Optimizer), "a torch optimizer", type(combined).__mro__)
    # Both may be subclasses of another library's classes, so a common base is enough.
    common = set(type(combined).__mro__) & set(impl.KeyedOptimizer.__mro__)
    expect(common - set(torch.optim.Optimizer.__mro__), "a KeyedOptimizer", type(combined).__mro__)
    expect_equal(set(combined.params), {"p", "k.p"}, "keys of params")


@pytest.mark.clause("COMB-002")
@pytest.mark.parametrize(
    ("name", "opt_key", "joined"),
    [("p", "a", "a.p"), ("p", "", "p"), ("", "a", "a"), ("", "", ""), ("x.y", "a.b", "a.b.x.y")],
)
def test_keys_are_joined_with_a_dot(impl, name, opt_key, joined):
    """The key in a combination is opt_key.name, without the dot where one of the two is empty."""
    expect_equal(impl.CombinedOptimizer.prepend_opt_key(name, opt_key), joined, "the joined key")
    combined = impl.CombinedOptimizer([(opt_key, sgd(impl, {name: parameter(2)}, momentum=0.9))])
    expect_equal(list(combined.params), [joined], "keys of params")
    combined.init_state()
    expect_equal(list(combined.state_dict()["state"]), [joined], "keys of the saved state")


@pytest.mark.clause("COMB-003")
def test_optimizers_are_listed_with_their_keys(impl):
    """Optimizers returns pairs of key and optimizer, in order, with '' for no key."""
    params = parameters(3)
    inner = [sgd(impl, {key: param}) for key, param in params.items()]
    combined = impl.CombinedOptimizer([inner[0], ("b", inner[1]), ("", inner[2])])
    listed = list(combined.optimizers)
    expect_equal([key for key, _ in listed], ["", "b", ""], "keys of optimizers")
    same = all(seen is given for (_, seen), given in zip(listed, inner, strict=True))
    expect(same, "the same optimizers that were combined", listed)


@pytest.mark.clause("COMB-004")
def test_views_show_the_live_objects(impl):
    """Params, state and param_groups return the live objects of each optimizer."""
    combined, inner, params = adam_and_sgd(impl)
    train(combined, params, 1)
    for key, optimizer, param in zip(("a.p", "b.p"), inner, params, strict=True):
        expect(combined.params[key] is param, f"params[{key!r}] the parameter itself", combined.params)
        for name, value in optimizer.state[param].items():
            seen = combined.state[param][name]
            expect(seen is value, f"the live {name} of {key}", seen)
    groups = list(combined.param_groups)
    live = [group for optimizer in inner for group in optimizer.param_groups]
    expect_equal(len(groups), len(live), "number of groups")
    same = all(seen is group for seen, group in zip(groups, live, strict=True))
    expect(same, "the same groups of the optimizers", groups)


@pytest.mark.clause("COMB-004")
def test_a_rate_written_into_a_group_is_used(impl):
    """A learning rate that is set in param_groups is used by the next step."""
    params = parameters(2)
    combined = impl.CombinedOptimizer(
        [("a", sgd(impl, {"p": params["p0"]})), ("b", sgd(impl, {"p": params["p1"]}))]
    )
    for group in combined.param_groups:
        group["lr"] = 0.5
    before = {key: param.detach().clone() for key, param in params.items()}
    set_grads(params)
    combined.step()
    for key, param in params.items():
        expect_bits(
            param, before[key].add(param.grad, alpha=-0.5), f"{key} after a step at learning rate 0.5"
        )


@pytest.mark.clause("COMB-005")
@pytest.mark.parametrize(
    "layout",
    [
        [["", "p"], ["", "p"]],
        [["a", "p"], ["a", "p"]],
        [["a", "b.p"], ["a.b", "p"]],
        [["", "a.p"], ["a", "p"]],
        [["a", "q", "p"], ["a", "r", "p"]],
    ],
)
def test_two_parameters_never_share_a_key(impl, layout):
    """Combining optimizers raises an error if any two parameters would get the same key."""
    inner = [(prefix, sgd(impl, {name: parameter(2) for name in names})) for prefix, *names in layout]
    joined = impl.CombinedOptimizer.prepend_opt_key(layout[0][-1], layout[0][0])
    expect_raises(
        lambda: impl.CombinedOptimizer(inner),
        Exception,
        mentions=[joined],
        expected="an error that names the key that would be there twice",
    )


@pytest.mark.clause("COMB-006")
def test_a_parameter_under_two_optimizers_loses_no_state(impl):
    """A parameter in two optimizers raises, or both of its states are saved."""
    param = parameter(3)
    first, second = adam(impl, {"p": param}), sgd(impl, {"p": param}, momentum=0.9)
    try:
        combined = impl.CombinedOptimizer([("a", first), ("b", second)])
        train(combined, [param], 1)
        saved = combined.state_dict()
    except Exception:
        return
    keys = {name for entry in saved["state"].values() for name in entry}
    wanted = {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    expect(wanted <= keys, f"an error, or {sorted(wanted)} in the checkpoint", sorted(keys))


@pytest.mark.clause("COMB-006")
def test_an_optimizer_that_is_listed_twice_steps_once(impl):
    """The same optimizer under two keys raises an error, or steps once per step."""
    param = parameter(3)
    optimizer = sgd(impl, {"p": param}, lr=0.5)
    try:
        combined = impl.CombinedOptimizer([("a", optimizer), ("b", optimizer)])
    except Exception:
        return
    before = param.detach().clone()
    set_grads([param])
    combined.step()
    expect_bits(param, before.add(param.grad, alpha=-0.5), "an error, or the parameter after one step")


@pytest.mark.clause("COMB-007")
@pytest.mark.parametrize("what", ["plain torch optimizer", "its pair", "string", "none"])
def test_only_keyed_optimizers_are_combined(impl, what):
    """Combining an object that is not a keyed optimizer raises an error."""
    plain = torch.optim.SGD([parameter(2)], lr=0.1)
    given: Any = {
        "plain torch optimizer": plain,
        "its pair": ("a", plain),
        "string": "ab",
        "none": None,
    }[what]
    expect_raises(lambda: impl.CombinedOptimizer([given]), Exception, expected=f"an error for a {what}")


@pytest.mark.clause("COMB-008")
@pytest.mark.parametrize("groups", [False, True])
def test_a_combination_of_nothing_works(impl, groups):
    """An empty combination steps, zeroes gradients, saves an empty state and loads it."""
    combined = impl.CombinedOptimizer([])
    combined.save_param_groups(groups)
    combined.init_state()
    combined.zero_grad()
    combined.step()
    saved = combined.state_dict()
    expect_equal(saved["state"], {}, "state of an empty combination")
    expect_equal(list(saved.get("param_groups", [])), [], "groups of an empty combination")
    combined.load_state_dict(saved)


@pytest.mark.clause("COMB-008")
@pytest.mark.parametrize("groups", [False, True])
def test_an_optimizer_without_parameters_is_combined(impl, groups):
    """An optimizer without parameters does not affect the others."""
    nothing = impl.KeyedOptimizer({}, {}, [])
    nothing.step = lambda closure=None: None
    param = parameter(3)
    combined = impl.CombinedOptimizer([("a", nothing), ("b", adam(impl, {"p": param}))])
    combined.save_param_groups(groups)
    train(combined, [param], 2)
    saved = combined.state_dict()
    expect_equal(list(saved["state"]), ["b.p"], "keys of the saved state")
    combined.load_state_dict(saved)


@pytest.mark.clause("COMB-009")
def test_state_that_is_created_later_is_seen(impl):
    """State of the first step appears in a combination that was built before."""
    combined, _inner, params = adam_and_sgd(impl)
    view = combined.state
    expect_equal(len(view), 0, "entries before the first step")
    train(combined, params, 1)
    expect_equal(len(combined.state), 2, "entries after the first step")
    saved = combined.state_dict()["state"]
    expect_equal(set(saved["a.p"]), {"step", "exp_avg", "exp_avg_sq"}, "entries of a.p")
    expect_equal(set(saved["b.p"]), {"momentum_buffer"}, "entries of b.p")


@pytest.mark.clause("COMB-034")
def test_steps_and_hyper_parameters_are_passed_on(impl):
    """set_optimizer_step and update_hyper_parameters reach optimizers that have them."""

    class Told(impl.KeyedOptimizerWrapper):
        heard: Any = ()

        def set_optimizer_step(self, step):
            self.heard = (*self.heard, ("step", step))

        def update_hyper_parameters(self, params_dict):
            self.heard = (*self.heard, ("lr", params_dict["lr"]))

    bare = impl.KeyedOptimizer({}, {}, [])
    told = [Told({f"p{index}": parameter(2)}, torch.optim.SGD) for index in range(2)]
    inside = impl.CombinedOptimizer([("x", told[1])])
    combined = impl.CombinedOptimizer([bare, ("a", told[0]), ("b", inside)])
    combined.set_optimizer_step(7)
    combined.update_hyper_parameters({"lr": 0.25})
    for optimizer in told:
        expect_equal(optimizer.heard, (("step", 7), ("lr", 0.25)), "calls that reached an optimizer")


@pytest.mark.clause("COMB-042")
def test_the_text_and_the_list_of_a_combination(impl):
    """Observe repr, and whether an optimizer appended to optimizers takes part."""
    combined, _, _ = adam_and_sgd(impl)
    late = parameter(2)
    told = outcome(lambda: combined.optimizers.append(("late", sgd(impl, {"p": late}))))
    return {
        "repr starts with its key": repr(combined).startswith("a: "),
        "append": told,
        "takes part": "late.p" in combined.params,
    }
