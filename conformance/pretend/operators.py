"""The operators of the pretend device: those of the CPU, over the memory of the tensors.

Operators that torch composes of others arrive here as those others. What an operator promises about aliases
comes from its schema, which is read once (`plan_of`).
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from keyedopt.conformance.pretend import generators
from keyedopt.conformance.pretend.devices import device_of, is_pretend, on_device
from keyedopt.conformance.pretend.memory import (
    CPU,
    CPU_KERNEL,
    SPARSE_KERNEL,
    take_over,
    to_device,
    to_host,
)
from keyedopt.conformance.pretend.schemas import Plan, plan_of
from keyedopt.conformance.pretend.streams import copy_late, wait

_aten = torch.ops.aten
_plans: dict[Any, Plan] = {}
#: Operators of lists whose kernel for CUDA lacks a dtype that the CPU's has: here they lack it too.
_LACKING = {_aten._amp_foreach_non_finite_check_and_unscale_.default: torch.bfloat16}


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that torch's dispatcher calls for the device."""
    special = _SPECIAL.get(op)
    if special is not None:
        return special(*args, **kwargs)
    lacking = _LACKING.get(op)
    if lacking is not None and any(tensor.dtype is lacking for tensor in args[0]):
        raise NotImplementedError(f"{op} is not implemented for {lacking}")
    plan = _plans.get(op)
    if plan is None:
        plan = _plans[op] = plan_of(op)
    if plan.view:
        return op.redispatch(SPARSE_KERNEL if args[0].is_sparse else CPU_KERNEL, *args, **kwargs)
    call = _Call()
    on_host = [call.to_host(value) for value in args]
    named = {name: call.to_host(value) for name, value in kwargs.items()}
    device: Any = call.device
    if call.others:
        call.check_others(op, plan, args, kwargs)
    if "device" in named:
        wanted = named["device"] or device
        if not is_pretend(torch.device(wanted)):
            return op(*on_host, **named)
        device, named["device"] = device_of(wanted), CPU
    if plan.waits or (plan.indexing and _needs_host(plan, args, call.others)):
        wait(device, plan.name)
    for position in plan.tensors:
        if position < len(on_host) and type(on_host[position]) in (int, float, bool, complex):
            op = op.overloadpacket  # which takes a number
            break
    result = generators.run(op, plan, device, on_host, named) if plan.random else op(*on_host, **named)
    for key in plan.written:
        given: Any = kwargs[key] if isinstance(key, str) else args[key]
        memory: Any = named[key] if isinstance(key, str) else on_host[key]
        if isinstance(given, torch.Tensor) and (given.is_sparse or given.shape != memory.shape):
            take_over(given, memory)
    if isinstance(result, tuple):
        keys = plan.returned
        return tuple(_given(key, args, kwargs, item, device) for key, item in zip(keys, result, strict=True))
    return _given(plan.returned[0], args, kwargs, result, device) if plan.returned else result


def _given(key: int | str | None, args: Any, kwargs: Any, result: Any, device: torch.device) -> Any:
    """Return a result: the argument that it is, or the new tensor on the device."""
    if key is not None:
        return kwargs[key] if isinstance(key, str) else args[key]
    if isinstance(result, torch.Tensor):
        return to_device(result, device)
    if isinstance(result, list):
        return [_given(None, args, kwargs, item, device) for item in result]
    return result


