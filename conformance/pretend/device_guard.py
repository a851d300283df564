"""What C++ code of torch asks about the device: how many there are, which one is current.

torch 2.13 lets Python register a device guard, but calls only its ``type_`` (``torch/csrc/acc/Module.cpp``):
there is one device, setting the current one does nothing, and the backward pass on a second index would fail
an internal assertion. So the table of virtual functions of the guard is replaced by a copy in which some
entries call Python. The order of the entries comes from the header that torch installs.
"""

import ctypes
import mmap
import os
import platform
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from keyedopt.conformance.pretend.devices import COUNT, KEY, SET, current_device, exchange_device
from keyedopt.conformance.pretend.streams import synchronize

_ROOT = os.path.dirname(torch.__file__)
_TYPE = 20  # c10::DeviceType::PrivateUse1
_this, _index, _device = ctypes.c_void_p, ctypes.c_int8, ctypes.c_uint16
#: What torch's C++ code still uses: without a reference, Python would free it.
_kept: list[Any] = []


#: Returns a ``c10::Stream`` of zeros, the CPU's, in two registers, as no function of Python can.
_CPU_STREAM = bytes.fromhex(
    {"x86_64": "31c031d2c3", "aarch64": "000080d2010080d2c0035fd6"}[platform.machine()]
)


def _pack(index: int) -> int:
    """Return a ``c10::Device``: a byte for the type and one for the index."""
    return _TYPE | index << 8


def _exchange(this: int, device: int) -> int:
    index = device >> 8
    # torch sets -1 to change nothing.
    return _pack(exchange_device(index) if index < COUNT else current_device())


def _set(this: int, device: int) -> None:
    _exchange(this, device)


def _synchronize_all() -> None:
    """Wait for all devices: streams and events of C++, such as `torch.Event`, do not say which."""
    for index in range(COUNT):
        synchronize(index)


_GUARD: dict[str, tuple[Any, Callable[..., Any]]] = {
    "deviceCount": (ctypes.CFUNCTYPE(_index, _this), lambda this: COUNT),
    "getDevice": (ctypes.CFUNCTYPE(_device, _this), lambda this: _pack(current_device())),
    "setDevice": (ctypes.CFUNCTYPE(None, _this, _device), _set),
    "exchangeDevice": (ctypes.CFUNCTYPE(_device, _this, _device), _exchange),
    "synchronizeStream": (ctypes.CFUNCTYPE(None, _this, _this), lambda this, stream: _synchronize_all()),
    "synchronizeEvent": (ctypes.CFUNCTYPE(None, _this, _this), lambda this, event: _synchronize_all()),
    "synchronizeDevice": (ctypes.CFUNCTYPE(None, _this, _index), lambda this, index: synchronize(index)),
}


def install() -> None:
    """Let the guard and the hooks that are registered with torch answer for all indices."""
    core, cpu = (ctypes.CDLL(os.path.join(_ROOT, "lib", f"lib{name}.so")) for name in ("c10", "torch_cpu"))
    registry = (ctypes.c_void_p * (_TYPE + 1)).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
    entries = _virtual_functions("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
    # The backward pass puts a guard on the stream of a node. When a hook raises, the guard of a stream of
    # this device would call Python before the exception has arrived; that of the CPU's does nothing.
    guard = registry[_TYPE]
    assert guard is not None, "torch registered the guard"
    code = {"getStream": _CPU_STREAM, "uncheckedSetDevice": _set_without_python()}
    _replace(guard, entries, _GUARD, machine_code=code)
    hooks, allocator = cpu._ZN2at6detail19getPrivateUse1HooksEv, core._ZN3c1015GetCPUAllocatorEv
    hooks.restype = allocator.restype = ctypes.c_void_p
    # Pinned memory is memory of the CPU.
    pinned = {
        "getPinnedMemoryAllocator": (ctypes.CFUNCTYPE(ctypes.c_void_p, _this), lambda this: allocator())
    }
    entries = [
        entry
        for struct in ("AcceleratorHooksInterface", "PrivateUse1HooksInterface")
        for entry in _virtual_functions(f"ATen/detail/{struct}.h", struct)
    ]
    _replace(hooks(), entries, pinned)


def _set_without_python() -> bytes:
    """Return code that makes the device of an index the current one of the thread, except for -1.

    A guard ends with it, also while an exception of Python passes, which would be lost if Python ran.
    """
    key, function = KEY.to_bytes(4, "little"), SET.to_bytes(8, "little")
    if platform.machine() == "aarch64":
        # ubfx w1, w1, 8, 8; cmp w1, 127; b.hi end; ldr w0, key; ldr x16, function; br x16; end: ret
        code = "213c0853 3ffc0171 88000054 80000018 90000058 00021fd6 c0035fd6"
        return bytes.fromhex(code) + key + function
    # movzx eax, si; shr eax, 8; cmp al, 127; ja end; mov esi, eax; mov edi, key; mov rax, function; jmp rax
    begin = bytes.fromhex("0fb7c6 c1e808 3c7f 7713 89c6 bf")
    return begin + key + bytes.fromhex("48b8") + function + bytes.fromhex("ffe0 c3")


def _virtual_functions(header: str, struct: str) -> list[str]:
    """Return the virtual functions of a struct in a header of torch, in the order of their table."""
    with open(os.path.join(_ROOT, "include", header), encoding="utf-8") as file:
        _, _, text = file.read().partition(f"_API {struct} ")
    code = re.sub(r"/\*.*?\*/|//[^\n]*", "", text.partition("\n};")[0], flags=re.DOTALL)
    names = re.findall(r"virtual [^(~]*?(~?\w+)\(", code)
    return [entry for name in names for entry in ([name, ""] if name.startswith("~") else [name])]


def _replace(
    this: int,
    entries: list[str],
    functions: dict[str, tuple[Any, Callable[..., Any]]],
    machine_code: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Give a C++ object a copy of its table of virtual functions, in which some are replaced."""
    word = ctypes.sizeof(ctypes.c_void_p)
    pointer = ctypes.c_void_p.from_address(this)
    # Two words before the functions belong to the table.
    kind = ctypes.c_void_p * (2 + len(entries))
    assert pointer.value is not None, "an object with virtual functions has their table"
    table = kind.from_buffer_copy(kind.from_address(pointer.value - 2 * word))
    for name, (signature, function) in functions.items():
        callback = signature(function)
        table[2 + entries.index(name)] = ctypes.cast(callback, ctypes.c_void_p).value
        _kept.append(callback)
    for name, code in machine_code.items():
        memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        memory.write(code)
        table[2 + entries.index(name)] = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _kept.append(memory)
    _kept.append(table)
    pointer.value = ctypes.addressof(table) + 2 * word
