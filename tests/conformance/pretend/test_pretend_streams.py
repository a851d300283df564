"""Work of the pretend accelerator that the host sees late, and where the host waits for it."""

import threading

import pytest
import torch

from keyedopt.conformance.pretend import synchronizations
from keyedopt.conformance.suite.support.synchronizations import host_synchronizations


@pytest.fixture(autouse=True)
def synchronized():
    yield
    for index in range(2):
        torch.npu.synchronize(index)
    torch.npu.set_device(0)


def fetch(device="npu", dtype=torch.float32):
    """Copy [1, 1] to the host without waiting."""
    return torch.ones(2, device=device, dtype=dtype).to("cpu", non_blocking=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_a_copy_to_the_host_is_poison_until_the_host_waits(dtype):
    copied = fetch(dtype=dtype)
    assert not (copied == 1).any()
    torch.npu.synchronize()
    assert (copied == 1).all()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: torch.npu.synchronize(),
        lambda: torch.accelerator.synchronize(),
        lambda: torch.npu.current_stream().synchronize(),
        lambda: torch.npu.current_stream().record_event().synchronize(),
        lambda: torch.accelerator.current_stream().synchronize(),
        lambda: torch.ones(1, device="npu").item(),
        lambda: torch.ones(1, device="npu").cpu(),
    ],
)
def test_these_wait(wait):
    copied = fetch()
    wait()
    assert copied.tolist() == [1.0, 1.0]


def test_these_do_not_wait():
    copied = fetch()
    torch.ones(2, device="npu") + 1
    torch.npu.synchronize(1)
    torch.ones(1, device="npu:1").item()
    torch.npu.Stream().synchronize()
    assert copied.isnan().all()


def test_an_event_covers_what_came_before_it():
    before = fetch()
    event = torch.npu.Event()
    assert event.query()
    event.record()
    after = fetch()
    assert not event.query()
    assert event.query()
    assert before.tolist() == [1.0, 1.0]
    assert after.isnan().all()


def test_streams_are_queues_of_their_own():
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() is side
        copied = fetch()
        event = side.record_event()
    assert torch.npu.current_stream() is torch.npu.default_stream()
    torch.npu.current_stream().synchronize()
    assert copied.isnan().all()
    torch.npu.current_stream().wait_event(event)
    torch.npu.current_stream().synchronize()
    assert copied.tolist() == [1.0, 1.0]


def test_events_measure_time():
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    start.record()
    with pytest.raises(ValueError, match="two recorded events"):
        start.elapsed_time(end)
    end.record()
    assert 0 <= start.elapsed_time(end) < 10_000


def test_the_current_device():
    torch.npu.set_device(1)
    assert torch.ones(1, device="npu").device == torch.device("npu:1")
    with torch.npu.device(0):
        assert (torch.npu.current_device(), torch.accelerator.current_device_index()) == (0, 0)
    assert torch.npu.current_device() == 1
    with torch.accelerator.device_index(0):
        assert torch.npu.current_device() == 0
    torch.accelerator.set_device_index(0)
    assert torch.npu.current_device() == 0
    assert torch.accelerator.device_count() == torch.npu.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    seen = []
    torch.npu.set_device(1)
    thread = threading.Thread(target=lambda: seen.append(torch.npu.current_device()))
    thread.start()
    thread.join()
    assert seen == [0]


X = torch.arange(4.0)
WAITS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copy to the host": lambda x: torch.empty(4).copy_(x),
    "copy from the host": lambda x: torch.tensor([1.0], device=x.device),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "boolean index": lambda x: x[x > 1],
    "index on the CPU": lambda x: x[torch.tensor([1])],
    "boolean write": lambda x: x.index_put_((x > 1,), x[2:].clone()),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "coalesce": lambda x: torch.sparse_coo_tensor(x.long()[None], x, (4,), check_invariants=False).coalesce(),
    "synchronize": lambda x: torch.npu.synchronize(),
}
RUNS_ON = {
    "arithmetic": lambda x: (x * 2).add_(x).sqrt(),
    "a number": lambda x: x * torch.tensor(2.0) + 1,
    "index": lambda x: x[x.long()],
    "masked write": lambda x: x.__setitem__(x > 1, 0.0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "full": lambda x: torch.full((3,), 2.0, device=x.device),
    "views": lambda x: x.view(2, 2).T.contiguous(),
    "copy without waiting": lambda x: x.to("cpu", non_blocking=True),
    "other device": lambda x: x.to("npu:1"),
    "clipping": lambda x: torch.nn.utils.clip_grad_norm_([_with_gradient(x)], 1.0),
    "capturable": lambda x: torch.optim.Adam([_with_gradient(x)], capturable=True, foreach=True).step(),
}


def _with_gradient(x):
    param = torch.nn.Parameter(x)
    param.grad = torch.ones_like(x)
    return param


@pytest.mark.parametrize("name", WAITS)
def test_the_host_waits_in(name):
    x = X.to("npu")
    with host_synchronizations(x.device) as waits:
        WAITS[name](x)
    assert len(waits) >= 1
    assert f"in {__file__}:" in waits[0]


@pytest.mark.parametrize("name", RUNS_ON)
def test_the_host_does_not_wait_in(name):
    x = X.to("npu")
    with host_synchronizations(x.device) as waits:
        RUNS_ON[name](x)
    assert waits == []


def test_waits_in_a_backward_pass_are_listed_too():
    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = X.to("npu:1").requires_grad_()
    with synchronizations() as outer, synchronizations() as inner:
        Waiting.apply(x).sum().backward()
    assert (
        [wait.operator for wait in outer]
        == [wait.operator for wait in inner]
        == ["aten::_local_scalar_dense"]
    )
    assert __file__ in outer[0].place


def test_a_device_that_nobody_watches_is_an_error():
    with host_synchronizations(torch.device("cpu")) as waits:
        torch.ones(1).item()
    assert waits == []
    with pytest.raises((NotImplementedError, RuntimeError)), host_synchronizations(torch.device("xpu")):
        pass
