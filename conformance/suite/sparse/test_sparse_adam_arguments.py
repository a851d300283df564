"""SparseAdam: accepted and rejected arguments, parameters and groups."""

import inspect
import math
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.described import named, said
from keyedopt.conformance.suite.support.device import full, ones, tensor
from keyedopt.conformance.suite.support.inputs import (
    moments,
    parameter,
    set_sparse_grad,
    train_sparse,
    values,
)


def tables(count: int = 1, dtype: str = "float32") -> list[Any]:
    """Make fixed tables of 5 rows."""
    return [parameter(5, 2, dtype=dtype, seed=index) for index in range(count)]


def wrong_parameter(kind: str) -> torch.Tensor:
    """Make a tensor that SparseAdam does not accept as a parameter."""
    if kind == "sparse":
        return torch.eye(3).to_sparse().requires_grad_()
    return ones(3, 2, dtype=torch.complex64).requires_grad_()


@pytest.mark.clause("SPARSE-001")
def test_signature(impl):
    """The arguments are params, lr, betas, eps, maximize, in this order and with their defaults."""
    fixed = said(impl.adapter, "fixed", "SparseAdam")
    documented = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}
    documented |= said(impl.adapter, "defaults", "SparseAdam")
    wanted = {
        name: value
        for name, value in documented.items()
        if name not in fixed and not impl.lacks(f"SparseAdam.{name}")
    }
    known = inspect.signature(impl.SparseAdam).parameters
    if impl.lacks("SparseAdam.positional"):
        expect_equal([name for name in wanted if name in known], list(wanted), "the arguments, in any order")
    else:
        found = [name for name in known if name not in fixed][: len(wanted) + 1]
        expect_equal(found, ["params", *wanted], "the arguments")
    expect_equal([known[name].default for name in wanted], list(wanted.values()), "their defaults")
    group = impl.SparseAdam(tables()).param_groups[0]
    own = named(impl, "SparseAdam", dict.fromkeys(wanted))
    seen = [tuple(group[name]) if name == own.get("betas") else group[name] for name in own]
    expect_equal(seen, list(wanted.values()), "the options of a group")


@pytest.mark.clause("SPARSE-002")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("form", ["list", "generator", "groups"])
def test_params(impl, form):
    """The argument params is an iterable of parameters, or of groups that may have their own options."""
    weights = tables(2)
    given = {
        "list": weights,
        "generator": (weight for weight in weights),
        "groups": [{"params": weights[:1], "lr": 0.5}, {"params": (weight for weight in weights[1:])}],
    }[form]
    optimizer = impl.SparseAdam(given, lr=0.25)
    before = values(weights)
    for weight in weights:
        weight.grad = torch.sparse_coo_tensor(tensor([[1]]), ones(1, 2), (5, 2), check_invariants=True)
    optimizer.step()
    rates = [0.5 if form == "groups" else 0.25, 0.25]
    for weight, old, rate in zip(weights, before, rates, strict=True):
        expect_close(weight.detach()[1], old[1].double() - rate, "the row after a first step", ulps=64)


@pytest.mark.clause("SPARSE-002")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("option", [{"lr": 0.5}, {"betas": (0.5, 0.75)}, {"eps": 0.25}, {"maximize": True}])
def test_options_set_between_steps(impl, option):
    """An option that is set in a group applies from the next step on."""
    weights, others = tables(2), tables(2)
    optimizer = impl.SparseAdam([{"params": [weight]} for weight in weights], lr=0.25)
    first, second = (impl.SparseAdam([weight], lr=0.25) for weight in others)
    train_sparse(optimizer, weights, 1)
    for weight, other, one in zip(weights, others, (first, second), strict=True):
        other.grad = weight.grad.clone()
        one.step()
    resumed = impl.SparseAdam([others[1]], **{"lr": 0.25, **option})
    groups = resumed.state_dict()["param_groups"]
    resumed.load_state_dict({"state": snapshot(second.state_dict()["state"]), "param_groups": groups})
    optimizer.param_groups[1].update(option)
    train_sparse(optimizer, weights, 1, seed=7)
    for weight, other, one in zip(weights, others, (first, resumed), strict=True):
        other.grad = weight.grad.clone()
        one.step()
        expect_close(weight.detach(), other.detach().double(), "the weight of each group", ulps=4)


