"""What `keyedopt.fused` does to many tensors at once: the extension against torch, and loads without it."""

import os
import random

import pytest
import torch

from keyedopt.fused import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper
from keyedopt.fused.bulk import native
from keyedopt.fused.keyed import filling

if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert native is not None, "fused/bulk has not been built"
built = pytest.mark.skipif(native is None, reason="fused/bulk has not been built")

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def any_tensor(draw):
    shape = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randint(0, 3))]
    made = torch.ones(shape, dtype=draw.choice(DTYPES))
    turned = made.transpose(0, 1) if made.ndim > 1 else made
    return draw.choice([made, made, made, turned, made.expand(2, *shape), made.to("meta")])


@built
def test_a_copy_is_complete_or_not_made():
    draw, made = random.Random(0), 0
    for _ in range(600):
        live = [any_tensor(draw) for _ in range(draw.randint(0, 4))]
        new = [torch.zeros_like(one) if draw.random() < 0.9 else any_tensor(draw) for one in live]
        fits = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(live, new, strict=True))
        before = [one.clone() for one in live]
        done = native.copy(live, new)
        made += done
        assert fits or not done
        for one, expected in zip(live, new if done else before, strict=True):
            assert one.is_meta or torch.equal(one, expected)
    assert made > 200


@built
@pytest.mark.parametrize("count", [3, 5000])
def test_shared_memory_is_seen(count):
    live = list(torch.arange(3.0 * count).split(3))
    assert not native.copy(live, live[1:] + live[:1])
    assert not native.copy(live, [torch.zeros(3) for _ in live[1:]] + [live[0].view(3)])
    assert native.copy(live, live)
    assert native.copy(live, [torch.zeros(3) for _ in live])
    assert not any(one.any() for one in live)


@built
def test_a_number_that_is_stored_with_the_opposite_sign_is_not_copied():
    part = torch.tensor(1 + 2j).conj().imag
    assert part.is_neg()
    assert not native.copy([torch.zeros(())], [part])
    assert not native.copy([part], [torch.zeros(())])


@built
def test_the_sum_of_squares_does_not_depend_on_threads():
    tensors = [torch.randn(size) for size in (0, 1, 63, 1025, 1 << 21)]
    exact = sum(float(one.double().square().sum()) for one in tensors)
    sums = {native.square_sum(tensors, threads) for threads in (1, 2, 5)}
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(exact, rel=1e-8)
    assert native.square_sum([torch.ones(2, 2).t(), torch.ones(3).double()], 1) is None


@pytest.mark.parametrize("extension", [native, None])
def test_loads_with_and_without_the_extension(monkeypatch, extension):
    monkeypatch.setattr(filling, "native", extension)
    one, other = (trained(seed) for seed in (0, 1))
    saved = one.state_dict()["state"]
    other.load_state_dict({"state": dict(reversed(saved.items()))})
    for key, entry in other.state_dict()["state"].items():
        assert all(torch.equal(value, saved[key][name]) for name, value in entry.items())
    wrong = {**saved, "p2": {**saved["p2"], "sum": torch.ones(1)}}
    with pytest.raises(ValueError, match=r'"p2", "sum"'):
        trained(2).load_state_dict({"state": wrong})


@pytest.mark.parametrize(
    "factory", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
)
def test_clipping_in_the_step_is_clipping_before_it(factory):
    results = []
    for fused in (True, False):
        params = {f"p{i}": torch.nn.Parameter(torch.linspace(-1, 1, 70)) for i in range(3)}
        inner = KeyedOptimizerWrapper(
            params, lambda listed, fused=fused: factory(listed, lr=0.1, fused=fused)
        )
        optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, 0.5)
        for step in range(3):
            for number, param in enumerate(params.values()):
                param.grad = torch.linspace(-1, 2, 70) * (number + step) / 4
            optimizer.step()
        results.append([value for param in params.values() for value in (param.detach(), param.grad)])
        assert not hasattr(inner._optimizer, "grad_scale")
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def trained(seed):
    torch.manual_seed(seed)
    params = {f"p{i}": torch.nn.Parameter(torch.randn(4)) for i in range(5)}
    optimizer = KeyedOptimizerWrapper(params, lambda listed: torch.optim.Adagrad(listed, lr=0.1))
    for param in params.values():
        param.grad = torch.randn(4)
    optimizer.step()
    return optimizer
