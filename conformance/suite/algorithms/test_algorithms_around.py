"""Closures, hooks, wrappers, schedulers, scalers and autocast around the algorithms."""

import functools
from typing import Any

import pytest
import torch
import torch.optim.optimizer as torch_hooks

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    MOMENTUM,
    WITH_OTHER,
    expect_same_way,
    make_algorithm,
    resumes,
    sparse_rows,
    trained_at,
)
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.described import said
from keyedopt.conformance.suite.support.device import ones, seed_torch, the_device
from keyedopt.conformance.suite.support.doubles import single_rank
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, train, values, warmup_stages

every = pytest.mark.parametrize("algorithm", ALGORITHMS)
any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)


def tables(count: int = 2) -> dict[str, torch.nn.Parameter]:
    """Make fixed tables by key."""
    return {f"t{index}": parameter(4, 3, seed=index) for index in range(count)}


def keyed(impl: Any, algorithm: str, params: Any, lr: float = 0.1) -> Any:
    """Wrap an optimizer of an algorithm in a KeyedOptimizerWrapper."""
    options = MOMENTUM.get(algorithm, {})
    return impl.KeyedOptimizerWrapper(params, functools.partial(getattr(impl, algorithm), lr=lr, **options))


# --- closures, hooks, zero_grad -------------------------------------------------------------------


@pytest.mark.clause("ALGO-050")
@pytest.mark.needs("{algorithm}", "{algorithm}.closure")
@any_optimizer
def test_closure(impl, algorithm):
    """A closure is evaluated once, with gradients enabled, and step returns its loss."""
    expect_step_with_closure(impl, algorithm)


@pytest.mark.clause("ALGO-103")
@pytest.mark.needs("{algorithm}", "{algorithm}.closure")
@any_optimizer
def test_closure_under_no_grad(impl, algorithm):
    """The closure of a step has gradients enabled, also if the caller disabled them."""
    with torch.no_grad():
        expect_step_with_closure(impl, algorithm)


def expect_step_with_closure(impl: Any, algorithm: str) -> None:
    """Expect one evaluation with gradients enabled, its loss, and the weight of a plain step."""
    params = tables(1)
    weight = params["t0"]
    other = tables(1)
    optimizer = make_algorithm(impl, algorithm, [weight])
    plain = make_algorithm(impl, algorithm, [other["t0"]])
    enabled = []

    def closure() -> torch.Tensor:
        enabled.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    seed_torch(1)  # some optimizers draw random numbers
    loss = optimizer.step(closure)
    expect_equal(enabled, [True], "whether gradients were enabled, by evaluation")
    expect_close(loss.detach(), (other["t0"].detach() ** 2).sum().double(), "the loss")
    with torch.enable_grad():
        (other["t0"] * other["t0"]).sum().backward()
    seed_torch(1)
    plain.step()
    expect_bits(weight.detach(), other["t0"].detach(), "the weight")


@pytest.mark.clause("ALGO-051")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_hooks(impl, algorithm):
    """Each kind of hook runs once per event, in order."""
    params = tables(1)
    optimizer = make_algorithm(impl, algorithm, list(params.values()))
    seen: list[str] = []
    for kind in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
        register = getattr(optimizer, f"register_{kind}_hook")
        register(lambda *_, kind=kind: seen.append(kind))
    for kind in ("load_state_dict_pre", "load_state_dict_post"):
        register = getattr(optimizer, f"register_{kind}_hook")
        register(lambda *_, kind=kind: seen.append(kind))
    train(optimizer, params, 1)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    events = ("step", "state_dict", "load_state_dict")
    expect_equal(seen, [f"{event}_{when}" for event in events for when in ("pre", "post")], "hooks that ran")


@pytest.mark.clause("ALGO-051")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_gradients_of_a_pre_hook(impl, algorithm):
    """A step takes the gradients that its pre-hook sets, and its post-hook sees the weights after it."""
    params, plain, seen = tables(), tables(), []
    optimizer = make_algorithm(impl, algorithm, list(params.values()))
    other = make_algorithm(impl, algorithm, list(plain.values()))
    optimizer.register_step_pre_hook(lambda *_: set_grads(params, seed=1))
    optimizer.register_step_post_hook(lambda *_: seen.append(values(params)))
    for _ in range(2):
        set_grads(params, seed=2)
        optimizer.step()
        set_grads(plain, seed=1)
        other.step()
        for key, value, hooked in zip(plain, values(plain), seen[-1], strict=True):
            expect_bits(params[key].detach(), value, f"weight {key}")
            expect_bits(hooked, value, f"weight {key} in the post-hook")