@pytest.mark.clause("SPARSE-017")
@pytest.mark.needs("SparseAdam", "SparseAdam.tensor_rate")
@pytest.mark.parametrize("shape", [[], [1]])
def test_rate_tensor(impl, shape):
    """Each step reads a learning rate tensor, so filling the tensor changes the learning rate."""
    weight = tables()[0]
    rate = full(shape, 0.25)
    optimizer = impl.SparseAdam([weight], lr=rate)
    for lr in (0.25, 0.125):
        rate.fill_(lr)
        old = weight.detach().clone()
        weight.grad = torch.sparse_coo_tensor(tensor([[1]]), ones(1, 2), (5, 2), check_invariants=True)
        optimizer.step()
        expect_close(
            weight.detach()[1], old[1].double() - lr, f"the row after a step with learning rate {lr}", ulps=64
        )


@pytest.mark.clause("SPARSE-018")
@pytest.mark.parametrize(
    "options",
    [
        {"lr": -0.1},
        {"eps": -1e-8},
        {"betas": [1.0, 0.999]},
        {"betas": [0.9, 1.0]},
        {"betas": [-0.1, 0.999]},
        {"betas": [0.9, -0.1]},
    ],
)
def test_options_out_of_range(impl, options):
    """A negative lr or eps, and betas outside [0, 1), raise ValueError."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    expect_raises(lambda: impl.SparseAdam(tables(), **given), ValueError, expected=f"an error for {options}")


@pytest.mark.clause("SPARSE-018")
@pytest.mark.needs("SparseAdam", "SparseAdam.tensor_rate")
def test_rate_tensor_of_two(impl):
    """A learning rate tensor of two numbers raises ValueError."""
    expect_raises(
        lambda: impl.SparseAdam(tables(), lr=tensor([0.1, 0.2])),
        ValueError,
        expected="an error for an lr of two numbers",
    )


@pytest.mark.clause("SPARSE-019")
@pytest.mark.parametrize("name", ["lr", "eps"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_options_not_finite(impl, name, value):
    """An lr or eps that is not finite raises ValueError."""
    expect_raises(
        lambda: impl.SparseAdam(tables(), **{name: float(value)}),
        ValueError,
        expected=f"an error for {name}={value}",
    )


@pytest.mark.clause("SPARSE-020")
@pytest.mark.parametrize("betas", [[0.9, 0.99, 0.999], [0.9], 0.9, [0.9, "0.999"], [0.9, None]])
def test_betas_that_are_no_pair(impl, betas):
    """Betas that are not two numbers raise in the call that sets them, not in the first step."""
    given = tuple(betas) if isinstance(betas, list) else betas
    expect_raises(
        lambda: impl.SparseAdam(tables(), betas=given), Exception, expected=f"an error for betas={betas}"
    )


@pytest.mark.clause("SPARSE-021")
@pytest.mark.parametrize("options", [{"lr": 0.0}, {"eps": 0.0}, {"lr": "0.1"}])
def test_zero_options(impl, options):
    """Observe whether a learning rate or eps of 0, and a string as learning rate, are accepted."""
    return outcome(lambda: impl.SparseAdam(tables(), **options) and "an optimizer")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("SPARSE-022")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"eps": -3.0}, {"betas": [2.0, 0.5]}, {"betas": [0.5, 1.0]}]
)
@pytest.mark.parametrize("late", [False, True])
def test_options_of_a_group(impl, options, late):
    """Options of a group are validated like arguments, in the constructor and in add_param_group."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    first, second = tables(2)
    if not late:
        expect_raises(
            lambda: impl.SparseAdam([{"params": [first], **given}]),
            ValueError,
            expected=f"an error for a group with {options}",
        )
        return
    optimizer = impl.SparseAdam([first])
    expect_raises(
        lambda: optimizer.add_param_group({"params": [second], **given}),
        ValueError,
        expected=f"an error for a group with {options}",
    )
    expect_equal(len(optimizer.param_groups), 1, "the number of groups")


