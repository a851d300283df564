"""Registration of the pretend device with torch."""

import warnings
from functools import partial
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from keyedopt.conformance.pretend import autocast, device_guard, device_module, operators
from keyedopt.conformance.pretend.devices import NAME, device_of
from keyedopt.conformance.pretend.memory import CPU, storage_on
from keyedopt.conformance.pretend.streams import current_stream

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register the device with torch, once in a process.

    Raises:
        RuntimeError: another accelerator uses torch's only place for one, PrivateUse1.
    """
    if _libraries:
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone" or hasattr(torch, NAME):
        raise RuntimeError(
            f"the pretend accelerator {NAME!r} cannot be registered: {taken!r} is registered as PrivateUse1, "
            "of which torch has one; use a process that does not import it"
        )
    _setup_privateuseone_for_python_backend(NAME, backend_module=device_module)
    device_guard.install()
    library = torch.library.Library("_", "IMPL")
    for key in ("PrivateUse1", "SparsePrivateUse1"):
        library.fallback(operators.run, dispatch_key=key)
    library.fallback(torch.library.fallthrough_kernel, dispatch_key="AutocastPrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    own.impl("_to_copy", operators.to_copy, "PrivateUse1")
    autocast.register(own)
    # Defaults of torch for all devices come before the fallback. Some do not know sparse tensors of the
    # device, and others take two operators where one does it.
    _prefer_fallback(own, "SparseCPU", "SparsePrivateUse1")
    _prefer_fallback(own, "CompositeExplicitAutogradNonFunctional", "PrivateUse1")
    # Collectives of any process group that works on the CPU, such as Gloo's.
    collectives = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they replace torch's
        _prefer_fallback(collectives, "PrivateUse1", "PrivateUse1")
    _libraries.extend((library, own, collectives))
    _construct_storages()
    # That of C++ is the CPU's: see `device_guard`.
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]


def _prefer_fallback(library: torch.library.Library, kernels: str, key: str) -> None:
    """Let the operators of a library that have a kernel of one kind run like the others for a key."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(kernels):
        space, _, name = name.partition("::")
        if space == library.ns:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
            library.impl(name, partial(operators.run, op), key)


def _construct_storages() -> None:
    """Let ``torch.UntypedStorage(bytes, device="npu")`` work, for which torch wants an allocator in C++."""
    storages: Any = torch.UntypedStorage
    construct = storages.__new__

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != NAME:
            return construct(cls, *args, **kwargs)
        return storage_on(device_of(device), construct(cls, *args, **{**kwargs, "device": CPU}))

    storages.__new__ = new