@pytest.mark.clause("ALGO-117")
@pytest.mark.needs("{algorithm}")
@any_optimizer
@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_all_optimizers(impl, when, algorithm):
    """A hook for the steps of all optimizers runs once in each step, with and without hooks of its own."""
    params, seen = tables(), []
    optimizer = make_algorithm(impl, algorithm, list(params.values()))
    register = getattr(torch_hooks, f"register_optimizer_step_{when}_hook")
    handle = register(lambda stepped, *_: seen.append(stepped is optimizer))
    try:
        train(optimizer, params, 1)
        getattr(optimizer, f"register_step_{when}_hook")(lambda *_: None)
        train(optimizer, params, 1)
    finally:
        handle.remove()
    train(optimizer, params, 1)
    expect_equal(sum(seen), 2, "calls with the optimizer in two steps, and none after the removal")


@pytest.mark.clause("ALGO-052")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_zero_grad(impl, algorithm):
    """zero_grad removes the gradients, or sets them to zero with set_to_none=False."""
    params = tables(1)
    optimizer = make_algorithm(impl, algorithm, list(params.values()))
    set_grads(params)
    optimizer.zero_grad(set_to_none=False)
    expect_bits(params["t0"].grad, torch.zeros(4, 3), "the gradient")
    by_default = said(impl.adapter, "defaults", algorithm).get("set_to_none", True)
    optimizer.zero_grad(**({} if by_default else {"set_to_none": True}))
    expect(params["t0"].grad is None, "no gradient", params["t0"].grad)


# --- keyed optimizers -----------------------------------------------------------------------------


@pytest.mark.clause("ALGO-084")
@pytest.mark.needs("{algorithm}", "KeyedOptimizerWrapper")
@any_optimizer
def test_keyed(impl, algorithm):
    """Inside a KeyedOptimizerWrapper training is identical, and loaded state resumes it."""
    params, plain = tables(), tables()
    one, other = keyed(impl, algorithm, params), make_algorithm(impl, algorithm, list(plain.values()))
    train(one, params, 3)
    train(other, plain, 3)
    resumed = {key: torch.nn.Parameter(value.detach().clone()) for key, value in params.items()}
    third = keyed(impl, algorithm, resumed)
    third.init_state()
    third.load_state_dict(snapshot(one.state_dict()))
    third.zero_grad()
    train(other, plain, 2, seed=7)
    train(third, resumed, 2, seed=7)
    for key, value in plain.items():
        expect_bits(resumed[key].detach(), value.detach(), f"weight {key}")


@pytest.mark.clause("ALGO-085")
@pytest.mark.needs("{algorithm}", "KeyedOptimizerWrapper")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam"])
def test_init_state(impl, algorithm):
    """init_state changes neither the parameters nor later training."""
    params, plain = tables(), tables()
    one, other = keyed(impl, algorithm, params), make_algorithm(impl, algorithm, list(plain.values()))
    before = values(params)
    one.init_state()
    expect_unchanged(before, values(params), "the parameters")
    train(one, params, 3)
    train(other, plain, 3)
    for key, value in plain.items():
        expect_bits(params[key].detach(), value.detach(), f"weight {key}")


@pytest.mark.clause("ALGO-086")
@pytest.mark.needs("{algorithm}", "GradientClippingOptimizer")
@any_optimizer
def test_clipped(impl, algorithm):
    """Inside gradient clipping, the result equals that with gradients that were clipped beforehand."""
    params, plain = tables(), tables()
    clipped = impl.GradientClippingOptimizer(
        keyed(impl, algorithm, params), clipping=impl.GradientClipping.VALUE, max_gradient=0.25
    )
    other = make_algorithm(impl, algorithm, list(plain.values()))
    for seed in range(3):
        set_grads(params, seed=seed)
        set_grads(plain, seed=seed)
        for weight in plain.values():
            weight.grad.clamp_(-0.25, 0.25)
        clipped.step()
        other.step()
    for key, value in plain.items():
        expect_bits(params[key].detach(), value.detach(), f"weight {key}")


@pytest.mark.clause("ALGO-087")
@pytest.mark.needs("{algorithm}", "WarmupOptimizer")
@any_optimizer
def test_warmed_up(impl, algorithm):
    """Inside a warmup schedule, steps use the scheduled learning rates."""
    params, plain = tables(), tables()
    stages = warmup_stages(impl, [{"policy": "LINEAR", "max_iters": 4, "value": 0.25}])
    scheduled = impl.WarmupOptimizer(keyed(impl, algorithm, params, lr=9.0), stages, lr=0.1)
    other = make_algorithm(impl, algorithm, list(plain.values()))
    for seed in range(6):
        rate = next(iter(scheduled.param_groups))["lr"]
        expect(rate <= 0.1 + 1e-12, "a learning rate of at most 0.1", rate)
        other.param_groups[0]["lr"] = rate
        train(scheduled, params, 1, seed=seed)
        train(other, plain, 1, seed=seed)
    for key, value in plain.items():
        expect_bits(params[key].detach(), value.detach(), f"weight {key}")


