"""The state of the algorithms: names, shapes, saving, loading, copying."""

import copy
import functools
import io
import pickle

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    WITH_OTHER,
    decay,
    expect_same_way,
    load_and_train,
    make_algorithm,
    need_dtype,
    need_group_rates,
    need_independent,
    need_operators,
)
from keyedopt.conformance.suite.support.assertions import (
    Mismatch,
    error_of,
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.described import OTHER, MissingName, documented_state, named
from keyedopt.conformance.suite.support.device import ones
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, train, values
from keyedopt.conformance.suite.support.options import ADAMS

every = pytest.mark.parametrize("algorithm", ALGORITHMS)
any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)

#: Shapes of the state of a table (4, 3).
SHAPES = {
    "SGD": {"momentum_buffer": [4, 3]},
    "Adagrad": {"sum": [4, 3]},
    "RowWiseAdagrad": {"sum": [4, 1]},
    "Adam": {"exp_avg": [4, 3], "exp_avg_sq": [4, 3]},
    "AdamW": {"exp_avg": [4, 3], "exp_avg_sq": [4, 3]},
    "PartialRowWiseAdam": {"exp_avg": [4, 3], "exp_avg_sq": [4]},
    "LAMB": {"exp_avg": [4, 3], "exp_avg_sq": [4, 3]},
    "PartialRowWiseLAMB": {"exp_avg": [4, 3], "exp_avg_sq": [4]},
    "LarsSGD": {"momentum_buffer": [4, 3]},
    "Ftrl": {"accumulator": [4, 3], "linear": [4, 3]},
}


def tables(count: int = 2, dtype: str = "float32") -> list[torch.nn.Parameter]:
    """Make fixed tables."""
    return [parameter(4, 3, dtype=dtype, seed=index) for index in range(count)]


@pytest.mark.clause("ALGO-070")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(("algorithm", "shapes"), SHAPES.items())
def test_names_and_shapes(impl, algorithm, shapes):
    """The state has the documented names and shapes; further entries are ignored."""
    weights = tables(1)
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 2)
    (entries,) = optimizer.state_dict()["state"].values()
    state = documented_state(impl, algorithm, entries)
    for name, shape in shapes.items():
        expect(
            name in state or not impl.stated(f"{algorithm}.{name}"), f"{name} in the state", sorted(entries)
        )
        expect_equal(list(state[name].shape), shape, f"shape of {name}")
    if "step" in state:
        expect_equal(float(torch.as_tensor(state["step"]).max()), 2.0, "count of steps")


@pytest.mark.clause("ALGO-071")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ["Adagrad", "RowWiseAdagrad"])
def test_state_from_construction(impl, algorithm):
    """The sum of each parameter exists before the first step, at its initial value."""
    weights = tables()
    optimizer = make_algorithm(impl, algorithm, weights, initial_accumulator_value=0.25)
    state = optimizer.state_dict()["state"]
    expect_equal(len(state), len(weights), "parameters with state")
    for entries in state.values():
        entry = documented_state(impl, algorithm, entries)
        expect_equal(float(entry.get("step", 0)), 0.0, "count of steps")
        expect_bits(entry["sum"], torch.full(tuple(SHAPES[algorithm]["sum"]), 0.25), "sum")


@pytest.mark.clause("ALGO-114")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_state_that_is_read_before_the_first_step(impl, algorithm):
    """Parameters whose state was read before the first step train like others."""
    seen, wanted = tables(), tables()
    optimizers = [make_algorithm(impl, algorithm, weights) for weights in (seen, wanted)]
    if error_of(lambda: [optimizers[0].state[weight] for weight in seen]):
        return  # it keeps state in another form
    for optimizer, weights in zip(optimizers, (seen, wanted), strict=True):
        train(optimizer, weights, 3)
    for one, other in zip(seen, wanted, strict=True):
        expect_bits(one.detach(), other.detach(), "the weight")


@pytest.mark.clause("ALGO-072")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_resumed(impl, algorithm, dtype):
    """An optimizer that has loaded the state of another continues on the same trajectory."""
    if algorithm == OTHER:
        need_operators(impl, algorithm, dtype)
    weights = tables(dtype=dtype)
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 3)
    resumed = [torch.nn.Parameter(value) for value in values(weights)]
    other = make_algorithm(impl, algorithm, resumed)
    other.load_state_dict(snapshot(optimizer.state_dict()))
    train(optimizer, weights, 3, seed=7)
    train(other, resumed, 3, seed=7)
    for index in range(2):
        expect_bits(resumed[index].detach(), weights[index].detach(), f"weight {index}")


@pytest.mark.clause("ALGO-072")
@pytest.mark.needs("{algorithm}.bias_correction")
@pytest.mark.parametrize("algorithm", ADAMS)
def test_counts_of_rows_resumed(impl, algorithm):
    """The step counts of rows are saved and loaded exactly, in half precision too."""
    need_dtype(impl, algorithm, "float16")
    weights = tables(1, dtype="float16")
    optimizer = make_algorithm(impl, algorithm, weights, bias_correction="per_row")
    train(optimizer, weights, 1)
    saved = snapshot(optimizer.state_dict())
    counts = [value for value in saved["state"][0].values() if tuple(value.shape) == (4,)]
    steps = [value for value in counts if bool((value == 1).all()) and value.dtype is not torch.float16]
    expect(steps, "a count a row in the state, in a dtype that can count", saved["state"][0])
    for value in steps:
        value.fill_(4097)
    optimizer.load_state_dict(saved)
    train(optimizer, weights, 1)
    seen = [value for value in optimizer.state_dict()["state"][0].values() if bool((value == 4098).all())]
    expect(seen, "counts of 4098 after one more step", optimizer.state_dict()["state"][0])


@pytest.mark.clause("ALGO-073")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
def test_options_loaded(impl, algorithm):
    """Loading restores lr and weight_decay of every group."""
    need_group_rates(impl, algorithm)
    first, second = tables(), tables()
    groups = [{"params": [first[0]]}, {"params": [first[1]], "lr": 0.3}]
    decayed = decay(impl, algorithm, 0.2)
    one = make_algorithm(impl, algorithm, groups, **decayed)
    other = make_algorithm(impl, algorithm, [{"params": [weight]} for weight in second], lr=0.7)
    other.load_state_dict(one.state_dict())
    kept = named(impl, algorithm, decayed)  # a constructor may convert it, such as to a list
    wanted = [
        {**named(impl, algorithm, {"lr": lr}), **{name: group[name] for name in kept}}
        for lr, group in zip((0.1, 0.3), one.param_groups, strict=True)
    ]
    seen = [{name: group[name] for name in wanted[0]} for group in other.param_groups]
    expect_equal(seen, wanted, "options of the groups")


@pytest.mark.clause("ALGO-113")
@pytest.mark.needs("Adam", "AdamW")
@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.needs("Adam.groups", "AdamW.groups"))]
)
def test_adamw_resumes_adam(impl, count):
    """AdamW that has loaded the state of Adam decays as AdamW in each group, or raises an error."""
    decayed, seen = {"weight_decay": 0.5}, []
    for kind in ("AdamW", "Adam"):
        weights = tables(count)
        first = make_algorithm(impl, kind, in_groups(weights), weight_decay=0.0)
        train(first, weights, 1)
        saved = first.state_dict()
        for group in saved["param_groups"]:
            group.update(named(impl, kind, decayed))
        second = make_algorithm(impl, "AdamW", in_groups(weights), **decayed)
        if error_of(functools.partial(load_and_train, second, saved, weights)):
            return
        seen.append(weights)
    for one, other, start in zip(*seen, tables(count), strict=True):
        expect_same_way(other, one.detach(), start, "the weight after a load of Adam's state", "AdamW")


def in_groups(weights):
    """Return groups of one weight, with unlike learning rates."""
    return [{"params": [weight], "lr": 0.1 * (1 + index)} for index, weight in enumerate(weights)]


#: Options, in the words of torch, of the checkpoints that torch's classes exchange.
EXCHANGED = [
    *(("SGD", options) for options in ({}, {"momentum": 0.9, "nesterov": True}, {"maximize": True})),
    *(("Adagrad", options) for options in ({}, {"lr_decay": 0.5}, {"weight_decay": 0.25})),
    *(("Adam", options) for options in ({}, {"weight_decay": 0.25}, {"maximize": True})),
    ("Adam", {"weight_decay": 0.25, "decoupled_weight_decay": True}),
    *(("AdamW", options) for options in ({}, {"weight_decay": 0.25})),
]


