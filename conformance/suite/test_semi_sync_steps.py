"""Local steps, and a global one every so often: when, on what, and what counts as a step."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support import (
    Outer,
    Recorder,
    adam,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    parameter,
    parameters,
    semisync,
    set_grads,
    sgd,
    single_rank,
    snapshot,
    train,
    values,
)


class Failing(torch.optim.SGD):
    """An optimizer that can be told to fail."""

    fail = False

    def step(self, closure: Any = None) -> Any:
        """Step, or fail before anything has changed."""
        if self.fail:
            raise RuntimeError("out of memory")
        return super().step(closure)


class Told(torch.optim.SGD):
    """An optimizer that notes what it is told besides stepping."""

    told: Any = None

    def set_optimizer_step(self, step: int) -> None:
        """Note a step count."""
        self.told = [*(self.told or []), step]

    def update_hyper_parameters(self, params_dict: Any) -> None:
        """Note hyper-parameters."""
        self.told = [*(self.told or []), params_dict]

    def global_step(self, count: Any, closure: Any = None) -> None:
        """Nothing."""


def alone(impl: Any, params: Any, steps: int, every: int = 3, seed: int = 1, **outer_options: Any) -> None:
    """Train with the two optimizers by hand, without what is to be tested."""
    local, outer = adam(impl, params), Outer([*params.values()], **outer_options)
    for step in range(steps):
        set_grads(params, seed=seed + step)
        local.step()
        if (step + 1) % every == 0:
            outer.zero_grad()
            outer.global_step(torch.tensor(step + 1))


# --- what it takes --------------------------------------------------------------------------------


@pytest.mark.clause("SEMI-001")
@pytest.mark.parametrize("how", ["list", "generator", "groups"])
def test_it_is_a_keyed_optimizer(impl, how):
    """It is made of parameters or groups and two keyed optimizers, and has 16 local steps to a global one."""
    params = parameters()
    given: Any = {
        "list": [*params.values()],
        "generator": (param for param in params.values()),
        "groups": [{"params": [param]} for param in params.values()],
    }[how]
    made: list[Outer] = []

    def factory(listed: Any) -> Outer:
        made.append(Outer(listed))
        return made[0]

    local, outer = adam(impl, params), impl.KeyedOptimizerWrapper(params, factory)
    optimizer = impl.SemisyncOptimizer(global_params=given, optimizer=local, global_optimizer=outer)
    expect(isinstance(optimizer, impl.KeyedOptimizer), "a KeyedOptimizer", type(optimizer).__mro__)
    expect(isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer", type(optimizer).__mro__)
    train(optimizer, params, 33)
    expect_equal(made[0].counts, [16, 32], "local steps at each global step")


@pytest.mark.clause("SEMI-002")
@pytest.mark.parametrize("every", [0, -2, 2.5, "nan", None, "4"])
def test_wrong_number_of_local_steps(impl, every):
    """What is no whole number above 0 is refused with an error, at the latest by the first step."""
    params = parameters()
    number = math.nan if every == "nan" else every

    def use() -> None:
        train(semisync(impl, params, every=number)[0], params, 1)

    expect_raises(use, ValueError, TypeError, AssertionError, ZeroDivisionError, expected="an error")


@pytest.mark.clause("SEMI-003")
@pytest.mark.parametrize("which", ["local", "global"])
def test_optimizer_without_keys(impl, which):
    """A plain torch optimizer in place of a keyed one is refused, at the latest when it is to be saved."""
    params = parameters()
    listed = [*params.values()]
    local: Any = adam(impl, params)
    outer: Any = impl.KeyedOptimizerWrapper(params, Outer)
    if which == "local":
        local = torch.optim.Adam(listed)
    else:
        outer = Outer(listed)
    expect_raises(
        lambda: impl.SemisyncOptimizer(listed, local, outer).state_dict(),
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        expected="an error",
    )


@pytest.mark.clause("SEMI-003")
def test_global_optimizer_without_global_step(impl):
    """A global optimizer that cannot take a global step is refused before a parameter has changed."""
    params = parameters()
    before = values(params)

    def use() -> None:
        optimizer = impl.SemisyncOptimizer([*params.values()], adam(impl, params), sgd(impl, params), 2)
        train(optimizer, params, 2)

    kinds = (ValueError, TypeError, AttributeError, AssertionError, NotImplementedError)
    expect_raises(use, *kinds, expected="an error")
    expect_unchanged(before, values(params), "parameters, when the error comes")


@pytest.mark.clause("SEMI-004")
@pytest.mark.parametrize("wrong", [None, [], ["p0", "p1"], 3])
def test_wrong_global_params(impl, wrong):
    """No global parameters, or what is none, is refused with an error."""
    params = parameters()
    local, outer = adam(impl, params), impl.KeyedOptimizerWrapper(params, Outer)
    kinds = (ValueError, TypeError, IndexError, AssertionError)
    expect_raises(lambda: impl.SemisyncOptimizer(wrong, local, outer), *kinds, expected="an error")


@pytest.mark.clause("SEMI-007")
def test_one_key_for_two_tensors(impl):
    """One key for two tensors is an error, at the latest when the parameters are looked at."""
    params, others = parameters(1), parameters(1)
    kinds = (ValueError, AssertionError)
    expect_raises(lambda: semisync(impl, params, outer_params=others)[0].params, *kinds, expected="an error")


@pytest.mark.clause("SEMI-008")
@pytest.mark.parametrize("wrong", ["one key for two tensors", "two keys for one tensor"])
def test_contradicting_keys(impl, wrong):
    """Keys and tensors that contradict each other are refused before a step is taken."""
    params = parameters(1)
    others = parameters(1) if wrong == "one key for two tensors" else {"other": params["p0"]}

    def use() -> None:
        optimizer = semisync(impl, params, outer_params=others)[0]
        train(optimizer, params, 1)

    expect_raises(use, ValueError, AssertionError, expected="an error")


# --- when -----------------------------------------------------------------------------------------


@pytest.mark.clause("SEMI-005")
def test_local_steps(impl, dtype):
    """Between global steps it is the local optimizer alone, bit by bit."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, local, outer = semisync(impl, params, every=10)
    bare = adam(impl, others)
    train(optimizer, params, 9)
    train(bare, others, 9)
    expect_equal(outer.counts, [], "global steps")
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(snapshot(bare.state_dict()), local.state_dict(), "state of the local optimizer")


