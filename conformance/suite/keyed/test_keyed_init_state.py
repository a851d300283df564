"""Keyed optimizers: `init_state` creates state and is otherwise invisible."""

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import ACCUMULATING, make_accumulating
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import ones, tensor, zeros
from keyedopt.conformance.suite.support.doubles import Stateful
from keyedopt.conformance.suite.support.inputs import (
    adagrad,
    adam,
    parameter,
    parameters,
    set_grads,
    sgd,
    train,
    values,
)


def algorithm(impl, name, params, **options):
    """Make one of the optimizers whose training must not depend on init_state."""
    make = {"sgd": sgd, "adam": adam, "adagrad": adagrad}[name]
    if name == "sgd":
        options = {"momentum": 0.9, **options}
    return make(impl, params, **options)


@pytest.mark.clause("KEYED-072")
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_state_is_there_and_complete(impl, name, dtype):
    """After init_state the state has the keys and shapes that a real step gives it."""
    params, others = parameters(2, dtype=dtype), parameters(2, dtype=dtype)
    fresh, trained = algorithm(impl, name, params), algorithm(impl, name, others)
    fresh.init_state()
    train(trained, others, 1)
    made, wanted = fresh.state_dict()["state"], trained.state_dict()["state"]
    expect_equal(sorted(made), sorted(wanted), "keys of the parameters with state")
    for key, entry in wanted.items():
        described = {name: (tuple(value.shape), str(value.dtype)) for name, value in entry.items()}
        seen = {name: (tuple(value.shape), str(value.dtype)) for name, value in made[key].items()}
        expect_equal(seen, described, f"state of {key}")


@pytest.mark.clause("KEYED-073")
def test_a_checkpoint_can_be_loaded_after_it(impl):
    """A fresh optimizer loads a checkpoint in place after init_state."""
    params, others = parameters(2), parameters(2)
    old, new = adam(impl, params), adam(impl, others)
    train(old, params, 3)
    new.init_state()
    new.load_state_dict(snapshot(old.state_dict()))
    for key, param in params.items():
        expect_bits(new.state[others[key]]["exp_avg"], old.state[param]["exp_avg"], f"state of {key}")
        expect_bits(
            torch.as_tensor(new.state[others[key]]["step"]),
            torch.as_tensor(old.state[param]["step"]),
            f"step count of {key}",
        )


@pytest.mark.clause("KEYED-074")
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_parameters_do_not_change(impl, name, decay, dtype):
    """Parameters are bit-identical after init_state, with weight decay too."""
    params = parameters(2, dtype=dtype)
    optimizer = algorithm(impl, name, params, weight_decay=decay)
    before = values(params)
    optimizer.init_state()
    for key, value in zip(params, before, strict=True):
        expect_bits(params[key], value, f"{key} after init_state")


@pytest.mark.clause("KEYED-074")
def test_decoupled_decay_does_not_change_parameters(impl):
    """init_state does not apply AdamW's decay, which needs no gradient."""
    params = parameters(1)
    optimizer = impl.KeyedOptimizerWrapper(
        params, lambda listed: torch.optim.AdamW(listed, lr=0.1, weight_decay=0.5)
    )
    before = values(params)
    optimizer.init_state()
    expect_bits(params["p0"], before[0], "the parameter after init_state")


@pytest.mark.clause("KEYED-074")
@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_zero_by_zero_does_not_reach_parameters(impl, name):
    """With eps = 0, where a zero gradient gives 0/0, parameters do not change."""
    params = parameters(1)
    optimizer = impl.KeyedOptimizerWrapper(
        params, lambda listed: getattr(torch.optim, name)(listed, lr=0.1, eps=0.0)
    )
    before = values(params)
    optimizer.init_state()
    expect_bits(params["p0"], before[0], "the parameter after init_state")


@pytest.mark.clause("KEYED-075")
@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_training_is_the_same_with_and_without_it(impl, name, decay):
    """Ten steps after init_state equal ten steps without it."""
    params, others = parameters(2), parameters(2)
    options = {"lr_decay": 0.1} if name == "adagrad" else {}
    plain = algorithm(impl, name, params, weight_decay=decay, **options)
    made = algorithm(impl, name, others, weight_decay=decay, **options)
    made.init_state()
    train(plain, params, 10)
    train(made, others, 10)
    for key, param in params.items():
        expect_close(others[key], param, f"{key} after ten steps", ulps=4)


@pytest.mark.clause("KEYED-075")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_windows_start_with_nothing(impl, kind):
    """A window of accumulation that init_state creates contains no micro-batch."""
    params, others = {"p0": parameter(4, 2)}, {"p0": parameter(4, 2)}
    made, plain = (
        impl.KeyedOptimizerWrapper(each, lambda listed: make_accumulating(impl, kind, listed, 3))
        for each in (params, others)
    )
    made.init_state()
    for _ in range(4):
        for each, optimizer in ((params, made), (others, plain)):
            set_grads(each)
            optimizer.step()
        expect_bits(params["p0"].detach(), others["p0"].detach(), "the parameter after init_state")


@pytest.mark.clause("KEYED-076")
@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_step_counts_start_at_nothing(impl, kind):
    """init_state leaves the step count at zero."""
    params = {"p0": parameter(4, 2)}
    if kind == "tensor":
        optimizer = adam(impl, params)
        optimizer.init_state()
    else:
        optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: torch.optim.SparseAdam(listed, lr=0.1))
        optimizer.init_state({"p0"})
    count = optimizer.state[params["p0"]]["step"]
    expect_equal(float(count), 0.0, "steps that were counted")


@pytest.mark.clause("KEYED-076")
def test_step_counts_anywhere_start_at_nothing(impl):
    """The step count is zero wherever it is: after other state, or in a mapping."""

    class Counting(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param].update(
                        moment=torch.zeros_like(param),
                        step=ones(()),
                        inner={"moment": torch.zeros_like(param), "step": ones(())},
                    )

    params = parameters(2)
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: Counting(listed, {}))
    optimizer.init_state()
    for key, entry in optimizer.state_dict()["state"].items():
        counts = float(entry["step"]), float(entry["inner"]["step"])
        expect_equal(counts, (0.0, 0.0), f"steps that were counted for {key}")


@pytest.mark.clause("KEYED-077")
def test_state_that_is_there_stays(impl):
    """init_state does not change the state of an optimizer that has trained already."""
    params = parameters(2)
    optimizer = adam(impl, params, weight_decay=0.1)
    train(optimizer, params, 3)
    before, at = snapshot(optimizer.state_dict()), values(params)
    optimizer.init_state()
    expect_unchanged(before, optimizer.state_dict(), "state after init_state")
    expect_unchanged(at, values(params), "parameters after init_state")


@pytest.mark.clause("KEYED-077")
def test_the_rest_is_made_beside_state_that_is_there(impl):
    """If only some parameters have trained, the others get new state."""
    params = parameters(2)
    optimizer = adam(impl, params)
    set_grads({"p0": params["p0"]})
    optimizer.step()
    before = snapshot(optimizer.state_dict()["state"]["p0"])
    optimizer.init_state()
    saved = optimizer.state_dict()["state"]
    expect_equal(sorted(saved), ["p0", "p1"], "keys of the state")
    expect_unchanged(before, saved["p0"], "state of p0")
    expect_bits(saved["p1"]["exp_avg"], torch.zeros(3), "the new moment of p1")


@pytest.mark.clause("KEYED-077")
@pytest.mark.parametrize("trained", [["p0"], ["p1"], ["p0", "p1"]])
def test_objects_that_are_there_stay(impl, trained):
    """Stateful objects in existing state, also in a mapping, keep their state."""

    class Averaging(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    entry = self.state[param]
                    if not entry:
                        entry.update(object=Stateful(zeros(2)), inner={"object": Stateful(zeros(2))})
                    for each in (entry["object"], entry["inner"]["object"]):
                        each.tensor.add_(1)

    params = parameters(2)
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: Averaging(listed, {}))
    set_grads({key: params[key] for key in trained})
    optimizer.step()
    entries = {key: optimizer.state[params[key]] for key in trained}
    there = {key: (entry["object"], entry["inner"]["object"]) for key, entry in entries.items()}
    before = {key: snapshot([each.tensor for each in objects]) for key, objects in there.items()}
    optimizer.init_state()
    for key, objects in there.items():
        entry = optimizer.state[params[key]]
        now = (entry["object"], entry["inner"]["object"])
        same = all(one is other for one, other in zip(now, objects, strict=True))
        expect(same, f"the same objects in the state of {key}", now)
        expect_unchanged(before[key], [each.tensor for each in now], f"objects in the state of {key}")
    expect_equal(sorted(optimizer.state_dict()["state"]), ["p0", "p1"], "keys of the state")