@pytest.mark.clause("ALGO-115")
@pytest.mark.plain_only("it has groups of its own")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@pytest.mark.parametrize(("algorithm", "options"), EXCHANGED)
@pytest.mark.parametrize("into", ["torch", "implementation"])
def test_checkpoints_of_torch(impl, algorithm, options, into):
    """A checkpoint of two groups is resumed by torch's class of the same name, and the other way round."""
    if lacking := [option for option in options if impl.lacks(f"{algorithm}.{option}")]:
        getattr(impl, f"{algorithm}.{lacking[0]}")  # unsupported
    mine, torchs = (functools.partial(getattr(each, algorithm), lr=0.5) for each in (impl, torch.optim))
    ends = []
    for made in (mine, torchs):
        weights = tables()
        train(made(in_groups(weights), **options), weights, 3)
        ends.append(weights)
    for one, other, start in zip(*ends, tables(), strict=True):
        need_same_formula(impl, algorithm, one, other, start)
    first, second = (mine, torchs) if into == "torch" else (torchs, mine)
    weights = tables()
    optimizer = first(in_groups(weights), **options)
    train(optimizer, weights, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    if error_of(functools.partial(load_and_train, second(in_groups(weights)), saved, weights)):
        return
    for one, other, start in zip(weights, ends[1], tables(), strict=True):
        expect_same_way(one, other.detach(), start, "the weight after the load", algorithm)


def need_same_formula(impl, algorithm, seen, torchs, start):
    """Raise MissingName, so that the case is unsupported, if training differs from that of torch's class."""
    try:
        expect_same_way(seen, torchs.detach(), start, "the weight", algorithm)
    except Mismatch:
        name = f"{algorithm}.formula of torch"
        raise MissingName(f"{algorithm} has another formula than torch's", name=name) from None


@pytest.mark.clause("ALGO-074")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_saved_to_a_file(impl, algorithm):
    """A state_dict survives torch.save and torch.load with weights_only."""
    weights = tables()
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    before = snapshot(optimizer.state_dict())
    optimizer.load_state_dict(read)
    seen = optimizer.state_dict()
    expect_unchanged(before["state"], seen["state"], "the state")
    for old, new in zip(before["param_groups"], seen["param_groups"], strict=True):
        expect_unchanged(old, {name: new[name] for name in old if name in new}, "the group")


@pytest.mark.clause("ALGO-075")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_loaded_is_not_aliased(impl, algorithm):
    """Steps after a load do not modify the loaded state dict."""
    weights = tables()
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 2)
    saved = snapshot(optimizer.state_dict())
    before = snapshot(saved)
    optimizer.load_state_dict(saved)
    train(optimizer, weights, 2)
    expect_unchanged(before, saved, "the loaded dictionary")


@pytest.mark.clause("ALGO-076")
@pytest.mark.needs("{algorithm}")
@every
def test_state_dict_is_live(impl, algorithm):
    """Later steps update the tensors of an earlier state_dict."""
    weights = tables(1)
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 1)
    saved = dict(optimizer.state_dict()["state"][0])
    before = snapshot(saved)
    train(optimizer, weights, 1, seed=5)
    for name in map(documented_state(impl, algorithm, saved).own, SHAPES[algorithm]):
        expect(not same_bits(saved[name], before[name]), f"{name} updated", saved[name])


