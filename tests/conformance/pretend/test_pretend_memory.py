"""Tensors of the pretend accelerator: where they are, what shares memory, and who refuses them."""

import contextlib
import copy
import ctypes
import pickle
import signal
import subprocess
import sys

import pytest
import torch

import keyedopt.conformance.pretend  # noqa: F401 - registers the device
from keyedopt.conformance.run.device_seen import DeviceSeen

NPU, OTHER = "npu:0", "npu:1"


def ones(device=NPU):
    return torch.ones(2, 3, device=device)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: ones() + torch.ones(2, 3),
        lambda: torch.ones(2, 3) * ones(),
        lambda: torch.ones(2, 3).add_(ones()),
        lambda: ones().add_(torch.ones(2, 3)),
        lambda: torch.add(ones(), ones(), out=torch.empty(2, 3)),
        lambda: torch.zeros(()).add_(torch.ones((), device=NPU)),
        lambda: ones() + ones(OTHER),
        lambda: ones() + torch.ones((), device=OTHER),
        lambda: torch.cat([ones(), ones(OTHER)]),
        lambda: torch._foreach_add_([ones(), ones(OTHER)], [ones(), ones()]),
        lambda: torch.nn.functional.embedding(torch.tensor([1]), ones()),
        lambda: ones().index_select(0, torch.tensor([1], device=OTHER)),
        lambda: torch._fused_sgd_(
            *([ones()], [torch.ones(2, 3)], []),
            weight_decay=0.0,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        ),
    ],
)
def test_tensors_of_two_devices_are_refused(operation):
    with pytest.raises(RuntimeError, match="same device"):
        operation()


def test_numbers_and_indices_may_be_on_the_cpu_as_on_cuda():
    assert (ones() * torch.tensor(2.0)).tolist() == [[2.0] * 3] * 2
    assert ones()[torch.tensor([1])].tolist() == [[1.0] * 3]
    assert ones().add_(torch.tensor(1.0)).sum().item() == 12


def test_views_share_memory_and_versions():
    base = torch.zeros(2, 3, device=OTHER)
    row, flat, part = base[1], base.view(-1), base.narrow(1, 0, 2)
    row.fill_(5)
    assert base.tolist() == [[0.0] * 3, [5.0] * 3]
    assert flat[3:].tolist() == [5.0] * 3
    assert part.tolist() == [[0.0, 0.0], [5.0, 5.0]]
    assert base._version == row._version == 1
    assert row._base is base
    assert row.data_ptr() == base.data_ptr() + 3 * 4
    assert row.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert base.detach().data_ptr() == base.data.data_ptr() == base.data_ptr()
    assert torch.zeros(2, device=OTHER).data_ptr() != torch.zeros(2, device=OTHER).data_ptr()


def test_gradients_flow_through_views_and_in_place_operators():
    leaf = torch.ones(2, 3, device=OTHER, requires_grad=True)
    copied = leaf.clone()
    copied[0].mul_(3)
    copied.view(-1)[4:].zero_()
    copied.sum().backward()
    assert leaf.grad.tolist() == [[3.0] * 3, [1.0, 0.0, 0.0]]
    saved = leaf.exp()
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_gradients_cross_devices_and_accumulate():
    first = torch.nn.Parameter(ones(NPU))
    second = torch.nn.Parameter(ones(OTHER))
    seen = []
    first.register_hook(lambda grad: seen.append(grad.device))
    for _ in range(2):
        (first.to(OTHER) * second * 2).cpu().sum().backward()
    assert seen == [torch.device(NPU)] * 2
    assert (first.grad.device, second.grad.device) == (first.device, second.device)
    assert first.grad.tolist() == second.grad.tolist() == [[4.0] * 3] * 2
    first.grad = ones(NPU)
    with pytest.raises(RuntimeError, match="device"):
        first.grad = ones(OTHER)


def test_data_set_and_resize():
    tensor = ones()
    tensor.data = torch.full((4,), 2.0, device=NPU)
    assert tensor.tolist() == [2.0] * 4
    tensor.set_(torch.arange(6.0, device=NPU).untyped_storage(), 1, (2, 2), (2, 1))
    assert tensor.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    tensor.set_(ones())
    assert tensor.shape == (2, 3)
    tensor.resize_(3, 3)
    assert tensor.view(-1)[:6].tolist() == [1.0] * 6
    out = torch.empty(0, device=NPU)
    assert torch.add(tensor[:2], 1, out=out) is out
    assert out.tolist() == [[2.0] * 3] * 2
    assert tensor.set_().shape == (0,)
    with pytest.raises(TypeError, match="to numpy"):
        ones().numpy()