@pytest.mark.clause("SPARSE-023")
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_parameters_of_another_kind(impl, kind):
    """A sparse or complex parameter raises ValueError."""
    expect_raises(
        lambda: impl.SparseAdam([*tables(), wrong_parameter(kind)]),
        ValueError,
        expected=f"an error for a {kind} parameter",
    )


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("SPARSE-024")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_parameters_of_another_kind_added(impl, kind):
    """add_param_group raises for a sparse or complex parameter and adds no group."""
    optimizer = impl.SparseAdam(tables())
    expect_raises(
        lambda: optimizer.add_param_group({"params": [*tables(2)[1:], wrong_parameter(kind)]}),
        ValueError,
        expected=f"an error for a {kind} parameter",
    )
    expect_equal(len(optimizer.param_groups), 1, "the number of groups")


@pytest.mark.clause("SPARSE-025")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("late", [False, True])
def test_parameter_listed_twice(impl, late):
    """A parameter that is listed twice in a group raises an error, or is updated once per step."""
    weight, other = tables(2)
    alone = weight.detach().clone().requires_grad_()
    set_sparse_grad(alone, [1, 3])
    impl.SparseAdam([alone], lr=0.25).step()

    def make() -> Any:
        optimizer = impl.SparseAdam([other] if late else [weight, weight], lr=0.25)
        if late:
            optimizer.add_param_group({"params": [weight, weight]})
        return optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if error_of(make):
            return
        optimizer = make()
    set_sparse_grad(weight, [1, 3])
    optimizer.step()
    expect_bits(weight.detach(), alone.detach(), "a parameter listed twice, after a step,")


@pytest.mark.clause("SPARSE-025")
@pytest.mark.needs("SparseAdam")
def test_parameter_listed_under_two_names(impl):
    """A parameter that is listed under two names raises an error, or is updated once per step."""
    weight, alone = tables(1)[0], tables(1)[0]
    set_sparse_grad(alone, [1, 3])
    impl.SparseAdam([alone], lr=0.25).step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer = impl.SparseAdam([("a", weight), ("b", weight)], lr=0.25)
        except Exception:
            return
    set_sparse_grad(weight, [1, 3])
    optimizer.step()
    expect_bits(weight.detach(), alone.detach(), "a parameter listed twice, after a step,")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("SPARSE-026")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("late", [False, True])
def test_parameter_in_two_groups(impl, late):
    """A parameter in two groups raises ValueError."""
    weight = tables()[0]
    if not late:
        groups = [{"params": [weight]}, {"params": [weight]}]
        expect_raises(lambda: impl.SparseAdam(groups), ValueError, expected="an error for the second group")
        return
    optimizer = impl.SparseAdam([weight])
    expect_raises(
        lambda: optimizer.add_param_group({"params": [weight]}),
        ValueError,
        expected="an error for the second group",
    )
    expect_equal(len(optimizer.param_groups), 1, "the number of groups")


@pytest.mark.clause("SPARSE-027")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
def test_add_param_group(impl):
    """An added group has its own options or the defaults, and is trained from then on."""
    first, second = tables(2)
    optimizer = impl.SparseAdam([first], lr=0.25)
    train_sparse(optimizer, [first], 2)
    optimizer.add_param_group({"params": [second], "betas": (0.5, 0.75)})
    group = optimizer.param_groups[1]
    expect_equal([group["lr"], tuple(group["betas"])], [0.25, (0.5, 0.75)], "the options of the group")
    alone = second.detach().clone().requires_grad_()
    train_sparse(optimizer, [second], 3)
    train_sparse(impl.SparseAdam([alone], lr=0.25, betas=(0.5, 0.75)), [alone], 3)
    expect_bits(second.detach(), alone.detach(), "a parameter of the group after three steps")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("SPARSE-028")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("wrong", ["list", "no params", "text", "empty"])
