"""Keyed optimizers: loading state in place, completely or not at all."""

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
from keyedopt.conformance.suite.support.device import full, ones, tensor, zeros
from keyedopt.conformance.suite.support.inputs import adam, parameters, train, values


def keyed(impl, entries):
    """Make an optimizer with the given state, one entry per parameter, and no groups."""
    params = parameters(len(entries))
    state = dict(zip(params.values(), entries, strict=True))
    return impl.KeyedOptimizer(params, state, [])


def refuses(optimizer, state_dict, *kinds, mentions=(), expected="a refusal"):
    """Expect a load to raise and to leave all state unchanged, bit by bit."""
    before = snapshot(optimizer.state_dict())
    expect_raises(lambda: optimizer.load_state_dict(state_dict), *kinds, mentions=mentions, expected=expected)
    expect_unchanged(before, optimizer.state_dict(), "state after a failed load")


@pytest.mark.clause("KEYED-021")
def test_tensors_are_loaded_in_place(impl, dtype):
    """Loading fills the live tensors, which keep their identity, dtype and memory."""
    old_params, params = parameters(2, dtype=dtype), parameters(2, dtype=dtype)
    old, new = adam(impl, old_params), adam(impl, params)
    train(old, old_params, 3)
    train(new, params, 1, seed=7)
    live = {key: new.state[param]["exp_avg"] for key, param in params.items()}
    memory = {key: tensor.data_ptr() for key, tensor in live.items()}
    new.load_state_dict(snapshot(old.state_dict()))
    for key, old_tensor in live.items():
        now = new.state[params[key]]["exp_avg"]
        expect(now is old_tensor, f"the same tensor for {key}", "another tensor")
        expect_equal(now.data_ptr(), memory[key], f"memory of {key}")
        expect_bits(now, old.state[old_params[key]]["exp_avg"], f"state of {key}")


@pytest.mark.clause("KEYED-022")
@pytest.mark.parametrize("algorithm", ["sgd", "adam", "adagrad", "rmsprop"])
def test_training_goes_on_from_a_checkpoint(impl, algorithm, dtype):
    """Five steps, a checkpoint and five more equal ten steps, bit by bit."""
    make = {
        "sgd": lambda listed: torch.optim.SGD(listed, lr=0.1, momentum=0.9),
        "adam": lambda listed: torch.optim.Adam(listed, lr=0.1),
        "adagrad": lambda listed: torch.optim.Adagrad(listed, lr=0.1),
        "rmsprop": lambda listed: torch.optim.RMSprop(listed, lr=0.1),
    }[algorithm]
    params = parameters(2, dtype=dtype)
    old = impl.KeyedOptimizerWrapper(params, make)
    train(old, params, 5)
    saved = snapshot(old.state_dict())
    resumed = {key: torch.nn.Parameter(param.detach().clone()) for key, param in params.items()}
    new = impl.KeyedOptimizerWrapper(resumed, make)
    at = values(resumed)
    train(new, resumed, 1)
    with torch.no_grad():
        for param, value in zip(resumed.values(), at, strict=True):
            param.copy_(value)
    new.load_state_dict(saved)
    train(old, params, 5, seed=20)
    train(new, resumed, 5, seed=20)
    for key, param in params.items():
        expect_bits(resumed[key], param, f"{key} after ten steps")


@pytest.mark.clause("KEYED-023")
@pytest.mark.parametrize("which", ["all", "one"])
def test_an_empty_state_is_not_loaded_into_an_initialized_optimizer(impl, which):
    """Loading empty state into initialized state raises."""
    optimizer = keyed(impl, [{"moment": ones(3)}, {"moment": ones(3)}])
    loaded = {} if which == "all" else {"p0": {"moment": zeros(3)}}
    refuses(optimizer, {"state": loaded}, ValueError, expected="a ValueError for missing state")


@pytest.mark.clause("KEYED-023")
def test_state_is_not_loaded_into_an_optimizer_that_has_none(impl):
    """Loading state into an uninitialized optimizer raises."""
    params, others = parameters(2), parameters(2)
    old, new = adam(impl, params), adam(impl, others)
    train(old, params, 1)
    expect_raises(
        lambda: new.load_state_dict(old.state_dict()),
        ValueError,
        expected="a ValueError: there is no state to fill yet",
    )
    expect_equal(len(new.state), 0, "entries of state after a failed load")


@pytest.mark.clause("KEYED-023")
def test_the_empty_entry_of_a_parameter_is_refused(impl):
    """Loading an empty entry for a parameter raises, like missing state."""
    optimizer = keyed(impl, [{"moment": ones(3)}])
    refuses(optimizer, {"state": {"p0": {}}}, ValueError, expected="a ValueError for an empty entry")