@pytest.mark.clause("ALGO-077")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
@pytest.mark.parametrize("groups", [[1], [3], [1, 1]])
def test_other_groups_are_refused(impl, algorithm, groups):
    """Loading the state of other groups raises ValueError and changes nothing."""
    weights = tables()
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 1)
    theirs = [tables(count) for count in groups]
    try:
        other = make_algorithm(impl, algorithm, [{"params": params} for params in theirs])
        train(other, [weight for params in theirs for weight in params], 1, seed=9)
    except Exception as error:
        if algorithm != OTHER or len(groups) == 1:
            raise
        why = f"{algorithm} takes no step with groups of {groups} parameters: {error}"  # see ALGO-082
        raise MissingName(why, name=f"{algorithm}.given_groups") from None
    sizes = [[len(group["params"]) for group in one.param_groups] for one in (optimizer, other)]
    if algorithm == OTHER and sizes[0] == sizes[1]:  # such as one group for each parameter
        raise MissingName(f"{algorithm} makes groups of its own", name=f"{algorithm}.given_groups")
    before = snapshot([values(weights), optimizer.state_dict()])
    expect_raises(lambda: optimizer.load_state_dict(other.state_dict()), ValueError, expected="ValueError")
    expect_unchanged(before, [values(weights), optimizer.state_dict()], "weights and state")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("ALGO-078")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@every
@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (4,), (1, 3), (5, 3), (1,)])
def test_other_shapes_are_refused(impl, algorithm, shape):
    """State of another shape, here in the last group, raises before any weight or state changes."""
    for name, right in SHAPES[algorithm].items():
        if list(shape) == right:
            continue
        weights = tables(2)
        optimizer = make_algorithm(impl, algorithm, [{"params": [weight]} for weight in weights])
        train(optimizer, weights, 1)
        saved = snapshot(optimizer.state_dict())
        name = documented_state(impl, algorithm, saved["state"][1]).own(name)
        saved["state"][1][name] = ones(tuple(shape))
        saved["param_groups"][0]["lr"] = 0.75
        start, before = values(weights), None
        rate = optimizer.param_groups[0]["lr"]
        try:
            optimizer.load_state_dict(saved)
            before = snapshot(optimizer.state_dict()["state"])
            train(optimizer, weights, 1)
        except Exception:
            expect_bits(weights[1].detach(), start[1], "the weight after the error")
            if before is None:
                expect_equal(optimizer.param_groups[0]["lr"], rate, "the learning rate after a failed load")
            continue
        moved = "same" if same_bits(before[1][name], optimizer.state_dict()["state"][1][name]) else "updated"
        raise Mismatch(f"{name} of shape {tuple(shape)} refused", f"loaded and {moved} in the next step")


@pytest.mark.clause("ALGO-079")
@pytest.mark.needs("{algorithm}")
@every
def test_other_dtypes(impl, algorithm):
    """Observe which dtype the state has after state of another dtype was loaded."""
    need_dtype(impl, algorithm, "float64")
    weights = tables(1, dtype="float64")
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 1)
    narrow = tables(1)
    other = make_algorithm(impl, algorithm, narrow)
    other.load_state_dict(optimizer.state_dict())
    state = documented_state(impl, algorithm, other.state_dict()["state"][0])
    return {name: str(state[name].dtype).removeprefix("torch.") for name in sorted(SHAPES[algorithm])}


@pytest.mark.clause("ALGO-080")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_half_a_state(impl, algorithm):
    """A parameter without loaded state starts afresh, or the load raises an error."""
    weights = tables()
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 2)
    saved = snapshot(optimizer.state_dict())
    del saved["state"][1]
    fresh = tables()
    other = make_algorithm(impl, algorithm, fresh)
    before = snapshot([values(fresh), other.state_dict()])
    try:
        other.load_state_dict(saved)
    except ValueError:
        expect_unchanged(before, [values(fresh), other.state_dict()], "weights and state")
        return
    need_independent(impl, algorithm, first=(0, 1))
    alone = tables()[1]
    single = make_algorithm(impl, algorithm, [alone])
    for weight, one in ((fresh[1], other), (alone, single)):
        set_grads([weight], seed=4)
        one.step()
    expect_same_way(fresh[1], alone, tables()[1], "the weight without state", algorithm)


@pytest.mark.clause("ALGO-081")
@pytest.mark.needs("{algorithm}")
@any_optimizer
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(impl, algorithm, how):
    """A copy continues like its original, independently of it."""
    weights = tables()
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 2)
    pair = (weights, optimizer)
    copied, other = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train(optimizer, weights, 2, seed=7)
    middle = values(weights)
    train(other, copied, 2, seed=7)
    for index in range(2):
        expect_bits(weights[index].detach(), middle[index], f"weight {index} of the original")
        expect_bits(copied[index].detach(), middle[index], f"weight {index} of the copy")
