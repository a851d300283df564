"""Training, mixed precision, checkpoints and process groups on the pretend accelerator."""

import io
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import keyedopt.conformance.pretend  # noqa: F401 - registers the device
from keyedopt import fused
from keyedopt.conformance.suite.support.doubles import single_rank
from keyedopt.conformance.suite.support.mirror import mirrored_ranks
from keyedopt.fused.dense.scaling import scale_all

OPTIONS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
DEVICES = ("npu:0", "npu:1")


def train(kind, options, device, steps=3):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4).to(device)) for _ in range(2)]
    optimizer = kind(params, lr=0.1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        sum((param**2).sum() for param in params).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_of_torch_train_as_on_the_cpu(kind, options, device):
    expected, _ = train(kind, options, "cpu")
    params, optimizer = train(kind, options, device)
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-6, atol=0)
    for param in params:
        for name, entry in optimizer.state[param].items():
            assert entry is None or name == "step" or entry.device == torch.device(device)


def test_one_optimizer_over_two_devices():
    params = [torch.nn.Parameter(torch.ones(2, device=device)) for device in DEVICES]
    optimizer = torch.optim.Adam(params, lr=0.1, foreach=True)
    sum((param**2).sum().to("npu:0") for param in params).backward()
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    assert float(norm) == pytest.approx(4.0)
    assert params[0].tolist() == params[1].tolist() != [1.0, 1.0]


def test_autocast():
    layer = torch.nn.Linear(2, 2, device="npu")
    x = torch.ones(3, 2, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        half = layer(x)
        assert (half.dtype, half.sum().dtype, (half @ half.T).dtype) == (
            torch.bfloat16,
            torch.float32,
            torch.bfloat16,
        )
        half.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize(("gradient", "steps", "scale"), [(1.0, 1, 8.0), (float("inf"), 0, 4.0)])
def test_grad_scaler(gradient, steps, scale):
    param = torch.nn.Parameter(torch.ones(2, device="npu:1"))
    optimizer = torch.optim.SGD([param], lr=0.5)
    scaler = torch.amp.GradScaler("npu", init_scale=8.0)
    scaler.scale((param * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1 - 0.5 * steps] * 2
    assert scaler.get_scale() == scale


@pytest.mark.parametrize("place", [None, "cpu", "npu:1", {"npu:0": "npu:1"}])
@pytest.mark.parametrize("weights_only", [True, False])
def test_saving_and_loading(place, weights_only):
    base = torch.arange(4.0, device="npu:0")
    file = io.BytesIO()
    torch.save({"base": base, "part": base[1:], "param": torch.nn.Parameter(base.clone())}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=place, weights_only=weights_only)
    loaded["part"].fill_(7)
    expected = {None: "npu:0", "cpu": "cpu"}.get(place, "npu:1") if not isinstance(place, dict) else "npu:1"
    assert {value.device for value in loaded.values()} == {torch.device(expected)}
    assert loaded["base"].tolist() == [0.0, 7.0, 7.0, 7.0]
    assert isinstance(loaded["param"], torch.nn.Parameter)


def test_distributed_checkpoints(tmp_path):
    saved = {"a": torch.arange(3.0, device="npu"), "inner": {"b": torch.ones(2, device="npu")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, checkpoint_id=tmp_path)
        loaded = {"a": torch.zeros(3, device="npu:1"), "inner": {"b": torch.zeros(2)}}
        dcp.load(loaded, checkpoint_id=tmp_path)
    assert loaded["a"].tolist() == [0.0, 1.0, 2.0]
    assert loaded["inner"]["b"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("device", DEVICES)
def test_dtensors(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with single_rank(), torch.npu.device(device):
        mesh = init_device_mesh("npu", (1,))
        for placement in (Shard(0), Replicate()):
            param = torch.nn.Parameter(distribute_tensor(torch.ones(4, device=device), mesh, [placement]))
            (param * 3).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_([param], 1.0)
            assert float(norm.full_tensor()) == 6.0
            assert param.grad.full_tensor().device == torch.device(device)
            torch.optim.Adam([param], lr=0.5).step()
            assert param.to_local().tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(("ranks", "size"), [(single_rank, 1), (mirrored_ranks, 2)])
def test_collectives(ranks, size):
    with ranks():
        tensor = torch.ones(2, device="npu:1")
        torch.distributed.all_reduce(tensor)
        gathered = [torch.zeros(2, device="npu:1") for _ in range(size)]
        torch.distributed.all_gather(gathered, tensor)
        torch.distributed.broadcast(tensor, 0)
    assert tensor.tolist() == [size] * 2
    assert [part.tolist() for part in gathered] == [[size] * 2] * size


def test_pinned_memory_is_memory_of_the_cpu():
    assert torch.empty(2, pin_memory=True).device == torch.device("cpu")
    assert torch.ones(2).pin_memory().to("npu", non_blocking=True).tolist() == [1.0, 1.0]


def test_a_second_accelerator_is_an_error():
    code = "import torch; torch.utils.rename_privateuse1_backend('acme');import keyedopt.conformance.pretend"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: the pretend accelerator 'npu' cannot be registered: 'acme' is" in done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_scaled_in_every_dtype(dtype):
    """The kernel of torch's `GradScaler` lacks bfloat16 on CUDA."""
    given = [torch.tensor([3.0, -5.0], dtype=dtype), torch.tensor([0.1], dtype=dtype)]
    tensors = [one.to("npu") for one in given]
    factor = torch.tensor(0.3)
    scale_all(tensors, factor.to("npu"))
    for one, before in zip(tensors, given, strict=True):
        assert torch.equal(one.cpu(), (before.double() * factor.double()).to(dtype))
    if dtype is torch.bfloat16:
        one, inf = torch.ones(1, device="npu"), torch.zeros(1, device="npu")
        with pytest.raises(NotImplementedError, match=r"not implemented for torch\.bfloat16"):
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, inf, one)


def test_dense_gradients_are_checked_again_when_something_has_changed(monkeypatch):
    checked = []
    real = fused.Adam.check_shapes
    monkeypatch.setattr(
        fused.Adam, "check_shapes", lambda self, *given: checked.append(1) or real(self, *given)
    )
    params = [torch.nn.Parameter(torch.ones(2, 2).to("npu")) for _ in range(2)]
    optimizer = fused.Adam(params, lr=0.1)
    for param in params:
        param.grad = torch.ones(2, 2).to("npu")
    for _ in range(4):
        optimizer.step()
    assert len(checked) == 4, "before and after the state was made"
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(1, 2).to("npu")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the state 'exp_avg' is"):
            optimizer.step()
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(2, 2).to("npu")
    optimizer.step()
