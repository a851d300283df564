"""Dense steps by our own kernels on the CPU: against torch in float64, and what they must leave to torch."""

import os
from functools import partial

import pytest
import torch

from keyedopt import fused
from keyedopt.fused import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
from keyedopt.fused.backends.interface import Step
from keyedopt.fused.bulk import native
from keyedopt.fused.dense import cpu_dense_steps
from keyedopt.fused.dense.cpu_dense_steps import Clip, Group

if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert native is not None, "fused/bulk has not been built"
built = pytest.mark.skipif(native is None, reason="fused/bulk has not been built")

SHAPES = [
    (3, 5),
    (),
    (0, 4),
    (1,),
    (15,),
    (16,),
    (64,),
    (65, 3),
    (9001,),
    *[(2,)] * 40,
    (1 << 18,),
    (4, 0, 2),
]
MADE = {
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adam with decay": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), maximize=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3),
    "adam, rate in a tensor": partial(torch.optim.Adam, lr=torch.tensor(1e-2)),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "sgd, nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.05),
}
KINDS = {"norm": GradientClipping.NORM, "value": GradientClipping.VALUE}
SETS = ("plain", "avx2", "avx512")


@pytest.fixture
def answers(monkeypatch):
    """What the kernels said of each step: done, or left to others."""
    given = []

    class Told:
        def __getattr__(self, name):
            return getattr(native, name)

        def step(self, *args):
            given.append(native.step(*args))
            return given[-1]

    if native is not None:
        monkeypatch.setattr(cpu_dense_steps, "native", Told())
    return given


def parameters(dtype=torch.float32, shapes=SHAPES):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def gradients(step, shapes=SHAPES):
    torch.manual_seed(100 + step)
    return [torch.randn(shape) for shape in shapes]


def clipped(params, make, kind, bound):
    inner = make(params)
    keyed = KeyedOptimizerWrapper({f"p{i}": param for i, param in enumerate(params)}, lambda _: inner)
    return GradientClippingOptimizer(keyed, kind, bound), inner


def numbers(params, optimizer):
    """Return parameters and state, by name."""
    found = {"weight": [param.detach() for param in params]}
    for param in params:
        for name, value in optimizer.state[param].items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: torch.cat([one.double().reshape(-1) for one in some]) for name, some in found.items()}


def trained(make, kind, bound, steps=4):
    params = parameters()
    optimizer, inner = clipped(params, partial(make, fused=True), kind, bound)
    for step in range(steps):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.clone()
        optimizer.step()
        left = [param.grad for param in params]
        assert all(torch.equal(one, grad) for one, grad in zip(left, gradients(step), strict=True))
    return numbers(params, inner)


def trained_by_torch(make, kind, bound, dtype, steps=4):
    params = parameters(dtype)
    optimizer = make(params, fused=dtype is torch.float32)
    if isinstance(optimizer, torch.optim.Adagrad):
        for entry in optimizer.state.values():
            entry["sum"] = entry["sum"].to(dtype)
    for step in range(steps):
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = grad.to(dtype)
        if kind is GradientClipping.NORM:
            torch.nn.utils.clip_grad_norm_(params, bound)
        else:
            torch.nn.utils.clip_grad_value_(params, bound)
        optimizer.step()
    return numbers(params, optimizer)


@built
@pytest.mark.parametrize("bound", [0.5, 1e6])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", list(MADE))
def test_a_step_is_as_exact_as_torchs(name, kind, bound, answers):
    make, way = MADE[name], KINDS[kind]
    ours = trained(make, way, bound)
    assert answers == [True] * 4
    theirs = trained_by_torch(make, way, bound, torch.float32)
    exact = trained_by_torch(make, way, bound, torch.float64)
    assert ours.keys() == theirs.keys() == exact.keys()
    for key, value in exact.items():
        # Of the largest number that a step has to do with: a difference of two may be as small as it likes.
        scale = value.abs().max()
        allowed = max(
            2 * float((theirs[key] - value).abs().max() / scale), 2 * torch.finfo(torch.float32).eps
        )
        assert float((ours[key] - value).abs().max() / scale) <= allowed, key