@pytest.mark.clause("KEYED-024")
def test_state_that_was_filled_in_place_can_be_loaded(impl):
    """Writing into a state dict's tensors and loading it works."""
    params = parameters(2)
    optimizer = adam(impl, params)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    for number, key in enumerate(params):
        saved["state"][key]["exp_avg"].fill_(number + 2.0)
    optimizer.load_state_dict(saved)
    for number, param in enumerate(params.values()):
        live = optimizer.state[param]["exp_avg"]
        expect_bits(live, torch.full((3,), number + 2.0), f"state of p{number}")


@pytest.mark.clause("KEYED-024")
@pytest.mark.plain_only("its optimizer has no groups")
def test_parameters_with_and_without_state(impl):
    """A load fills state after parameters that have none, or an empty one."""
    params, moment = parameters(3), ones(3)
    optimizer = impl.KeyedOptimizer(params, {params["p1"]: {}, params["p2"]: {"moment": moment}}, [])
    saved = snapshot(optimizer.state_dict())
    saved["state"]["p2"]["moment"].fill_(2.0)
    optimizer.load_state_dict(saved)
    expect_bits(moment, torch.full((3,), 2.0), "the state of the last parameter")


@pytest.mark.clause("KEYED-022")
@pytest.mark.needs("KeyedOptimizerWrapper", "SGD")
def test_a_checkpoint_of_sgd_before_its_first_step(impl):
    """A checkpoint of a trained SGD without momentum, which has no state, loads into a new optimizer."""
    params = parameters(2)
    old, new = (impl.KeyedOptimizerWrapper(params, lambda given: impl.SGD(given, lr=0.1)) for _ in range(2))
    train(old, params, 2)
    if any(old.state.values()):  # this SGD has state
        new.init_state()
    new.load_state_dict(snapshot(old.state_dict()))
    expect_unchanged(snapshot(old.state_dict()), new.state_dict(), "what is saved then")


@pytest.mark.clause("KEYED-025")
@pytest.mark.parametrize(("live", "given"), [([2, 3], [1]), ([2, 3], [3]), ([2, 3], [1, 3]), ([3], [])])
def test_loading_never_broadcasts(impl, live, given):
    """Loading a state tensor of another shape raises an error and writes nothing."""
    optimizer = keyed(impl, [{"moment": ones(live)}])
    wrong = {"state": {"p0": {"moment": full(given, 5.0)}}}
    refuses(
        optimizer,
        wrong,
        ValueError,
        RuntimeError,
        expected=f"a refusal of shape {given} over shape {live}",
    )


@pytest.mark.clause("KEYED-025")
def test_as_many_elements_in_another_shape_are_refused(impl):
    """A tensor of another shape raises even with as many elements."""
    optimizer = keyed(impl, [{"moment": ones(2, 3)}])
    refuses(
        optimizer,
        {"state": {"p0": {"moment": zeros(3, 2)}}},
        ValueError,
        RuntimeError,
        expected="a refusal of shape (3, 2) over shape (2, 3)",
    )


@pytest.mark.clause("KEYED-026")
@pytest.mark.parametrize("fault", ["shape", "missing key", "size", "kind"])
def test_a_refused_load_changes_nothing(impl, fault):
    """If the second parameter does not fit, the first one is not written either."""
    optimizer = keyed(impl, [{"m": ones(3), "n": 1}, {"m": ones(3), "n": 2}])
    broken = {
        "shape": {"m": zeros(4), "n": 8},
        "missing key": {"m": zeros(3), "other": 8},
        "size": {"m": zeros(3)},
        "kind": {"m": "zeros", "n": 8},
    }[fault]
    refuses(
        optimizer,
        {"state": {"p0": {"m": zeros(3), "n": 9}, "p1": broken}},
        Exception,
        expected=f"a refusal ({fault})",
    )


@pytest.mark.clause("KEYED-026")
def test_an_unknown_parameter_changes_nothing(impl):
    """If one parameter has another name, the other parameters do not change."""
    optimizer = keyed(impl, [{"m": ones(3)}, {"m": ones(3)}])
    wrong = {"m": zeros(3)}
    refuses(
        optimizer,
        {"state": {"p0": wrong, "other": wrong}},
        ValueError,
        mentions=["p1"],
        expected="a ValueError that names p1",
    )


@pytest.mark.clause("KEYED-027")
@pytest.mark.parametrize("deep", [False, True])
def test_keys_that_the_optimizer_does_not_have_are_refused(impl, deep):
    """Entries that the optimizer lacks raise, at every depth."""
    entry = {"deep": {"m": ones(3)}, "n": 1}
    given = {"deep": {"m": zeros(3)}, "n": 2}
    (given["deep"] if deep else given)["extra"] = zeros(3)
    refuses(
        keyed(impl, [entry]),
        {"state": {"p0": given}},
        ValueError,
        KeyError,
        expected="a refusal of state that would be dropped",
    )