class _Call:
    """The device of the arguments of one call, and those that are elsewhere."""

    __slots__ = ("device", "others")

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.others: list[torch.Tensor] = []

    def to_host(self, value: Any) -> Any:
        """Return an argument with its tensors on the CPU.

        Raises:
            RuntimeError: the tensors are on two indices of the device.
        """
        if isinstance(value, torch.Tensor):
            device = value.device
            if device != self.device:
                if not is_pretend(device):
                    self.others.append(value)
                    return value
                if self.device is not None:
                    raise _two_devices(self.device, device)
                self.device = device
            return to_host(value)
        if isinstance(value, (list, tuple)) and any(isinstance(item, (torch.Tensor, list)) for item in value):
            return [self.to_host(item) for item in value]
        return value

    def check_others(self, op: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RuntimeError for tensors elsewhere, except for numbers and indices on the CPU, as on CUDA."""
        written = [kwargs.get(key) if isinstance(key, str) else args[key] for key in plan.written]
        for tensor in self.others:
            index = plan.indexing and any(tensor is item for item in args[1])
            number = tensor.dim() == 0 and not any(tensor is item for item in written)
            if tensor.device.type != "cpu" or not (index or number):
                raise _two_devices(self.device, tensor.device, op)


def _two_devices(one: torch.device | None, other: torch.device, op: Any = "") -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other}! {op}".rstrip()
    )


def _needs_host(plan: Plan, args: tuple[Any, ...], others: list[torch.Tensor]) -> bool:
    """Return whether indexing needs the host: to count the rows of a mask or to copy indices."""
    indices = [index for index in args[1] if index is not None]
    if not all(is_pretend(index.device) for index in indices):
        return True
    if not any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return False
    # As on CUDA, one number is written by a mask without a count of its rows.
    fills = len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    return not fills


def _copy_from(
    source: torch.Tensor | complex, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy between devices, or to and from the CPU; ``copy_`` also takes a number."""
    if not isinstance(source, torch.Tensor):
        to_host(target).fill_(source)
        return target
    if is_pretend(target.device):
        if not is_pretend(source.device):
            if not non_blocking:
                wait(target.device, "copy from the host")
            numbers = source
        else:
            numbers = to_host(source)
        to_host(target).copy_(numbers)
    elif non_blocking:
        copy_late(target, to_host(source).to(target.dtype, copy=True).expand(target.shape), source.device)
    else:
        wait(source.device, "copy to the host")
        target.copy_(to_host(source))
    return target


def to_copy(tensor: torch.Tensor, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """Copy a tensor; torch's own takes pinned memory for a copy to the host that does not block."""
    kwargs["memory_format"] = kwargs.get("memory_format") or torch.preserve_format
    non_blocking, _ = kwargs.pop("non_blocking", False), kwargs.pop("pin_memory", None)
    # torch.tensor copies with its dispatch modes switched off but not removed; torch then looks for the
    # fallback of the device among the operators that were registered one by one.
    hidden = torch._C._len_torch_dispatch_stack() > 0
    with _disable_current_modes() if hidden else contextlib.nullcontext():
        empty = _aten.empty_like.default(tensor, dtype=dtype, device=device or tensor.device, **kwargs)
        return _aten.copy_.default(empty, tensor, non_blocking)


def _resize_(
    tensor: torch.Tensor, size: Any, *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    memory = to_host(tensor)
    memory.resize_(size) if memory_format is None else memory.resize_(size, memory_format=memory_format)
    return take_over(tensor, memory)


def _empty(
    size: Any, *, device: torch.device, layout: torch.layout | None = None, **kwargs: Any
) -> torch.Tensor:
    kwargs.pop("pin_memory", None)
    device = device_of(device)
    if layout == torch.sparse_coo:
        return _empty_sparse(size, device=device, layout=layout, **kwargs)
    return to_device(torch.empty(size, device=CPU, **kwargs), device)


def _through(op: Any, keys: Any) -> Callable[..., Any]:
    """Return the CPU's kernel of an operator that works on tensors of any device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_pretend(torch.device(kwargs.get("device", CPU))):
            return op.redispatch(keys, *args, **kwargs)
        device = kwargs["device"] = device_of(kwargs["device"])
        with on_device(device):  # C++ makes empty indices and values on the current device
            return op.redispatch(keys, *args, **kwargs)

    return run


_empty_sparse = _through(_aten.empty.memory_format, SPARSE_KERNEL)
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten._copy_from.default: _copy_from,
    _aten.resize_.default: _resize_,
    _aten.empty.memory_format: _empty,
    _aten.set_.default: lambda tensor: take_over(tensor, torch.empty(0, dtype=tensor.dtype, device=CPU)),
    _aten.record_stream.default: lambda tensor, stream: None,
}
for _op in (_aten.set_.source_Storage, _aten.set_.source_Storage_storage_offset, _aten.set_.source_Tensor):
    _SPECIAL[_op] = _through(_op, CPU_KERNEL)
for _packet in (
    _aten._coalesced_,
    _aten._dimI,
    _aten._dimV,
    _aten._indices,
    _aten._nnz,
    _aten._sparse_coo_tensor_with_dims,
    _aten._sparse_coo_tensor_with_dims_and_tensors,
    _aten._values,
    _aten.copy_sparse_to_sparse_,
    _aten.dense_dim,
    _aten.indices,
    _aten.is_coalesced,
    _aten.sparse_dim,
    _aten.sparse_resize_,
    _aten.sparse_resize_and_clear_,
    _aten.values,
):
    _op = _packet.default
    _SPECIAL[_op] = _through(_op, SPARSE_KERNEL)
