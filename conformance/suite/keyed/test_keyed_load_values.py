"""Keyed optimizers: loading values that are easily confused with others or overlooked."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import full, ones, zeros
from keyedopt.conformance.suite.support.inputs import adam, parameter, parameters, train, values


@pytest.mark.clause("KEYED-021")
@pytest.mark.parametrize("names", [["p1", "p10", "p"], ["t.w", "t", "t.w.w"], ["b", "a", "ba"]])
@pytest.mark.parametrize("turned", [False, True])
def test_keys_that_begin_alike(impl, names, turned):
    """Each parameter gets the state of its own key, also if one key is a prefix of another."""
    params = {name: parameter(2, seed=index) for index, name in enumerate(names)}
    state = {param: {"moment": zeros(2), "count": 0} for param in params.values()}
    optimizer = impl.KeyedOptimizer(params, state, [])
    given = {
        name: {"moment": full((2,), index + 1.0), "count": index + 1} for index, name in enumerate(names)
    }
    listed = reversed(names) if turned else names
    optimizer.load_state_dict({"state": {name: given[name] for name in listed}})
    for name, param in params.items():
        expect_bits(state[param]["moment"], given[name]["moment"], f"moment of {name}")
        expect_equal(state[param]["count"], given[name]["count"], f"count of {name}")


@pytest.mark.clause("KEYED-021")
def test_state_with_other_strides_is_loaded(impl):
    """State of a transposed parameter is loaded in place like contiguous state."""
    param = torch.nn.Parameter(parameter(3, 4).detach().t())
    moment = zeros(3, 4).t()
    optimizer = impl.KeyedOptimizer({"p": param}, {param: {"moment": moment}}, [])
    given = parameter(4, 3, seed=5).detach()
    optimizer.load_state_dict({"state": {"p": {"moment": given}}})
    expect_bits(moment, given, "the moment")


@pytest.mark.clause("KEYED-025")
@pytest.mark.parametrize(
    ("live", "given"),
    [((1,), ()), ((), (1,)), ((3,), (1, 3)), ((1, 3), (3,)), ((2, 1), (2,)), ((0,), (0, 3))],
)
def test_dimensions_of_one_are_dimensions(impl, live, given):
    """Loading a tensor with another number of dimensions raises, whatever its values."""
    param = parameter(3)
    optimizer = impl.KeyedOptimizer({"p": param}, {param: {"moment": ones(tuple(live))}}, [])
    before = snapshot(optimizer.state_dict())
    expect_raises(
        lambda: optimizer.load_state_dict({"state": {"p": {"moment": zeros(tuple(given))}}}),
        ValueError,
        RuntimeError,
        expected=f"an error for shape {tuple(given)} over shape {tuple(live)}",
    )
    expect_unchanged(before, optimizer.state_dict(), "state after a failed load")


@pytest.mark.clause("KEYED-022")
@pytest.mark.plain_only("its optimizer has no groups")
@pytest.mark.parametrize("given", [0, 0.0, False])
def test_a_number_of_nothing_is_loaded(impl, given):
    """A count of 0 is loaded over a nonzero count."""
    param = parameter(3)
    state = {param: {"count": 7, "moment": ones(3)}}
    optimizer = impl.KeyedOptimizer({"p": param}, state, [])
    optimizer.load_state_dict({"state": {"p": {"count": given, "moment": zeros(3)}}})
    expect_equal(float(state[param]["count"]), 0.0, "the count")
    expect_bits(state[param]["moment"], torch.zeros(3), "the moment")


@pytest.mark.clause("KEYED-041")
@pytest.mark.parametrize(
    ("option", "live", "given"),
    [
        ("lr", 0.5, 0.0),
        ("weight_decay", 0.5, 0),
        ("maximize", True, False),
        ("foreach", None, False),
        ("names", ["a"], []),
        ("mode", "fast", ""),
    ],
)
def test_options_of_nothing_are_loaded(impl, option, live, given):
    """An option that is 0, False, None or empty is restored like any other."""
    param = parameter(3)
    optimizer = impl.KeyedOptimizer({"p": param}, {}, [{"params": [param], option: live}])
    optimizer.save_param_groups(True)
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": ["p"], option: given}]})
    expect_equal(next(iter(optimizer.param_groups))[option], given, f"the restored {option}")


@pytest.mark.clause("KEYED-118")
@pytest.mark.plain_only("its optimizer has no groups")
def test_hooks_run_after_a_step_that_failed(impl):
    """After a step that raises, later steps still run their hooks."""
    param = parameter(3)
    seen = []

    class Failing(impl.KeyedOptimizer):
        fail = True

        def step(self, closure=None):
            if self.fail:
                raise RuntimeError("out of memory")

    optimizer = Failing({"p": param}, {}, [{"params": [param]}])
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    expect_raises(optimizer.step, RuntimeError, expected="the error of the step")
    optimizer.fail = False
    del seen[:]
    optimizer.step()
    expect_equal(seen, ["pre", "post"], "hooks that ran at the next step")


class Refusing(torch.optim.SGD):
    """Plain descent that raises for gradients of zero, as a sparse optimizer raises for dense ones."""

    def step(self, closure=None):
        """Step, or raise."""
        if not any(param.grad.any() for group in self.param_groups for param in group["params"]):
            raise RuntimeError("this gradient is refused")
        super().step(closure)


@pytest.mark.clause("KEYED-074")
def test_init_state_that_fails(impl):
    """If the optimizer raises in init_state, parameters and options are restored."""
    params = parameters(2)
    optimizer = impl.KeyedOptimizerWrapper(
        params, lambda listed: Refusing(listed, lr=0.1, momentum=0.5, weight_decay=0.25)
    )
    optimizer.save_param_groups(True)
    before = snapshot([values(params), optimizer.state_dict()])
    expect_raises(optimizer.init_state, RuntimeError, expected="the error of the optimizer")
    expect_unchanged(before, [values(params), optimizer.state_dict()], "parameters, options and state")


@pytest.mark.clause("KEYED-033")
@pytest.mark.plain_only("it loads all keys")
@pytest.mark.parametrize("how", ["swapped", "rotated", "transposed", "parts"])
def test_live_state_of_a_torch_optimizer(impl, how):
    """Loading live state of a wrapped optimizer under other keys, or views of it, loads what it held."""
    shapes = {"p0": (4, 4), "p1": (4, 4), "p2": (4, 4)}
    if how == "parts":
        shapes |= {"p1": (2, 4), "p2": (1, 4)}
    params = {key: parameter(*shape, seed=seed) for seed, (key, shape) in enumerate(shapes.items())}
    optimizer = adam(impl, params)
    train(optimizer, params, 2)
    saved = optimizer.state_dict()
    first, second, third = (saved["state"][key]["exp_avg"] for key in params)
    sources = {
        "swapped": [second, first, third],
        "rotated": [second, third, first],
        "transposed": [first.t(), third.t(), second],
        "parts": [first.clone() * 2, first[1:3], first[3:]],
    }[how]
    wanted = snapshot(sources)
    state = {
        key: {**saved["state"][key], "exp_avg": source} for key, source in zip(params, sources, strict=True)
    }
    optimizer.load_state_dict({**saved, "state": state})
    loaded = optimizer.state_dict()["state"]
    for key, source in zip(params, wanted, strict=True):
        expect_bits(loaded[key]["exp_avg"], source, f"state of {key}")
