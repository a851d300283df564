"""The options of the groups in checkpoints: each one comes back, and bad ones are refused."""

import copy
import functools

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    WITH_EPS,
    expect_same_way,
    load_and_train,
    make_algorithm,
    resumes,
)
from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.described import OTHER, named
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, train, values
from keyedopt.conformance.suite.support.options import (
    AT_FIRST,
    EACH,
    TWO,
    with_required_options,
    with_zeros,
)


def tables(count: int = 2) -> list[torch.nn.Parameter]:
    """Make fixed tables."""
    return [parameter(4, 3, seed=index) for index in range(count)]


def in_groups(weights, *options):
    """Return groups of one weight each, with these options."""
    return [{"params": [weight], **more} for weight, more in zip(weights, options, strict=True)]


def train_with_zeros(optimizer, weights, seeds):
    """Take steps in which a row of each gradient is zero."""
    for seed in seeds:
        with_zeros(weights, seed)
        optimizer.step()


@pytest.mark.clause("ALGO-073")
@pytest.mark.needs("{algorithm}", "{algorithm}.{option}", "{algorithm}.groups")
@pytest.mark.parametrize(
    ("algorithm", "option"),
    [*((name, "lr") for name in ALGORITHMS), *(pair for pair in EACH if pair[1] not in AT_FIRST)],
)
@pytest.mark.parametrize("which", [0, 1])
def test_each_option_loaded(impl, algorithm, option, which):
    """A group that has loaded an option trains with it, whatever its own value and that of other groups."""
    kind = getattr(impl, algorithm)
    theirs, others = (with_required_options(option, value) for value in TWO[option][:: 1 - 2 * which])
    weights = tables()
    optimizer = kind(in_groups(weights, others, theirs), **others)
    before = [0] if resumes(impl, algorithm) else []  # steps before the load
    train_with_zeros(optimizer, weights, before)
    resumed = [torch.nn.Parameter(value) for value in values(weights)]
    other = kind(in_groups(resumed, theirs, others), **others)
    other.load_state_dict(snapshot(optimizer.state_dict()))
    for each, listed in ((optimizer, weights), (other, resumed)):
        train_with_zeros(each, listed, [1, 2])
    for index in range(2):
        start = parameter(4, 3, seed=index)
        what = f"the weight of group {index} after a load of {option}"
        expect_same_way(resumed[index], weights[index], start, what, algorithm)


#: Options that a constructor refuses; of `OTHER` the suite knows no other options.
OUT_OF_RANGE = [
    *((name, "lr", value) for name in (*ALGORITHMS, OTHER) for value in (-1.0, "nan")),
    *((name, "weight_decay", -1.0) for name in ALGORITHMS),
    *((name, "eps", "nan") for name in WITH_EPS),
]


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("ALGO-116")
@pytest.mark.needs("{algorithm}", "{algorithm}.{option}", "{algorithm}.groups")
@pytest.mark.parametrize(("algorithm", "option", "value"), OUT_OF_RANGE)
@pytest.mark.parametrize("which", [0, 1])
def test_load_of_options_out_of_range(impl, algorithm, option, value, which):
    """Loading an option that the constructor rejects, in any group, raises ValueError; nothing changes."""
    bad = {option: float(value)}
    if not error_of(lambda: getattr(impl, algorithm)(tables(1), **{"lr": 0.1, **bad})):
        return
    weights = tables()
    optimizer = make_algorithm(impl, algorithm, in_groups(weights, {}, {}))
    train(optimizer, weights, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][1 - which]["lr"] = 0.5
    saved["param_groups"][which].update(named(impl, algorithm, bad))
    before = snapshot([values(weights), optimizer.state_dict()])
    expect_raises(lambda: optimizer.load_state_dict(saved), ValueError, expected=f"ValueError for {bad}")
    expect_unchanged(before, [values(weights), optimizer.state_dict()], "weights and state")


@pytest.mark.clause("ALGO-115")
@pytest.mark.plain_only("it has groups of its own")
@pytest.mark.needs("Adam", "Adam.groups", "Adam.decoupled_weight_decay")
@pytest.mark.parametrize("into", ["torch", "implementation"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_checkpoints_of_a_decay_that_was_set(impl, into, which, decoupled):
    """The kind of decay that was set in a group right before a save is in the checkpoint."""
    mine, torchs = (functools.partial(each.Adam, lr=0.1, weight_decay=0.5) for each in (impl, torch.optim))
    weights, expected = tables(), tables()
    for kind, listed in ((mine, weights), (torchs, expected)):
        optimizer = kind(in_groups(listed, {}, {}), decoupled_weight_decay=not decoupled)
        train(optimizer, listed, 1)
        optimizer.param_groups[which]["decoupled_weight_decay"] = decoupled
        if kind is torchs:
            train(optimizer, listed, 2, seed=2)
            continue
        saved = copy.deepcopy(optimizer.state_dict())
        resumed = (torchs if into == "torch" else mine)(in_groups(listed, {}, {}))
        if error_of(functools.partial(load_and_train, resumed, saved, listed)):
            return  # such as a name of an option that torch does not have
    for index, start in enumerate(tables()):
        what = f"the weight of group {index} after the load"
        expect_same_way(weights[index], expected[index].detach(), start, what, "Adam")


@pytest.mark.clause("ALGO-106")
@pytest.mark.plain_only("it has groups of its own")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@pytest.mark.parametrize("algorithm", ["Adam", "AdamW"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])
def test_amsgrad_set_in_a_group(impl, algorithm, which, steps):
    """A group in which amsgrad is set trains like one constructed with it, or an error is raised."""
    kind = functools.partial(getattr(impl, algorithm), lr=0.1)
    if error_of(lambda: kind(tables(1), amsgrad=False)):
        return  # it does not have the option
    expected, weights = tables(), tables()
    optimizer = kind(in_groups(weights, {}, {}))

    def all_steps(each, listed):
        for step in range(4):
            if each is optimizer and step == steps:
                each.param_groups[which]["amsgrad"] = True
            set_grads(listed, seed=3, scale=0.1**step)  # so that the largest moment is not the last
            each.step()

    if error_of(lambda: all_steps(optimizer, weights)):
        return
    chosen = [{"amsgrad": index == which} for index in range(2)]
    refused = error_of(lambda: all_steps(kind(in_groups(expected, *chosen)), expected))
    expect(not refused, "an error after amsgrad was set, as from the constructor", "no error")
    for index, start in enumerate(tables()):
        what = f"the weight of group {index} with amsgrad in group {which}"
        expect_same_way(weights[index], expected[index].detach(), start, what, algorithm, steps=4)


@pytest.mark.clause("ALGO-092")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("option", ["differentiable", "capturable"])
@pytest.mark.parametrize("which", [0, 1])
def test_an_unsupported_option_set_in_a_group(impl, algorithm, option, which):
    """An option of torch whose support the constructor denies does not vanish when it is set in a group."""
    kind = functools.partial(getattr(impl, algorithm), lr=0.1)
    if error_of(lambda: kind(tables(1), **{option: False})) or not error_of(
        lambda: kind(tables(1), **{option: True})
    ):
        return
    weights = tables()
    optimizer = kind(in_groups(weights, {}, {}))
    train(optimizer, weights, 1)
    optimizer.param_groups[which][option] = True
    start = values(weights)
    expect_raises(lambda: train(optimizer, weights, 1), Exception, expected=f"an error for {option}=True")
    expect_unchanged(start, values(weights), "the weights")