@pytest.mark.clause("KEYED-028")
@pytest.mark.parametrize("live", ["tensor", "mapping", "number"])
@pytest.mark.parametrize("given", ["tensor", "mapping", "number", "text", "none"])
def test_only_like_is_loaded_over_like(impl, live, given):
    """A tensor, a mapping and a number are only replaced by the same kind of value."""
    if live == given:
        return
    made = {
        "tensor": ones(3),
        "mapping": {"m": ones(3)},
        "number": 1.0,
        "text": "m",
        "none": None,
    }
    optimizer = keyed(impl, [{"value": snapshot(made[live])}])
    refuses(
        optimizer,
        {"state": {"p0": {"value": made[given]}}},
        Exception,
        expected=f"a refusal of {given} over {live}",
    )


@pytest.mark.clause("KEYED-029")
@pytest.mark.parametrize(("live", "given"), [(1.5, 2), (3, 2.0), (0, True), (False, 1), (2.0, 4.0)])
def test_numbers_interchange(impl, live, given):
    """Loading accepts an int over a float, a bool over an int, and so on, and takes the value."""
    optimizer = keyed(impl, [{"n": live, "deep": {"n": live}}])
    optimizer.load_state_dict({"state": {"p0": {"n": given, "deep": {"n": given}}}})
    saved = optimizer.state_dict()["state"]["p0"]
    expect_equal((saved["n"], saved["deep"]["n"]), (given, given), "the numbers")


@pytest.mark.clause("KEYED-029")
@pytest.mark.parametrize("kind", ["int64", "float32", "float64"])
def test_scalars_of_numpy(impl, kind):
    """A scalar of NumPy is a number, in state and in groups."""
    given, params = torch.tensor(5, dtype=getattr(torch, kind)).numpy()[()], parameters(1)
    optimizer = impl.KeyedOptimizer(
        params, {params["p0"]: {"n": 2.0}}, [{"params": [params["p0"]], "lr": 1.5}]
    )
    optimizer.save_param_groups(True)
    saved = {"state": {"p0": {"n": given}}, "param_groups": [{"params": ["p0"], "lr": given}]}
    optimizer.load_state_dict(saved)
    expect_equal(float(optimizer.state[params["p0"]]["n"]), float(given), "the number in the state")
    expect_equal(float(next(iter(optimizer.param_groups))["lr"]), float(given), "the number in the group")


@pytest.mark.clause("KEYED-030")
@pytest.mark.parametrize(("live", "given"), [(1.5, 2), (3, 2.0), (0, True)])
def test_type_of_a_loaded_number(impl, live, given):
    """Observe the type of a number after a number of another type was loaded."""
    optimizer = keyed(impl, [{"n": live}])
    optimizer.load_state_dict({"state": {"p0": {"n": given}}})
    return type(optimizer.state_dict()["state"]["p0"]["n"]).__name__


@pytest.mark.clause("KEYED-031")
@pytest.mark.parametrize(
    ("live", "given"),
    [("float64", "float32"), ("float16", "float32"), ("bfloat16", "float32"), ("float32", "int64")],
)
def test_state_of_another_dtype(impl, live, given):
    """Observe whether a checkpoint in another dtype is converted in place, or raises an error."""
    optimizer = keyed(impl, [{"m": zeros(2, dtype=getattr(torch, live))}])
    loaded = tensor([1, 3], dtype=getattr(torch, given))

    def load():
        optimizer.load_state_dict({"state": {"p0": {"m": loaded}}})
        return optimizer.state_dict()["state"]["p0"]["m"]

    return outcome(load)


@pytest.mark.clause("KEYED-032")
@pytest.mark.parametrize(
    ("live", "given", "values_given"),
    [
        ("int64", "float32", [0.5, 1.75]),
        ("int8", "float32", [300.0, 1.0]),
        ("bool", "float32", [0.25, 2.0]),
        ("int32", "float64", [float("nan"), 1.0]),
        ("uint8", "int64", [-1, 1]),
        ("float16", "float32", [1e6, 1.0]),
    ],
)
def test_values_that_the_live_dtype_cannot_hold_are_refused(impl, live, given, values_given):
    """Values that the live dtype cannot represent raise an error."""
    optimizer = keyed(impl, [{"m": zeros(2, dtype=getattr(torch, live))}])
    loaded = tensor(values_given, dtype=getattr(torch, given))
    refuses(
        optimizer,
        {"state": {"p0": {"m": loaded}}},
        Exception,
        expected=f"a refusal of {values_given} in {live} state",
    )