@built
@pytest.mark.parametrize("name", list(MADE))
def test_threads_and_instruction_sets_give_the_same_bits(name, answers, monkeypatch):
    threads, results = torch.get_num_threads(), []
    usable = [one for one in SETS if native.step([], 1, one)]
    assert "plain" in usable
    try:
        for which in usable:
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                monkeypatch.setenv(cpu_dense_steps.INSTRUCTION_SET, which)
                results.append(trained(MADE[name], GradientClipping.NORM, 0.5, steps=3))
    finally:
        torch.set_num_threads(threads)
    assert answers == [True] * len(answers)
    assert len(answers) == 9 * len(usable)
    for other in results[1:]:
        assert all(torch.equal(value, other[key]) for key, value in results[0].items())


@built
def test_an_unknown_instruction_set_is_left_to_torch(answers, monkeypatch):
    monkeypatch.setenv(cpu_dense_steps.INSTRUCTION_SET, "abacus")
    params = parameters(shapes=[(5,)])
    optimizer, _ = clipped(params, partial(torch.optim.SGD, lr=1.0, fused=True), GradientClipping.VALUE, 0.5)
    before, params[0].grad = params[0].detach().clone(), torch.ones(5)
    optimizer.step()
    assert answers == [False]
    assert torch.equal(params[0], before - 0.5)


@built
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", list(MADE))
def test_a_gradient_that_is_not_finite_spoils_its_own_element_alone(name, bad, answers):
    results = []
    for value in (0.25, bad):
        params = parameters(shapes=[(200,)])
        inner = MADE[name](params, fused=True)
        grad = torch.linspace(-1, 1, 200)
        grad[70] = value
        params[0].grad = grad
        step = native_steps_of(inner, params)
        assert cpu_dense_steps.update([step], Clip())
        results.append(params[0].detach())
    keep = torch.arange(200) != 70
    assert torch.equal(results[0][keep], results[1][keep])
    assert not torch.equal(results[0][70], results[1][70])
    limited = torch.tensor([bad, 0.1])
    weight = torch.zeros(2)
    group = Group(Step("sgd", 1.0, decay="l2"), [weight], [limited], [])
    assert cpu_dense_steps.update([group], Clip(limit=0.5))
    assert float(weight[0]) == pytest.approx(-max(-0.5, min(0.5, bad)) if bad == bad else bad, nan_ok=True)


def native_steps_of(optimizer, params):
    """Return the first group of an optimizer of torch, with fresh state, as kernels take it."""
    from keyedopt.fused.dense.torch_fused_steps import _group

    fresh = {}
    return _group(type(optimizer), optimizer.param_groups[0], optimizer.state, fresh)


def plain_group(**changes):
    """Return a usual group of two parameters for Adam, but for what is changed."""
    parts = {
        "params": [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))],
        "grads": [torch.ones(4, 3), torch.ones(5)],
        "exp_avg": [torch.zeros(4, 3), torch.zeros(5)],
        "exp_avg_sq": [torch.zeros(4, 3), torch.zeros(5)],
        "counts": [torch.zeros(()), torch.zeros(())],
    }
    for name, value in changes.items():
        parts[name][1] = value
    states = [parts["exp_avg"], parts["exp_avg_sq"]]
    step = Step("adam", 0.1, eps=1e-8, decay="l2")
    return Group(step, parts["params"], parts["grads"], states, parts["counts"])


