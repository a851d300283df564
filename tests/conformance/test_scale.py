"""What clipping and loading cost in a world of 1,000 ranks: messages, bytes, and time for 100,000 parameters.

One process has a fake process group of 1,000 ranks, whose collectives return at once, and counts them.
"""

import gc
import time

import pytest
import torch
from torch import distributed

from keyedopt import fused, reference
from keyedopt.reference.keyed.agreement import Agreement

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

WORLD = 1000


@pytest.fixture
def traffic(monkeypatch):
    """Count the collectives and bytes that this rank sends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    sent = []

    def all_reduce(tensor, op=None, group=None):
        sent.append(("all_reduce", tensor.numel() * tensor.element_size()))

    def all_gather_object(everywhere, value, group=None):
        sent.append(("all_gather_object", len(repr(value))))
        everywhere[:] = [value] * len(everywhere)

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed, "all_gather_object", all_gather_object)
    yield sent
    distributed.destroy_process_group()


def clip(package, count, steps):
    params = {f"p{n}": torch.nn.Parameter(torch.zeros(1)) for n in range(count)}
    for param in params.values():
        param.grad = torch.ones(1)
    keyed = package.KeyedOptimizerWrapper(params, lambda given: torch.optim.SGD(given, lr=0.1))
    optimizer = package.GradientClippingOptimizer(
        keyed,
        package.GradientClipping.NORM,
        1.0,
        enable_global_grad_clip=True,
        param_to_pgs={param: [distributed.group.WORLD] for param in params.values()},
    )
    for _ in range(steps):
        optimizer.clip_grad_norm_()


@slow
@pytest.mark.parametrize("package", [reference, fused], ids=["reference", "fused"])
def test_clipping_sends_the_same_whatever_the_number_of_parameters(package, traffic):
    found = []
    for count in (1, 100, 10_000):
        traffic.clear()
        clip(package, count, steps=3)
        found.append(list(traffic))
    assert found[0] == found[1] == found[2]
    assert [what for what, _ in found[0]] == ["all_gather_object"] + ["all_reduce"] * 6
    assert sum(size for _, size in found[0]) < 200


def test_a_vote_is_one_message_of_24_bytes(traffic):
    Agreement([distributed.group.WORLD]).accept([])
    assert traffic == [("all_reduce", 24)]


def seconds(package, count):
    params = {f"p{n}": torch.nn.Parameter(torch.zeros(1, device="meta")) for n in range(count)}
    state = {param: {"sum": torch.zeros(1)} for param in params.values()}
    optimizer = package.KeyedOptimizer(params, state, [{"params": list(params.values())}])
    gc.collect()
    gc.disable()  # a collection goes over all objects of the process, also those of other tests
    try:
        began = time.process_time()
        optimizer.load_state_dict(optimizer.state_dict(), process_group=distributed.group.WORLD)
        return time.process_time() - began
    finally:
        gc.enable()


@slow
@pytest.mark.parametrize("package", [reference, fused], ids=["reference", "fused"])
def test_saving_and_loading_is_linear_in_the_parameters(package, traffic):
    seconds(package, 1000)
    few, many = (min(seconds(package, count) for _ in range(2)) for count in (10_000, 100_000))
    assert many < 30 * few, f"{few:.2f} s for 10,000 parameters, {many:.2f} s for 100,000"
    assert set(traffic) == {("all_reduce", 24)}
