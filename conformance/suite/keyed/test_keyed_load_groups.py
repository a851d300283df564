"""Keyed optimizers: saving and loading parameter groups, which are identified by their parameters."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import ones, tensor, zeros
from keyedopt.conformance.suite.support.inputs import adam, parameters, train


def grouped(impl, groups, keys=3, moments=False):
    """Make an optimizer that saves its groups, given as (keys, options)."""
    params = parameters(keys)
    listed = [{"params": [params[key] for key in names], **options} for names, options in groups]
    state = {param: {"m": ones(3)} for param in params.values()} if moments else {}
    optimizer = impl.KeyedOptimizer(params, state, listed)
    optimizer.save_param_groups(True)
    return optimizer


def rates(optimizer):
    """Return the learning rates of the live groups."""
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.clause("KEYED-041")
@pytest.mark.plain_only("it reads the first group")
def test_groups_are_loaded_when_they_are_saved(impl):
    """With save_param_groups(True) the options of each group are restored."""
    params = parameters(2)
    optimizer = adam(impl, params)
    optimizer.save_param_groups(True)
    train(optimizer, params, 1)
    saved = snapshot(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 9.0
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)
    optimizer.load_state_dict(saved)
    expect_equal(optimizer.param_groups[0]["lr"], 0.1, "the restored learning rate")
    expect_equal(tuple(optimizer.param_groups[0]["betas"]), (0.9, 0.999), "the restored betas")
    live = optimizer.param_groups[0]["params"]
    same = len(live) == 2 and all(a is b for a, b in zip(live, params.values(), strict=True))
    expect(same, "groups that still hold the parameters themselves", live)


@pytest.mark.clause("KEYED-041")
@pytest.mark.parametrize("saved", ["tensor", "number"])
def test_a_number_is_loaded_over_a_tensor(impl, saved):
    """A learning rate in a tensor gets the saved value, which may be a tensor or a number."""
    optimizer = grouped(impl, [(["p0"], {"lr": 0.5}), (["p1"], {"lr": tensor(0.5)})])
    given = [2.0, tensor(4.0) if saved == "tensor" else 4.0]
    listed = [{"params": [f"p{at}"], "lr": rate} for at, rate in enumerate(given)]
    optimizer.load_state_dict({"state": {}, "param_groups": listed})
    expect_equal([float(rate) for rate in rates(optimizer)], [2.0, 4.0], "rates")


@pytest.mark.clause("KEYED-041")
def test_a_number_is_rounded_once(impl, dtype):
    """A number that is loaded over a tensor is rounded to the dtype of the tensor, if at all."""
    rate = tensor(0.5, dtype=getattr(torch, dtype))
    optimizer = grouped(impl, [(["p0"], {"lr": rate})])
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": ["p0"], "lr": 0.1}]})
    seen, rounded = float(rates(optimizer)[0]), float(rate.new_tensor(0.1))
    expect(seen in (rounded, 0.1), f"{rounded} in the tensor, or the number 0.1 in its place", seen)


@pytest.mark.clause("KEYED-041")
def test_an_int_is_loaded_over_a_float_in_a_group(impl):
    """Numbers of another type are loaded in groups, as in state."""
    optimizer = grouped(impl, [(["p0"], {"lr": 0.5})])
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": ["p0"], "lr": 2}]})
    expect_equal(rates(optimizer), [2], "rates")


@pytest.mark.clause("KEYED-042")
def test_groups_are_left_alone_unless_asked_for(impl):
    """Without save_param_groups(True) groups in the checkpoint are ignored."""
    optimizer = grouped(impl, [(["p0"], {"lr": 0.5})])
    optimizer.save_param_groups(False)
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": ["nobody"], "lr": 2.0}]})
    optimizer.load_state_dict({"state": {}})
    expect_equal(rates(optimizer), [0.5], "rates")


@pytest.mark.clause("KEYED-043")
def test_groups_are_known_by_their_parameters_not_their_position(impl):
    """Reordered groups and parameters find their own options."""
    optimizer = grouped(impl, [(["p0", "p1"], {"lr": 0.5}), (["p2"], {"lr": 0.6})])
    listed = [{"params": ["p2"], "lr": 2.0}, {"params": ["p1", "p0"], "lr": 1.0}]
    optimizer.load_state_dict({"state": {}, "param_groups": listed})
    expect_equal(rates(optimizer), [1.0, 2.0], "rates")


@pytest.mark.clause("KEYED-043")
@pytest.mark.needs("CombinedOptimizer")
def test_groups_of_a_combination_are_known_by_their_parameters(impl):
    """Reordered groups also match inside a combination."""
    inner = grouped(impl, [(["p0", "p1"], {"lr": 0.5}), (["p2"], {"lr": 0.6})])
    combined = impl.CombinedOptimizer([("a", inner)])
    listed = [{"params": ["a.p2"], "lr": 2.0}, {"params": ["a.p1", "a.p0"], "lr": 1.0}]
    combined.load_state_dict({"state": {}, "param_groups": listed})
    expect_equal(rates(combined), [1.0, 2.0], "rates")


#: Groups that do not fit those of p0, and of p1 and p2, with the text of the published library.
MISFITS = [
    ([{"params": ["p0"], "lr": 1.0}], "Different param_groups count: 2 vs 1"),
    ([{"params": ["p0"], "lr": 1.0}, {"params": ["p1"], "lr": 1.0}], "Group p1/p2 not found"),
    ([{"params": ["p0"]}, {"params": ["p1", "p2"], "lr": 1.0}], "Different param_group size: 2 vs 1"),
    (
        [{"params": ["p0"], "rate": 1.0}, {"params": ["p1", "p2"], "lr": 1.0}],
        "Group key lr not found for group p0",
    ),
]

#: What is extra in groups whose beginning fits.
EXTRA = [
    [{"params": ["p0"], "lr": 0.5}, {"params": ["p1", "p2"], "lr": 0.6}, {"params": [], "lr": 0.7}],
    [{"params": ["p0"], "lr": 0.5, "eps": 0.1}, {"params": ["p1", "p2"], "lr": 0.6}],
]


def expect_groups_refused(impl, given, *texts):
    """Expect loading these groups to raise a ValueError that contains these texts."""
    optimizer = grouped(impl, [(["p0"], {"lr": 0.5}), (["p2", "p1"], {"lr": 0.6})])
    expect_raises(
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": given}),
        ValueError,
        mentions=texts,
        expected=f"a ValueError for the groups {given}",
    )


@pytest.mark.clause("KEYED-044")
@pytest.mark.parametrize("given", [*(given for given, _ in MISFITS), *EXTRA])
def test_groups_that_do_not_fit_are_refused(impl, given):
    """Another number of groups, other members or other options raise ValueError."""
    expect_groups_refused(impl, given)


@pytest.mark.clause("KEYED-037")
@pytest.mark.parametrize(("given", "text"), MISFITS)
def test_texts_of_refused_groups(impl, given, text):
    """Errors for groups that do not fit contain the texts of the published library."""
    expect_groups_refused(impl, given, text)


@pytest.mark.clause("KEYED-045")
@pytest.mark.parametrize("fault", ["missing", "count", "member", "option"])
def test_refused_groups_leave_state_and_groups_alone(impl, fault):
    """If groups do not fit, neither state nor any group is written."""
    optimizer = grouped(impl, [(["p0"], {"lr": 0.5}), (["p1", "p2"], {"lr": 0.6})], moments=True)
    first = {"params": ["p0"], "lr": 9.0}
    given = {
        "missing": None,
        "count": [first],
        "member": [first, {"params": ["p1"], "lr": 9.0}],
        "option": [first, {"params": ["p1", "p2"], "rate": 9.0}],
    }[fault]
    loaded = {"state": {key: {"m": zeros(3)} for key in ("p0", "p1", "p2")}}
    if given is not None:
        loaded["param_groups"] = given
    before = snapshot(optimizer.state_dict())
    expect_raises(lambda: optimizer.load_state_dict(loaded), Exception, expected=f"an error ({fault})")
    expect_unchanged(before, optimizer.state_dict(), "state and groups after a failed load")


@pytest.mark.clause("KEYED-046")
@pytest.mark.parametrize("names", [["p0"], []])
def test_groups_with_the_same_parameters_are_all_restored(impl, names):
    """Groups with the same parameters, or none, all get their options."""
    groups = [(names, {"lr": 0.1}), (names, {"lr": 0.2}), (["p1"], {"lr": 0.3})]
    optimizer = grouped(impl, groups)
    saved = snapshot(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.load_state_dict(saved)
    expect_equal(rates(optimizer), [0.1, 0.2, 0.3], "rates")


@pytest.mark.clause("KEYED-046")
@pytest.mark.needs("CombinedOptimizer")
def test_groups_with_the_same_parameters_in_a_combination(impl):
    """The same holds for an optimizer inside a combination."""
    groups = [(["p0"], {"lr": 0.1}), (["p0"], {"lr": 0.2}), ([], {"lr": 0.3}), ([], {"lr": 0.4})]
    combined = impl.CombinedOptimizer([("a", grouped(impl, groups)), ("b", grouped(impl, groups[1:]))])
    saved, before = snapshot(combined.state_dict()), rates(combined)
    for group in combined.param_groups:
        group["lr"] = 0.0
    combined.load_state_dict(saved)
    expect_equal(rates(combined), before, "rates")


@pytest.mark.clause("KEYED-047")
def test_slashes_in_keys_do_not_mix_groups_up(impl):
    """The group of a parameter a/b differs from the group of a and b."""
    values = parameters(3)
    params = {"a/b": values["p0"], "a": values["p1"], "b": values["p2"]}
    groups = [
        {"params": [params["a/b"]], "lr": 0.1},
        {"params": [params["a"], params["b"]], "lr": 0.2},
    ]
    optimizer = impl.KeyedOptimizer(params, {}, groups)
    optimizer.save_param_groups(True)
    saved = snapshot(optimizer.state_dict())
    for group in groups:
        group["lr"] = 0.0
    optimizer.load_state_dict(saved)
    expect_equal(rates(optimizer), [0.1, 0.2], "rates")


@pytest.mark.clause("KEYED-048")
def test_loaded_groups_are_not_shared(impl):
    """Changing the options of a checkpoint after a load does not affect the live groups."""
    optimizer = grouped(impl, [(["p0"], {"lr": 0.5, "betas": [0.9, 0.99]})])
    given = [{"params": ["p0"], "lr": 1.0, "betas": [0.8, 0.88]}]
    optimizer.load_state_dict({"state": {}, "param_groups": given})
    given[0]["betas"][0] = 0.0
    expect_equal(list(optimizer.param_groups[0]["betas"]), [0.8, 0.88], "the loaded betas")


@pytest.mark.clause("KEYED-049")
def test_a_rate_in_a_tensor(impl):
    """Observe whether a load fills a learning rate tensor in place or replaces it."""
    rate = tensor(0.5)
    optimizer = grouped(impl, [(["p0"], {"lr": rate})])
    given = [{"params": ["p0"], "lr": tensor(2.0)}]
    optimizer.load_state_dict({"state": {}, "param_groups": given})
    now = optimizer.param_groups[0]["lr"]
    return {"value": float(now), "same tensor": now is rate}


@pytest.mark.clause("KEYED-050")
@pytest.mark.parametrize("given", [["p0"], "p0", {"params": ["p0"]}, [{"lr": 0.1}], [1], None])
def test_malformed_groups_are_refused(impl, given):
    """An object that is not a list of groups with parameter keys raises an error."""
    optimizer = grouped(impl, [(["p0"], {"lr": 0.5})])
    expect_raises(
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": given}),
        Exception,
        expected="an error",
    )
    expect_equal(rates(optimizer), [0.5], "learning rates after a failed load")


@pytest.mark.clause("KEYED-051")
@pytest.mark.parametrize("change", ["a list for a tuple", "None to False", "a tensor for a float"])
def test_options_of_another_type(impl, change):
    """Observe what happens to an option that is loaded with another type."""
    live, given = {
        "a list for a tuple": ((0.9, 0.99), [0.8, 0.88]),
        "None to False": (None, False),
        "a tensor for a float": (0.5, tensor(2.0)),
    }[change]
    optimizer = grouped(impl, [(["p0"], {"option": live})])

    def load():
        listed = [{"params": ["p0"], "option": given}]
        optimizer.load_state_dict({"state": {}, "param_groups": listed})
        return optimizer.param_groups[0]["option"]

    return outcome(load)