SHARED = torch.zeros(9)
UNUSUAL = {
    "a gradient of another dtype": {"grads": torch.ones(5).half()},
    "a parameter of another dtype": {"params": torch.nn.Parameter(torch.ones(5).double())},
    "another shape": {"grads": torch.ones(6)},
    "another number of dimensions": {"exp_avg": torch.zeros(5, 1)},
    "strides": {"exp_avg_sq": torch.zeros(10)[::2]},
    "elements in one place": {"grads": torch.ones(1).expand(5)},
    "another device": {"grads": torch.ones(5, device="meta")},
    "a sparse gradient": {"grads": torch.ones(5).to_sparse()},
    "a tensor of another type": {"grads": torch.nn.Parameter(torch.ones(5))},
    "no tensor": {"exp_avg": None},
    "memory in common": {"exp_avg": SHARED[:5], "exp_avg_sq": SHARED[4:]},
    "a count of another dtype": {"counts": torch.zeros((), dtype=torch.int64)},
    "a count with a dimension": {"counts": torch.zeros(1)},
    "a count below 0": {"counts": torch.tensor(-1.0)},
    "a count that is none": {"counts": torch.tensor(float("nan"))},
}


@built
@pytest.mark.parametrize("name", list(UNUSUAL))
def test_what_is_unusual_is_refused_as_a_whole(name):
    group, usual = plain_group(**UNUSUAL[name]), plain_group()
    assert not cpu_dense_steps.update([usual, group], Clip(factor=0.5))
    for one in (usual, group):
        assert torch.equal(one.params[0], torch.ones(4, 3))
        assert not any(state[0].any() for state in one.states)
        assert float(one.counts[0]) == 0
    assert cpu_dense_steps.update([usual], Clip(factor=0.5))
    assert float(usual.counts[0]) == 1


@built
def test_memory_that_two_groups_share_is_refused():
    one, other = plain_group(), plain_group()
    other.params[0] = one.params[0]
    assert not cpu_dense_steps.update([one, other], Clip())


@built
def test_unaligned_memory_is_as_good_as_any():
    exact = None
    for offset in range(5):
        weight, grad, *states = (torch.zeros(140)[offset : offset + 131] for _ in range(4))
        weight.copy_(torch.linspace(-1, 1, 131))
        grad.copy_(torch.linspace(1, 2, 131))
        group = Group(Step("adam", 0.1, eps=1e-8), [weight], [grad], [[state] for state in states])
        assert cpu_dense_steps.update([group], Clip(factor=0.25))
        assert weight._version == 2
        exact = weight.clone() if exact is None else exact
        assert torch.equal(weight, exact)


@built
def test_each_group_gets_new_versions():
    groups = [plain_group(), plain_group()]
    before = [param._version for group in groups for param in group.params]
    assert cpu_dense_steps.update(groups, Clip())
    after = [param._version for group in groups for param in group.params]
    assert all(new > old for new, old in zip(after, before, strict=True))


@built
def test_wrong_arguments_are_errors():
    group = plain_group()
    described = cpu_dense_steps._describe(group, Clip())
    for wrong in ((), ([],), ([], "1", ""), ([described], 1, 2), ((described,), 1, "")):
        with pytest.raises(TypeError):
            native.step(*wrong)
    options, *parts = described
    for changed in (options[:-1], (7, *options[1:]), ("0", *options[1:]), list(options)):
        with pytest.raises((TypeError, ValueError)):
            native.step([(changed, *parts)], 1, "")
    for place in range(len(parts)):
        for other in (None, [], parts[place][:1]):
            with pytest.raises(TypeError):
                native.step([(options, *parts[:place], other, *parts[place + 1 :])], 1, "")
    assert native.step([], 1, "plain")


# --- what is taken over of torch's optimizers ------------------------------------------------------