@pytest.mark.clause("SEMI-006")
@pytest.mark.parametrize(("every", "steps"), [(1, 3), (2, 5), (3, 9), (4, 4)])
def test_global_steps(impl, every, steps, dtype):
    """A global step follows every `num_local_steps`-th local one, and gets the number of local steps."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, _, outer = semisync(impl, params, every=every)
    train(optimizer, params, steps)
    alone(impl, others, steps, every=every)
    expect_equal(outer.counts, [*range(every, steps + 1, every)], "local steps at each global step")
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("SEMI-006")
def test_parameters_of_one_optimizer_alone(impl):
    """Each optimizer changes its own parameters, be they shared with the other or not."""
    params = parameters(3)
    both = {"p0": params["p0"], "p1": params["p1"]}
    optimizer, _, outer = semisync(
        impl, params, every=2, local=adam(impl, both), outer_params={"p1": params["p1"], "p2": params["p2"]}
    )
    others = parameters(3)
    bare = adam(impl, {"p0": others["p0"], "p1": others["p1"]})
    by_hand = Outer([others["p1"], others["p2"]])
    train(optimizer, both, 2)
    train(bare, {"p0": others["p0"], "p1": others["p1"]}, 2)
    by_hand.global_step(torch.tensor(2))
    expect_unchanged(values(others), values(params), "parameters")
    expect_equal(outer.counts, [2], "local steps at each global step")


@pytest.mark.clause("SEMI-023")
def test_local_step_that_fails(impl):
    """A local step that fails is not counted: the next global step comes after as many local ones."""
    params = parameters()
    made: list[Failing] = []

    def factory(listed: Any) -> Failing:
        made.append(Failing(listed, lr=0.1))
        return made[0]

    optimizer, _, outer = semisync(impl, params, every=3, local=impl.KeyedOptimizerWrapper(params, factory))
    train(optimizer, params, 2)
    made[0].fail = True
    before = values(params)
    expect_raises(optimizer.step, RuntimeError, mentions=["out of memory"], expected="the optimizer's error")
    expect_equal(outer.counts, [], "global steps after two local ones")
    expect_unchanged(before, values(params), "parameters")
    made[0].fail = False
    train(optimizer, params, 1)
    expect_equal(outer.counts, [3], "local steps at each global step")


@pytest.mark.clause("SEMI-023")
def test_global_step_that_fails(impl):
    """A global step that fails is not counted as one."""
    params = parameters()
    optimizer, _, outer = semisync(impl, params, every=2)
    outer.fail = True
    train(optimizer, params, 1)
    set_grads(params)
    expect_raises(optimizer.step, RuntimeError, mentions=["regions"], expected="the optimizer's error")
    entry = optimizer.state_dict()["state"]["p0"]
    counted = int(entry["__semisync_global_step_counter__"])
    expect_equal(counted, 0, "global steps that are counted")


# --- closures, gradients, surroundings ------------------------------------------------------------


@pytest.mark.clause("SEMI-022")
@pytest.mark.parametrize("kind", ["torch", "without enable_grad"])
def test_closure(impl, kind):
    """The local optimizer gets a closure that is evaluated with gradients enabled; the step uses them."""
    params, others = parameters(1), parameters(1)
    seen: list[bool] = []

    class Plain(torch.optim.Optimizer):
        """An optimizer that leaves the gradient mode as it is."""

        def step(self, closure: Any = None) -> Any:
            """Evaluate and step."""
            loss = closure()
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.sub_(param.grad, alpha=0.1)
            return loss

    def factory(listed: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(listed, lr=0.1) if kind == "torch" else Plain(listed, {})

    optimizer, _, outer = semisync(impl, params, every=2, local=impl.KeyedOptimizerWrapper(params, factory))

    def closure() -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        params["p0"].grad = None
        loss = (params["p0"] * torch.arange(3.0)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    expect_equal(seen, [True], "gradients enabled at each evaluation")
    others["p0"].grad = torch.arange(3.0)
    torch.optim.SGD([others["p0"]], lr=0.1).step()
    expect_close(params["p0"], others["p0"].detach(), "parameter", ulps=1)
    optimizer.step(closure)
    expect(all(seen), "gradients enabled at each evaluation", seen)
    expect_equal(outer.counts, [2], "local steps at each global step")


@pytest.mark.clause("SEMI-024")
def test_what_step_returns_and_leaves(impl):
    """Recorded: what step returns for a closure, and which gradients a local and a global step leave."""
    params = parameters(1)
    optimizer, _, outer = semisync(impl, params, every=2)

    def closure() -> float:
        set_grads(params)
        return 3.0

    seen = []
    for _ in range(2):
        seen.append(outcome(lambda: optimizer.step(closure)))
        seen.append("gradient" if params["p0"].grad is not None else "no gradient")
    return [*seen, "gradient" if outer.gradients[0] is not None else "no gradient"]


@pytest.mark.clause("SEMI-021")
@pytest.mark.parametrize("arguments", [[], [True], [False]])
def test_zero_grad(impl, arguments):
    """Gradients of both optimizers' parameters become None, by default too, and zero on request."""
    params = parameters(3)
    local = adam(impl, {"p0": params["p0"], "p1": params["p1"]})
    optimizer = semisync(impl, params, local=local, outer_params={"p1": params["p1"], "p2": params["p2"]})[0]
    set_grads(params)
    params["p0"].grad.fill_(math.inf)
    optimizer.zero_grad(**({"set_to_none": arguments[0]} if arguments else {}))
    for key, param in params.items():
        # torchrec's keyed optimizers drop gradients whatever they are told; that is said elsewhere.
        if param.grad is not None:
            expect(arguments == [False], f"no gradient of {key}", param.grad)
            expect_bits(param.grad, torch.zeros(3), f"gradient of {key}")