@pytest.mark.clause("KEYED-078")
def test_new_moments_are_zero(impl):
    """Weight decay does not affect the moments that init_state creates, in any group."""
    params = parameters(1)
    for name, key in (("adam", "exp_avg"), ("adam", "exp_avg_sq"), ("sgd", "momentum_buffer")):
        optimizer = algorithm(impl, name, params, weight_decay=0.5)
        optimizer.init_state()
        moment = optimizer.state[params["p0"]][key]
        expect(not moment.any(), f"{key} of {name} all zero", moment)
    several = parameters(2)
    optimizer = impl.KeyedOptimizerWrapper(
        several,
        lambda listed: torch.optim.Adam([{"params": [param]} for param in listed], weight_decay=0.5),
    )
    optimizer.init_state()
    for key, param in several.items():
        moment = optimizer.state[param]["exp_avg"]
        expect(not moment.any(), f"exp_avg of {key} all zero", moment)


@pytest.mark.clause("KEYED-078")
@pytest.mark.needs("Ftrl", "Ftrl.l2_shrinkage")
def test_new_sums_of_ftrl(impl):
    """The shrinkage of Ftrl does not affect the sums that init_state creates."""
    made = []
    for shrinkage in (0.0, 0.5):
        params = parameters(1)
        optimizer = impl.KeyedOptimizerWrapper(
            params, lambda listed, given=shrinkage: impl.Ftrl(listed, lr=0.1, l2_shrinkage=given)
        )
        optimizer.init_state()
        made.append(snapshot(optimizer.state_dict()["state"]))
    expect_unchanged(*made, "state, with shrinkage and without")


@pytest.mark.clause("KEYED-079")
def test_gradients_are_zero_and_sparse_where_named(impl, dtype):
    """Each parameter gets its own zero gradient, sparse for the given names."""
    number = getattr(torch, dtype)
    params = {name: parameter(4, 2, dtype=dtype) for name in ("dense", "sparse", "other")}
    optimizer = sgd(impl, params)
    optimizer.init_state({"sparse"})
    dense, sparse = params["dense"].grad, params["sparse"].grad
    expect(dense is not None and sparse is not None, "gradients", (dense, sparse))
    expect_bits(dense, torch.zeros(4, 2, dtype=number), "the dense gradient")
    expect(sparse.is_sparse, "a sparse gradient", sparse.layout)
    expect_bits(sparse.to_dense(), torch.zeros(4, 2, dtype=number), "the sparse gradient")
    dense.add_(1)
    expect_bits(params["other"].grad, torch.zeros(4, 2, dtype=number), "the gradient of another parameter")


@pytest.mark.clause("KEYED-079")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "Adam"])
def test_sparse_gradients_of_each_shape(impl, algorithm):
    """An optimizer that trains rows takes the sparse zero gradient of a parameter of any shape."""
    params = {"p0": parameter(4, 2), "p1": parameter(3), "p2": parameter(2, 2, 2)}
    optimizer = impl.KeyedOptimizerWrapper(params, lambda given: getattr(impl, algorithm)(given, lr=0.1))
    optimizer.init_state(set(params))
    for key, param in params.items():
        expect(param.grad.is_sparse, f"a sparse gradient of {key}", param.grad.layout)


@pytest.mark.clause("KEYED-079")
def test_gradients_from_before_play_no_part(impl):
    """An existing gradient is replaced by zeros and not trained on."""
    params = parameters(1)
    optimizer = sgd(impl, params, momentum=0.9)
    set_grads(params)
    before = values(params)
    optimizer.init_state()
    expect_bits(params["p0"], before[0], "the parameter")
    expect(not params["p0"].grad.any(), "a zero gradient", params["p0"].grad)
    moment = optimizer.state[params["p0"]]["momentum_buffer"]
    expect(not moment.any(), "a zero moment", moment)