REFUSED = {
    "amsgrad": partial(torch.optim.Adam, amsgrad=True, fused=True),
    "not fused": partial(torch.optim.Adam, foreach=True),
    "float64": partial(torch.optim.Adam, fused=True),
    "a class of a user": None,
    "a hook after the step": partial(torch.optim.Adam, fused=True),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", list(REFUSED))
def test_torch_steps_where_our_kernels_do_not(name, kind, answers):
    class Own(torch.optim.Adam):
        pass

    make = REFUSED[name] or partial(Own, fused=True)
    dtype = torch.float64 if name == "float64" else torch.float32
    ours, theirs = parameters(dtype, [(70,), (3,)]), parameters(dtype, [(70,), (3,)])
    optimizer, inner = clipped(ours, make, KINDS[kind], 0.5)
    other = make(theirs)
    told = []
    if name.startswith("a hook"):
        inner.register_step_post_hook(lambda *_: told.append(1))
    for step in range(3):
        for one, two, grad in zip(ours, theirs, gradients(step, [(70,), (3,)]), strict=True):
            one.grad, two.grad = grad.to(dtype), grad.to(dtype)
        optimizer.step()
        if kind == "norm":
            torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        else:
            torch.nn.utils.clip_grad_value_(theirs, 0.5)
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert True not in answers
    assert len(told) == (3 if name.startswith("a hook") else 0)
    assert not {"grad_scale", "step"} & set(vars(inner))


def test_without_the_extension_torch_steps(monkeypatch):
    monkeypatch.setattr(cpu_dense_steps, "native", None)
    params, other = parameters(shapes=[(70,)]), parameters(shapes=[(70,)])
    optimizer, _ = clipped(params, partial(torch.optim.Adam, fused=True), GradientClipping.VALUE, 0.5)
    peer = torch.optim.Adam(other, fused=True)
    params[0].grad, other[0].grad = gradients(0, [(70,)])[0], gradients(0, [(70,)])[0].clamp(-0.5, 0.5)
    optimizer.step()
    peer.step()
    assert torch.equal(params[0], other[0])


@built
@pytest.mark.parametrize("name", list(MADE))
def test_state_is_torchs(name, answers):
    """What our first step makes, torch's next one goes on with, and the other way round."""
    make, shapes = partial(MADE[name], fused=True), [(70,), (3, 2)]
    results = []
    for ours in ((True, False), (False, True), (False, False)):
        params = parameters(shapes=shapes)
        optimizer, inner = clipped(params, make, GradientClipping.VALUE, 0.5)
        for step, wrapped in enumerate(ours):
            for param, grad in zip(params, gradients(step, shapes), strict=True):
                param.grad = grad if wrapped else grad.clamp(-0.5, 0.5)
            (optimizer if wrapped else inner).step()
        results.append(numbers(params, inner))
        loaded = make(parameters(shapes=shapes))
        loaded.load_state_dict(inner.state_dict())
    assert answers == [True, True]
    for one in results[:2]:
        assert list(one) == list(results[2])
        torch.testing.assert_close(one, results[2], rtol=1e-5, atol=1e-6)


@built
def test_a_parameter_that_starts_later_starts_from_its_own_state(answers):
    shapes = [(70,), (3, 2)]
    results = []
    for way in ("ours", "torch"):
        params = parameters(shapes=shapes)
        make = partial(torch.optim.Adam, fused=True)
        optimizer, inner = clipped(params, make, GradientClipping.VALUE, 100.0)
        for step in range(2):
            for param, grad in list(zip(params, gradients(step, shapes), strict=True))[: step + 1]:
                param.grad = grad
            (optimizer if way == "ours" else inner).step()
        results.append(numbers(params, inner))
    assert answers == [True, True]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@built
def test_our_own_optimizers_step_by_them_too(answers):
    params = parameters()
    optimizer = fused.Adam(params, lr=1e-2)
    other = torch.optim.Adam(theirs := parameters(), lr=1e-2)
    for step in range(3):
        for one, two, grad in zip(params, theirs, gradients(step), strict=True):
            one.grad = two.grad = grad
        optimizer.step()
        other.step()
    assert answers == [True] * 3
    torch.testing.assert_close(params, theirs, rtol=1e-5, atol=1e-6)
