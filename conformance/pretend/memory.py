"""Tensors of the pretend device: plain `torch.Tensor` objects whose storage belongs to the device.

The storage of a tensor has an address that is mapped nowhere, so C++ code that reads the memory of the device
on the host crashes, as with the memory of a GPU. The Python object of the storage holds the CPU storage with
the numbers (``storage.host``); `to_host` gives a CPU tensor over it to the CPU's operators. A sparse tensor
holds dense indices and values of the device.
"""

import ctypes
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from keyedopt.conformance.pretend.devices import on_device

# torch has no kernels for the device, but the CPU's kernels that look only at shapes and storages work on it.
CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
SPARSE_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
CPU = torch.device("cpu")

_aten = torch.ops.aten
_alias = _aten.alias.default.redispatch
_set = _aten.set_.source_Storage_storage_offset.redispatch
_indices = _aten._indices.default.redispatch
_values = _aten._values.default.redispatch
_sparse = _aten._sparse_coo_tensor_with_dims_and_tensors.default.redispatch
_storage_at: Any = torch._C._construct_storage_from_data_pointer

# Beyond the 57 bits of the addresses of processes, so that the memory of the device is mapped nowhere.
_OFFSET = 1 << 57


def storage_on(device: torch.device, host: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage of the device for the bytes of a CPU storage."""
    size = host.nbytes()
    storage: Any = _storage_at(host.data_ptr() + _OFFSET if size else 0, device, size)
    storage.host = host
    return storage


def _memory(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the CPU storage of a storage of the device."""
    try:
        return storage.host  # type: ignore[attr-defined]  # set by storage_on
    except AttributeError:  # C++ made this one from the address of another
        return _storage_at(storage.data_ptr() - _OFFSET, CPU, storage.nbytes())


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the device over the memory of a CPU tensor."""
    if host.is_sparse:
        indices, values = (to_device(part, device) for part in (host._indices(), host._values()))
        return sparse(device, host, indices, values)
    tensor = _alias(CPU_KERNEL, _template(device, host.dtype))
    storage = storage_on(device, host.untyped_storage())
    return _set(CPU_KERNEL, tensor, storage, host.storage_offset(), host.shape, host.stride())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the memory of a tensor of the device."""
    if tensor.is_sparse:
        indices, values = (to_host(part(SPARSE_KERNEL, tensor)) for part in (_indices, _values))
        return sparse(CPU, tensor, indices, values)
    host = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return host.set_(
        _memory(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def sparse(
    device: torch.device, like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Return a sparse tensor of a device with the shape of another one."""
    dims, coalesced = (like.sparse_dim(), like.dense_dim(), like.shape), like.is_coalesced()
    kind = {"dtype": like.dtype, "layout": torch.sparse_coo, "device": device}
    with nullcontext() if device == CPU else on_device(device):  # C++ makes parts of it on the current device
        return _sparse(SPARSE_KERNEL, *dims, indices, values, **kind, is_coalesced=coalesced)


def take_over(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Give a tensor of the device the memory, shape and strides of a CPU tensor that an operator resized."""
    if tensor.is_sparse:
        _aten.copy_sparse_to_sparse_.default.redispatch(SPARSE_KERNEL, tensor, to_device(host, tensor.device))
        return tensor
    storage, memory = tensor.untyped_storage(), host.untyped_storage()
    if _memory(storage)._cdata != memory._cdata or storage.nbytes() != memory.nbytes():
        storage = storage_on(tensor.device, memory)
    return _set(CPU_KERNEL, tensor, storage, host.storage_offset(), host.shape, host.stride())


class _Name(ctypes.Structure):
    """The device of a DLPack tensor."""

    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


@cache
def _template(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a device and dtype, whose aliases get a storage in `to_device`.

    Python makes a plain tensor of any index of the device only from a DLPack capsule. This is the one of a
    CPU tensor, with its device, which follows the address of the data, replaced by DLPack's for PrivateUse1.
    """
    capsule = torch._C._to_dlpack(torch.empty(0, dtype=dtype, device=CPU))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    name = _Name.from_address(pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
    name.type, name.index = 12, device.index
    return torch._C._from_dlpack(capsule)