@pytest.mark.clause("KEYED-080")
def test_frozen_parameters_get_no_gradient(impl):
    """A parameter that requires no gradient gets neither gradient nor state."""
    params = parameters(2)
    params["p1"].requires_grad_(False)
    optimizer = adam(impl, params)
    optimizer.init_state()
    expect(params["p1"].grad is None, "no gradient of the frozen parameter", params["p1"].grad)
    expect_equal(list(optimizer.state_dict()["state"]), ["p0"], "keys of the state")


@pytest.mark.clause("KEYED-081")
def test_names_that_are_not_here_are_no_error(impl):
    """Sparse names of parameters that this rank does not have are ignored."""
    params = parameters(1)
    optimizer = adam(impl, params)
    optimizer.init_state({"elsewhere"})
    expect_equal(list(optimizer.state_dict()["state"]), ["p0"], "keys of the state")
    expect(not params["p0"].grad.is_sparse, "a dense gradient", params["p0"].grad.layout)


@pytest.mark.clause("KEYED-082")
def test_options_of_groups_stay(impl):
    """Learning rates, decay and all other group options do not change."""
    params = parameters(1)
    optimizer = adam(impl, params, weight_decay=0.5, lr=tensor(0.25))
    rate = optimizer.param_groups[0]["lr"]
    before = snapshot({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
    optimizer.init_state()
    after = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    expect_unchanged(before, after, "options of the group")
    expect(optimizer.param_groups[0]["lr"] is rate, "the same tensor for the learning rate", "another")


@pytest.mark.clause("KEYED-082")
def test_an_option_that_a_step_changes(impl):
    """Tensors among the options that each step changes keep their values and identity."""

    class Decaying(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                group["lr"].mul_(0.5)
                group["temperature"].mul_(0.5)

    params = parameters(1)
    kept = {"lr": tensor(0.25), "temperature": tensor([1.0, 2.0])}
    optimizer = impl.KeyedOptimizerWrapper(
        params, lambda listed: Decaying([{"params": listed, **kept}], momentum=0.9)
    )
    optimizer.init_state()
    for name, wanted in (("lr", 0.25), ("temperature", [1.0, 2.0])):
        group = optimizer.param_groups[0]
        expect(group[name] is kept[name], f"the same tensor for {name}", "another")
        expect_equal(group[name].tolist(), wanted, f"{name} after init_state")


@pytest.mark.clause("KEYED-083")
def test_a_step_that_requires_its_argument(impl):
    """init_state works if step has no default for its closure argument."""

    class Strict(impl.KeyedOptimizer):
        def step(self, closure):
            for param in self.params.values():
                self.state[param]["m"] = torch.zeros_like(param)

    params = parameters(2)
    state = {param: {} for param in params.values()}
    optimizer = Strict(params, state, [{"params": list(params.values())}])
    optimizer.init_state()
    expect_equal([sorted(entry) for entry in state.values()], [["m"], ["m"]], "keys of the state")


@pytest.mark.clause("KEYED-074")
@pytest.mark.parametrize("special", ["nan", "inf", "-0.0"])
def test_non_finite_parameters_do_not_change(impl, special):
    """init_state keeps NaN, infinities and signed zeros, and out of moments."""
    param = torch.nn.Parameter(tensor([1.0, float(special), -2.0]))
    optimizer = adam(impl, {"p0": param}, weight_decay=0.1)
    before = param.detach().clone()
    optimizer.init_state()
    expect_bits(param, before, "the parameter after init_state")
    expect(not optimizer.state[param]["exp_avg"].any(), "zero moments", optimizer.state[param]["exp_avg"])


@pytest.mark.clause("KEYED-084")
@pytest.mark.parametrize("name", ["NAdam", "RMSprop", "Adamax", "ASGD", "Rprop", "damped SGD"])
def test_other_algorithms(impl, name):
    """Observe for further algorithms whether training is equal with and without init_state."""

    def make(listed):
        if name == "damped SGD":
            return torch.optim.SGD(listed, lr=0.1, momentum=0.9, dampening=0.5)
        return getattr(torch.optim, name)(listed, lr=0.1)

    def run():
        params, others = parameters(1), parameters(1)
        plain, made = impl.KeyedOptimizerWrapper(params, make), impl.KeyedOptimizerWrapper(others, make)
        made.init_state()
        train(plain, params, 5)
        train(made, others, 5)
        return bool(torch.allclose(params["p0"], others["p0"], rtol=1e-5, atol=0))

    return outcome(run)