def test_copies_and_moves():
    source = torch.arange(6.0).view(2, 3)
    there = source.to(OTHER)
    assert torch.equal(there.cpu(), source)
    assert torch.equal(there.to(NPU).to("cpu", torch.float64), source.double())
    assert there.to(OTHER) is there
    there.copy_(torch.zeros(3))
    source.copy_(there)
    assert not source.any()
    assert torch.as_tensor(ones()[0, 0], device=OTHER).device == torch.device(OTHER)
    with pytest.raises(RuntimeError, match="there is no device 'npu:5' here: use npu:0 to npu:1"):
        torch.ones(1, device="npu:5")


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("current", [0, 1])
def test_errors_on_another_index_arrive(current, observed):
    """torch's guard of the device ends while the exception passes."""
    here, there = torch.ones(3, 3, device="npu:0"), torch.ones(3, 3, device="npu:1")
    with torch.npu.device(current), DeviceSeen("npu", ("acme",)) if observed else contextlib.nullcontext():
        with pytest.raises(RuntimeError, match="the number of sizes"):
            there[0] = here
        with pytest.raises(RuntimeError, match="same device"):
            there[here.long()]
        with pytest.raises(TypeError):
            there.new_tensor([1, "text"])
        assert torch.npu.current_device() == current


def test_parameters_stay_parameters():
    module = torch.nn.Linear(2, 2)
    module.to("npu")
    assert type(module.weight) is torch.nn.Parameter
    assert module.weight.is_leaf
    assert module.weight.device == torch.device(NPU)
    kept = module.weight
    assert module.npu(1).weight is kept
    assert kept.device == torch.device(OTHER)


def test_parameters_stay_the_same_objects_if_torch_swaps_them():
    """For PrivateUse1, torch makes new parameters otherwise (`torch._has_compatible_shallow_copy_type`)."""
    module = torch.nn.Linear(2, 2)
    kept = module.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert module.to("npu").weight is kept
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert kept.device == torch.device(NPU)


@pytest.mark.parametrize("device", [NPU, OTHER])
def test_copying_and_pickling(device):
    base = torch.arange(4.0, device=device)
    again, part = copy.deepcopy((base, base[1:]))
    part.fill_(7)
    assert again.device == torch.device(device)
    assert again.tolist() == [0.0, 7.0, 7.0, 7.0]
    loaded = pickle.loads(pickle.dumps(torch.nn.Parameter(base)))
    assert (type(loaded), loaded.device) == (torch.nn.Parameter, torch.device(device))
    assert loaded.tolist() == base.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert isinstance(copy.deepcopy(loaded), torch.nn.Parameter)


def test_printing():
    assert repr(torch.ones(2, device=OTHER)) == "tensor([1., 1.], device='npu:1')"
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), device=NPU, check_invariants=True)
    assert "device='npu:0', size=(3,), nnz=2" in repr(sparse)


def test_sparse_tensors():
    rows = torch.tensor([[2, 0, 2]], device=OTHER)
    sparse = torch.sparse_coo_tensor(rows, torch.ones(3, 2, device=OTHER), (4, 2), check_invariants=True)
    merged = sparse.coalesce()
    assert (sparse.is_coalesced(), merged.is_coalesced(), sparse._nnz()) == (False, True, 3)
    assert merged.indices().tolist() == [[0, 2]]
    assert merged.values().tolist() == [[1.0] * 2, [2.0] * 2]
    for part in (sparse, merged, merged.indices(), merged.values(), sparse.to_dense(), sparse.clone()):
        assert part.device == torch.device(OTHER)
    dense = torch.zeros(4, 2, device=OTHER).add_(sparse, alpha=3)
    assert dense.tolist() == [[3.0] * 2, [0.0] * 2, [6.0] * 2, [0.0] * 2]
    sparse.mul_(2)
    merged._values().mul_(5)
    assert sparse.to_dense()[2].tolist() == [4.0, 4.0]
    assert merged.to_dense()[2].tolist() == [10.0, 10.0]
    assert sparse.add_(merged).cpu().to_dense()[0].tolist() == [7.0, 7.0]
    assert sparse.to(NPU).device == torch.device(NPU)
    assert sparse.to("cpu", torch.float64).to_dense()[0].tolist() == [7.0, 7.0]
    assert torch.empty_like(dense, device="cpu").device == torch.device("cpu")
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(4, 2).add_(sparse)


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("device", [NPU, OTHER])
def test_sparse_gradients_of_embeddings(bag, device):
    kinds = (
        torch.nn.EmbeddingBag(5, 2, sparse=True, mode="sum") if bag else torch.nn.Embedding(5, 2, sparse=True)
    )
    there = copy.deepcopy(kinds).to(device)
    rows = torch.tensor([[1, 2], [1, 1]])
    kinds(rows).sum().backward()
    there(rows.to(device)).sum().backward()
    assert there.weight.grad.is_sparse
    assert there.weight.grad.device == torch.device(device)
    assert torch.equal(there.weight.grad.cpu().to_dense(), kinds.weight.grad.to_dense())
    for module in (kinds, there):
        torch.optim.SparseAdam(module.parameters()).step()
    assert torch.equal(there.weight.cpu(), kinds.weight)


def test_the_host_cannot_read_the_memory():
    code = (
        "import ctypes, torch, keyedopt.conformance.pretend;"
        "ctypes.c_float.from_address(torch.ones(1, device='npu').data_ptr()).value"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
    assert ones().data_ptr() > ctypes.c_size_t(-1).value >> 8