@pytest.mark.clause("SEMI-035")
@pytest.mark.parametrize("value", ["nan", "inf", "sparse", "missing"])
def test_gradients_reach_the_local_optimizer_as_they_are(impl, value):
    """Non-finite, sparse and missing gradients come to the local optimizer as they are."""
    params = parameters(2, (3, 2))
    recorder: list[Recorder] = []

    def factory(listed: Any) -> Recorder:
        recorder.append(Recorder(listed))
        return recorder[0]

    local = impl.KeyedOptimizerWrapper(params, factory)
    optimizer = semisync(impl, params, local=local)[0]
    set_grads(params)
    if value == "sparse":
        params["p0"].grad = params["p0"].grad.to_sparse()
    elif value == "missing":
        params["p0"].grad = None
    else:
        params["p0"].grad[1] = float(value)
    before = [None if param.grad is None else param.grad.clone() for param in params.values()]
    optimizer.step()
    expect_unchanged(before, recorder[0].received[0], "gradients that were received")


@pytest.mark.clause("SEMI-030")
def test_lr_scheduler(impl):
    """A scheduler sets the rates of both optimizers."""
    params = parameters()
    optimizer, local, outer = semisync(impl, params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(optimizer, params, 1)
    scheduler.step()
    rates = [next(iter(given.param_groups))["lr"] for given in (local, outer)]
    expect_equal(rates, [0.05, 0.25], "rates of the local and the global optimizer")


@pytest.mark.clause("SEMI-031")
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(impl, unscale):
    """A GradScaler unscales gradients once, also of parameters that both have, or it is refused."""
    params, others = parameters(), parameters()
    optimizer = semisync(impl, params, local=sgd(impl, params))[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loss = sum((param * torch.arange(3.0)).sum() for param in params.values())
    scaler.scale(loss).backward()
    before = values(params)
    try:
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    except Exception:
        expect_unchanged(before, values(params), "parameters after a refusal")
        return
    for param in others.values():
        param.grad = torch.arange(3.0)
    sgd(impl, others).step()
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("SEMI-031")
def test_grad_scaler_with_infinite_gradients(impl):
    """With an infinite gradient a GradScaler leaves the step out, and it is not counted."""
    params = parameters()
    optimizer, _, outer = semisync(impl, params, every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = values(params)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum((param * math.inf).sum() for param in params.values())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    expect_unchanged(before, values(params), "parameters")
    expect_equal(outer.counts, [], "global steps")
    expect_equal(scaler.get_scale(), 256.0, "scale afterwards")


@pytest.mark.clause("SEMI-032")
def test_clipping_around_it(impl):
    """Clipping around it bounds each gradient once, also of parameters that both optimizers have."""
    params = parameters()
    recorder: list[Recorder] = []

    def factory(listed: Any) -> Recorder:
        recorder.append(Recorder(listed))
        return recorder[0]

    optimizer = semisync(impl, params, local=impl.KeyedOptimizerWrapper(params, factory))[0]
    clipped = impl.GradientClippingOptimizer(optimizer, impl.GradientClipping.NORM, 1.0)
    for param in params.values():
        param.grad = torch.full((3,), 10.0)
    clipped.step()
    for seen in recorder[0].received[0]:
        expect_close(seen, torch.full((3,), 1 / math.sqrt(6)), "clipped gradient", ulps=16)


@pytest.mark.clause("SEMI-034")
def test_what_is_passed_on(impl):
    """A step count and hyper-parameters reach each optimizer that takes them, and others do not mind."""
    params = parameters()
    made: list[Told] = []

    def factory(listed: Any) -> Told:
        made.append(Told(listed, lr=0.1))
        return made[-1]

    local, outer = (impl.KeyedOptimizerWrapper(params, factory) for _ in range(2))
    optimizer = impl.SemisyncOptimizer([*params.values()], local, outer)
    optimizer.set_optimizer_step(7)
    optimizer.update_hyper_parameters({"lr": 0.3})
    expect_equal([one.told for one in made], [[7, {"lr": 0.3}]] * 2, "what the optimizers were told")
    plain = semisync(impl, parameters())[0]
    plain.set_optimizer_step(7)
    plain.update_hyper_parameters({"lr": 0.3})


@pytest.mark.clause("SEMI-036")
@pytest.mark.parametrize("non_blocking", [False, True])
def test_offloading(impl, device, non_blocking):
    """Offloading changes no number, and keeps what only the global optimizer has in the memory of the CPU."""

    def make(**options: Any) -> Any:
        params = parameters(device=device)
        extra = parameter(4, seed=9, device=device)
        every = {**params, "x": extra}
        made = semisync(
            impl,
            params,
            every=2,
            local=adam(impl, params),
            outer_params=every,
            options=options,
            stateless=True,
        )
        return made[0], params, extra

    optimizer, params, extra = make(offload_global_model=True, non_blocking=non_blocking)
    plain, others, other_extra = make()
    for _ in range(5):
        train(optimizer, params, 1)
        train(plain, others, 1)
        expect_equal(extra.device.type, "cpu", "device of a parameter that only the global optimizer has")
    expect_unchanged(values(others), values(params), "parameters")
    expect_bits(extra.detach().cpu(), other_extra.detach().cpu(), "parameter of the global optimizer")
    expect_equal(params["p0"].device.type, torch.device(device).type, "device of a trained parameter")


@pytest.mark.clause("SEMI-033")
@pytest.mark.parametrize("wrong", [3, {"lr": 0.1}])
def test_malformed_group(impl, wrong):
    """What is no group is refused with an error."""
    optimizer = semisync(impl, parameters())[0]
    kinds = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError)
    expect_raises(lambda: optimizer.add_param_group(wrong), *kinds, expected="an error")


@pytest.mark.clause("SEMI-033")
def test_new_group(impl):
    """A new group is trained from then on, or refused with an error; it is never swallowed."""
    params, late = parameters(), parameter(2, seed=7)
    optimizer, *_ = semisync(impl, params)
    before = values([late])
    try:
        optimizer.add_param_group({"params": {"late": late}, "lr": 0.5})
    except Exception:
        expect_equal(len(optimizer.param_groups), 2, "groups after a refusal")
        expect("late" not in optimizer.params, "no new parameter after a refusal", list(optimizer.params))
        return
    late.grad = torch.ones(2)
    optimizer.step()
    expect(not torch.equal(late.detach(), before[0]), "the new parameter trained", late)


@pytest.mark.clause("SEMI-029")
@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(impl, steps, how):
    """A copy holds the same state and counters, shares nothing, and trains on alike with its global steps."""
    params = parameters()
    optimizer, _, outer = semisync(impl, params, every=3)
    train(optimizer, params, steps)
    whole = (params, optimizer, outer)
    others, twin, its_outer = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
    expect_unchanged(snapshot(optimizer.state_dict()), twin.state_dict(), "state of the copy")
    before, seen = values(params), [*outer.counts]
    train(twin, others, 4, seed=6)
    expect_unchanged(before, values(params), "parameters of the original")
    expect_equal(outer.counts, seen, "global steps of the original")
    train(optimizer, params, 4, seed=6)
    expect_unchanged(values(params), values(others), "parameters")
    expect_equal(its_outer.counts, outer.counts, "global steps")


@pytest.mark.clause("SEMI-029")
def test_copies_leave_others_alone(impl):
    """Copying one leaves all others of the process working, those that are made later too."""
    params = parameters()
    first = semisync(impl, params)[0]
    copy.deepcopy(first)
    second = semisync(impl, params)[0]
    for optimizer in (first, second):
        train(optimizer, params, 1)


@pytest.mark.clause("SEMI-026")
def test_step_hooks(impl):
    """Step hooks run once a step, before and after it, at a global step too."""
    params = parameters()
    optimizer = semisync(impl, params, every=2)[0]
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(optimizer, params, 2)
    expect_equal(seen, ["pre", "post"] * 2, "hooks")
    handle.remove()
    train(optimizer, params, 1)
    expect_equal(seen[4:], ["pre"], "hooks after one was removed")


@pytest.mark.clause("SEMI-028")
def test_hooks_of_the_local_optimizer(impl):
    """Step hooks of the local optimizer and of the torch optimizer inside run once a step."""
    params = parameters()
    made: list[torch.optim.Optimizer] = []

    def factory(listed: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(listed, lr=0.1))
        return made[0]

    optimizer = semisync(impl, params, every=2, local=impl.KeyedOptimizerWrapper(params, factory))[0]
    seen: list[str] = []
    made[0].register_step_pre_hook(lambda *_: seen.append("pre"))
    made[0].register_step_post_hook(lambda *_: seen.append("post"))
    train(optimizer, params, 2)
    expect_equal(seen, ["pre", "post"] * 2, "hooks")


@pytest.mark.clause("SEMI-025")
def test_hooks_of_the_global_optimizer(impl):
    """Recorded: which step hooks of the keyed global optimizer and of the one inside run at a global step."""
    params = parameters()
    made: list[Outer] = []

    def factory(listed: Any) -> Outer:
        made.append(Outer(listed))
        return made[0]

    outer = impl.KeyedOptimizerWrapper(params, factory)
    optimizer = impl.SemisyncOptimizer([*params.values()], adam(impl, params), outer, 2)
    seen: list[str] = []
    registered = outcome(lambda: bool(outer.register_step_pre_hook(lambda *_: seen.append("keyed"))))
    made[0].register_step_pre_hook(lambda *_: seen.append("inside"))
    train(optimizer, params, 2)
    return [registered, *seen]


@pytest.mark.clause("SEMI-020")
def test_dtensor_parameters(impl):
    """With DTensor parameters it steps, saves and loads as each of its optimizers does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with single_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (1,))

        def make(seed: int) -> Any:
            whole = torch.arange(4.0) + seed
            params = {"p": torch.nn.Parameter(distribute_tensor(whole, mesh))}
            return params, semisync(impl, params, every=2, local=sgd(impl, params, momentum=0.9))[0]

        (params, optimizer), (others, resumed) = make(0), make(1)
        for given, one in ((params, optimizer), (others, resumed)):
            for _ in range(3):
                given["p"].grad = distribute_tensor(torch.ones(4) * (1 if one is optimizer else 2), mesh)
                one.step()
        resumed.load_state_dict(snapshot_of(optimizer.state_dict()))
        expected, seen = optimizer.state_dict()["state"]["p"], resumed.state_dict()["state"]["p"]
        for key in (
            "semi_sync_local_momentum_buffer",
            "semi_sync_global_momentum",
            "semi_sync_global_anchor",
        ):
            expect_bits(seen[key].to_local(), expected[key].to_local(), key)


def snapshot_of(tree: Any) -> Any:
    """Clone a nested mapping of tensors, those that are distributed too."""
    if isinstance(tree, dict):
        return {key: snapshot_of(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree
