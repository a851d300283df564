"""Where the operators of a target ran."""

import pytest
import torch

import keyedopt.conformance.pretend  # noqa: F401 - registers npu
from keyedopt.conformance.run.device_seen import DeviceSeen


def stepped(device, size=3):
    weight = torch.nn.Parameter(torch.ones(size, device=device))
    weight.grad = torch.ones(size, device=device)
    return torch.optim.SGD([weight], lr=0.1), weight


def seen(action, packages=("torch.optim",), wanted="npu"):
    with DeviceSeen(wanted, packages) as found:
        action()
    return found.device


@pytest.mark.parametrize(
    ("device", "size", "expected"), [("npu", 3, "npu"), ("cpu", 3, "cpu"), ("cpu", 2, None)]
)
def test_the_device_of_a_step(device, size, expected):
    optimizer, _ = stepped(device, size)
    assert seen(optimizer.step) == expected


def test_the_device_that_was_asked_for_counts_most():
    here, there = stepped("npu")[0], stepped("cpu")[0]
    assert seen(lambda: (there.step(), here.step(), there.step())) == "npu"


def test_another_index_is_another_device():
    assert seen(stepped("npu:0")[0].step, wanted="npu:1") == "npu:0"
    assert seen(stepped("npu:1")[0].step, wanted="npu:1") == "npu:1"


def test_what_others_run_does_not_count():
    _, weight = stepped("npu")
    assert seen(lambda: weight.detach() * 2) is None
    assert seen(stepped("npu")[0].step, packages=("acme",)) is None


def test_a_hook_of_the_backward_pass_counts():
    optimizer, weight = stepped("npu")
    weight.grad = None
    weight.register_post_accumulate_grad_hook(lambda param: optimizer.step())
    assert seen(lambda: (weight * 2).sum().backward()) == "npu"


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_counts_a_version(foreach):
    weight = stepped("npu")[1]
    optimizer, version = torch.optim.SGD([weight], lr=0.1, foreach=foreach), weight._version
    assert seen(optimizer.step) == "npu"
    assert weight._version == version + 1


def test_a_case_can_compile_inside():
    compiled = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    with DeviceSeen("npu", ("torch.optim",)):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