# --- schedulers, scalers and autocast -------------------------------------------------------------


@pytest.mark.clause("ALGO-088")
@pytest.mark.needs("{algorithm}", "{algorithm}.lr")
@any_optimizer
def test_lr_scheduler(impl, algorithm):
    """Steps use the learning rates of a scheduler."""
    rates = [0.1 * 0.5**step for step in range(4)]
    params = tables(1)
    optimizer = make_algorithm(impl, algorithm, [params["t0"]])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for seed in range(4):
        train(optimizer, params, 1, seed=seed)
        scheduler.step()
    scheduled = params["t0"].detach()
    first, last = (trained_at(impl, algorithm, [rate] * 4) for rate in rates[::3])
    exact = resumes(impl, algorithm)
    expect_bits(scheduled, trained_at(impl, algorithm, rates, resume=exact), "the weight")
    other = last if exact else scheduled  # the step sizes of Rprop begin with the rate, and are state
    expect(not same_bits(other, first), "another weight than at a constant rate", first)


@pytest.mark.clause("ALGO-089")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_grad_scaler(impl, algorithm):
    """A step is skipped on overflow, and otherwise uses the unscaled gradients."""
    expect_unscaled(impl, algorithm, "dense")


@pytest.mark.clause("ALGO-089")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_grad_scaler_with_sparse_gradients(impl, algorithm):
    """A step is skipped on overflow, and otherwise uses the unscaled gradients."""
    expect_unscaled(impl, algorithm, "sparse")


def expect_unscaled(impl, algorithm, layout):
    """Expect steps with a GradScaler to train like steps without, except for the one that overflows."""
    params, plain = tables(1), tables(1)
    weight, other = params["t0"], plain["t0"]
    one, two = make_algorithm(impl, algorithm, [weight]), make_algorithm(impl, algorithm, [other])
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0, growth_interval=100)
    for seed in range(3):
        set_grads([weight], seed=seed)
        set_grads([other], seed=seed)
        if layout == "sparse":
            for each in (weight, other):
                each.grad = sparse_rows([2, 0], each.grad[:2], each)
        scaler.scale(ones(()))  # begins the scale
        weight.grad.mul_(scaler.get_scale())
        if seed == 1:
            (weight.grad._values() if layout == "sparse" else weight.grad)[0, 0] = float("inf")
            before = snapshot([values([weight]), one.state_dict()])
        scaler.step(one)
        scaler.update()
        if seed == 1:
            expect_unchanged(before, [values([weight]), one.state_dict()], "weight and state after overflow")
        else:
            two.step()
    expect_same_way(weight, other, tables(1)["t0"], "the weight", algorithm)


@pytest.mark.clause("ALGO-090")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_autocast(impl, algorithm):
    """A step gives the same result under autocast, with gradients enabled or disabled."""
    params, plain = tables(1), tables(1)
    one, other = (
        make_algorithm(impl, algorithm, [params["t0"]]),
        make_algorithm(impl, algorithm, [plain["t0"]]),
    )
    with torch.autocast(the_device().type, dtype=torch.bfloat16):
        train(one, params, 2)
    with torch.no_grad():
        train(one, params, 1, seed=5)
    train(other, plain, 2)
    train(other, plain, 1, seed=5)
    expect_bits(params["t0"].detach(), plain["t0"].detach(), "the weight")
    expect(params["t0"].requires_grad and params["t0"].grad_fn is None, "a leaf", params["t0"])


@pytest.mark.clause("ALGO-091")
@pytest.mark.needs("{algorithm}")
@any_optimizer
@pytest.mark.parametrize("sharded", [0, 1, None])
def test_dtensor(impl, algorithm, sharded):
    """A DTensor on one rank steps like the plain tensor, or raises an error and does not change."""
    plain = parameter(4, 3)
    other = make_algorithm(impl, algorithm, [plain])
    with single_rank():
        from torch.distributed import device_mesh, tensor

        mesh = device_mesh.init_device_mesh(the_device().type, (1,))
        placements = [tensor.Replicate() if sharded is None else tensor.Shard(sharded)]
        weight = torch.nn.Parameter(tensor.distribute_tensor(parameter(4, 3).detach(), mesh, placements))
        before = weight.detach().full_tensor().clone()
        refused = False
        try:
            optimizer = make_algorithm(impl, algorithm, [weight])
            for seed in range(2):
                set_grads([plain], seed=seed)
                weight.grad = tensor.distribute_tensor(plain.grad.clone(), mesh, placements)
                optimizer.step()
                other.step()
        except (ValueError, TypeError, RuntimeError, NotImplementedError):
            refused = True
        seen = weight.detach().full_tensor()
    if refused:
        expect(same_bits(seen, before), "the weight unchanged after an error", seen)
        return "refused"
    expect_same_way(seen, plain, parameter(4, 3), "the weight", algorithm)
    return "updated"