def test_no_group(impl, wrong):
    """Adding an object that is not a group raises an error and leaves the groups unchanged."""
    optimizer = impl.SparseAdam(tables())
    given: Any = {
        "list": tables(2)[1:], "no params": {"lr": 0.1}, "text": {"params": "weights"}, "empty": {},
    }[wrong]  # fmt: skip
    expect_raises(lambda: optimizer.add_param_group(given), Exception, expected="refused")
    expect_equal(len(optimizer.param_groups), 1, "the number of groups")


@pytest.mark.clause("SPARSE-029")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("late", [False, True])
def test_group_is_not_shared(impl, late):
    """The dict of a group is not modified, and two optimizers built from it have separate options."""
    first, other = tables(2)
    given = {"params": [first]}
    made = []
    for lr in (0.25, 0.5):
        optimizer = impl.SparseAdam([other] if late else [given], lr=lr)
        if late:
            optimizer.add_param_group(given)
        made.append(optimizer)
    expect_equal(
        [one.param_groups[-1]["lr"] for one in made], [0.25, 0.5], "the learning rates of two optimizers"
    )
    made[0].param_groups[-1]["lr"] = 0.125
    expect_equal(
        made[1].param_groups[-1]["lr"], 0.5, "the learning rate of one, after the other's is changed,"
    )
    expect_equal(sorted(given), ["params"], "keys of the dictionary that was given")


@pytest.mark.clause("SPARSE-030")
def test_no_parameters(impl):
    """An empty list of parameters raises ValueError."""
    expect_raises(
        lambda: impl.SparseAdam([]), ValueError, expected="an error for an empty list of parameters"
    )


@pytest.mark.clause("SPARSE-031")
@pytest.mark.needs("SparseAdam", "SparseAdam.any_shape")
def test_several_dtypes(impl):
    """Parameters of several dtypes and shapes train like each parameter in its own optimizer."""
    made = [
        parameter(5, 2, dtype="float64"),
        parameter(7, dtype="float32", seed=1),
        parameter(4, 2, 3, seed=2),
    ]
    alone = [one.detach().clone().requires_grad_() for one in made]
    optimizer = impl.SparseAdam(made, lr=0.25)
    for step in range(3):
        for one in [*made, *alone]:
            set_sparse_grad(one, [1, 3, 1], seed=step + 1)
        optimizer.step()
    for one, single in zip(made, alone, strict=True):
        apart = impl.SparseAdam([single], lr=0.25)
        for step in range(3):
            set_sparse_grad(single, [1, 3, 1], seed=step + 1)
            apart.step()
        expect_bits(one.detach(), single.detach(), "a parameter among others")


@pytest.mark.clause("SPARSE-060")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
def test_zero_grad(impl):
    """zero_grad sets every gradient to None by default, and to zero with set_to_none=False."""
    weights = tables(2)
    optimizer = impl.SparseAdam([{"params": weights[:1]}, {"params": weights[1:]}])
    for weight in weights:
        set_sparse_grad(weight, [1, 3])
    optimizer.zero_grad(set_to_none=False)
    for weight in weights:
        dense = None if weight.grad is None else weight.grad.to_dense()
        expect(dense is not None and not dense.any(), "a gradient of zeros", dense)
    for weight in weights:
        set_sparse_grad(weight, [1, 3])
    optimizer.zero_grad()
    expect_equal([weight.grad for weight in weights], [None, None], "the gradients")


@pytest.mark.clause("SPARSE-061")
def test_step_after_zero_grad(impl):
    """After zero_grad() a step changes nothing; after set_to_none=False, it changes no element."""
    weight = tables()[0]
    optimizer = impl.SparseAdam([weight], lr=0.25)
    train_sparse(optimizer, [weight], 2)
    for none in (True, False):
        before = weight.detach().clone()
        means = snapshot(moments(optimizer, weight))
        set_sparse_grad(weight, [1])
        optimizer.zero_grad(set_to_none=none)
        optimizer.step()
        expect_bits(weight.detach(), before, "the parameter")
        for name, mean in means.items():
            expect_bits(optimizer.state[weight][name], mean, name)
    expect(math.isfinite(float(weight.detach().sum())), "finite weights", weight)