@pytest.mark.clause("KEYED-032")
@pytest.mark.filterwarnings("ignore")
def test_complex_state_is_not_cut_to_its_real_part(impl):
    """Loading complex numbers over real state raises an error."""
    optimizer = keyed(impl, [{"m": zeros(2)}])
    loaded = tensor([1 + 2j, 3 - 1j])
    refuses(
        optimizer,
        {"state": {"p0": {"m": loaded}}},
        Exception,
        expected="a refusal of complex values in real state",
    )


@pytest.mark.clause("KEYED-033")
def test_a_state_dict_with_swapped_keys_loads_what_it_held(impl):
    """Loading a live state dict with swapped entries swaps state."""
    optimizer = keyed(impl, [{"m": full((3,), 1.0)}, {"m": full((3,), 2.0)}])
    saved = optimizer.state_dict()
    saved["state"]["p0"], saved["state"]["p1"] = saved["state"]["p1"], saved["state"]["p0"]
    optimizer.load_state_dict(saved)
    loaded = optimizer.state_dict()["state"]
    expect_bits(loaded["p0"]["m"], torch.full((3,), 2.0), "state of p0, which was that of p1")
    expect_bits(loaded["p1"]["m"], torch.full((3,), 1.0), "state of p1, which was that of p0")


@pytest.mark.clause("KEYED-034")
def test_what_was_loaded_is_not_shared(impl):
    """Changing a checkpoint after a load does not affect the optimizer, nor the reverse."""
    optimizer = keyed(impl, [{"m": ones(3), "hist": [1, 2], "n": 1.0}])
    given = {"m": zeros(3), "hist": [3, 4], "n": 2.0}
    optimizer.load_state_dict({"state": {"p0": given}})
    given["m"].fill_(9.0)
    given["hist"].append(5)
    loaded = optimizer.state_dict()["state"]["p0"]
    expect_bits(loaded["m"], torch.zeros(3), "the loaded tensor")
    expect_equal(loaded["hist"], [3, 4], "the loaded list")
    loaded["m"].fill_(1.0)
    expect_bits(given["m"], torch.full((3,), 9.0), "the checkpoint")


@pytest.mark.clause("KEYED-035")
@pytest.mark.parametrize("given", ["none", "list", "no state", "state is a list", "entry is a list"])
def test_what_is_no_state_dict_is_refused(impl, given):
    """Loading an object that is not a state dict raises and changes nothing."""
    wrong = {
        "none": None,
        "list": [1],
        "no state": {"param_groups": []},
        "state is a list": {"state": [1]},
        "entry is a list": {"state": {"p0": [zeros(3)]}},
    }[given]
    optimizer = keyed(impl, [{"m": ones(3)}])
    refuses(optimizer, wrong, Exception, expected=f"an error ({given})")


@pytest.mark.clause("KEYED-036")
@pytest.mark.parametrize("fault", ["shape", "missing key", "nested key", "kind", "no state"])
def test_a_refusal_is_a_value_error_that_says_where(impl, fault):
    """A rejected load raises a ValueError with the parameter and the key."""
    entry = {"m": ones(3), "deep": {"n": ones(2)}}
    given = {
        "shape": {"m": zeros(4), "deep": {"n": zeros(2)}},
        "missing key": {"other": zeros(3), "deep": {"n": zeros(2)}},
        "nested key": {"m": zeros(3), "deep": {"other": zeros(2)}},
        "kind": {"m": 1.0, "deep": {"n": zeros(2)}},
        "no state": None,
    }[fault]
    names = {
        "shape": ["p0", "m"],
        "missing key": ["p0", "m"],
        "nested key": ["p0", "deep", "n"],
        "kind": ["p0", "m"],
        "no state": ["state"],
    }[fault]
    optimizer = keyed(impl, [entry])
    expect_raises(
        lambda: optimizer.load_state_dict({} if given is None else {"state": {"p0": given}}),
        ValueError,
        mentions=names,
        expected=f"a ValueError that names {names}",
    )


@pytest.mark.clause("KEYED-037")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "Different parameter count: 2 vs 0"),
        ({"p0": {"a": 0, "b": 0}}, "Different parameter count: 2 vs 1"),
        ({"p0": {"a": 0, "b": 0}, "x": {"a": 0, "b": 0}}, "Parameter p1 not found"),
        ({"p0": {"a": 0, "b": 0}, "p1": {"a": 0}}, "Different state size: 2 vs 1"),
    ],
)
def test_texts_of_refusals(impl, given, text):
    """Errors for a wrong number of entries contain the texts of the published library."""
    optimizer = keyed(impl, [{"a": 1, "b": 2}, {"a": 1, "b": 2}])
    expect_raises(
        lambda: optimizer.load_state_dict({"state": given}),
        ValueError,
        mentions=[text],
        expected=f"a ValueError with {text!r}",
    )
