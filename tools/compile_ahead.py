"""Compile the kernels of launches without a GPU, and report registers, spills and memory accesses.

The kernels that the launcher uses are replaced by recorders: tensors are on the CPU and nothing is computed,
but types, constants and the divisibility of addresses are those that the launcher gives.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keyedopt.fused.backends.triton import chunks, dense_launch, forward, launch, radix, sort, unpack

#: The target GPUs: A100; H100 and H200.
ARCHITECTURES = (80, 90)
#: The names by which launches find their kernels.
KERNELS: tuple[tuple[ModuleType, str], ...] = (
    (unpack, "unpack"),
    (sort, "write_keys"),
    (radix, "radix_pass"),
    (sort, "find_runs"),
    (forward, "pool"),
    (forward, "check_offsets"),
    (chunks, "sum_chunks"),
    (chunks, "fold_chunks"),
    (launch, "update"),
    (launch, "count_runs"),
    (launch, "collect"),
    (dense_launch, "update_dense"),
)
POINTERS = {
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


@dataclass(frozen=True)
class Compiled:
    """The compiled kernel of one launch.

    Args:
        kernel: its name.
        architecture: for which it was compiled, such as 90.
        constants: with which.
        warps: of a program.
        limit: registers that a thread may have, as the launcher asked.
        registers: that it has.
        stack: bytes of local memory a thread, which is where spilled registers are.
        accesses: how often each form of load and store of global memory is in it.
        together: whether all warps synchronize before the first branch, so that all take the same branch.
    """

    kernel: str
    architecture: int
    constants: dict[str, Any]
    warps: int
    limit: int | None
    registers: int
    stack: int
    accesses: Counter[str]
    together: bool = False

    def wide(self, kind: str) -> int:
        """Return how many accesses of a kind, "ld" or "st", move 16 bytes a thread.

        >>> Compiled("k", 90, {}, 4, None, 8, 0, Counter({"ld.global.v4.b32": 2})).wide("ld")
        2
        """
        wide = (f"{kind}.global.v4.b32", f"{kind}.global.v2.b64")
        return sum(number for access, number in self.accesses.items() if access in wide)


def compile_for(kernel: Any, arguments: dict[str, Any], architecture: int) -> Compiled:
    """Compile a kernel for arguments as a launch would."""
    options = {key: value for key, value in arguments.items() if key not in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = arguments[name]
        if parameter.is_constexpr:
            signature[name], constants[(index,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name], number = POINTERS[value.dtype], value.data_ptr()
        else:
            signature[name], number = "i32" if value < 2**31 else "i64", value
        if not parameter.do_not_specialize and number % 16 == 0:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=hints)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    used = _resources(made.asm["cubin"])
    accesses = Counter(re.findall(r"\b(?:ld|st)\.global[\w.:]*\.b\d+", made.asm["ptx"]))
    named = {name: arguments[name] for name, kind in signature.items() if kind == "constexpr"}
    limit = options.get("maxnreg")
    warps = options.get("num_warps", 4)
    together = warps == 1 or "bar.sync" in re.split(r"\bbra\b", made.asm["ptx"])[0]
    resources = used["REG"], used["STACK"]
    return Compiled(kernel.__name__, architecture, named, warps, limit, *resources, accesses, together)


def _resources(cubin: bytes) -> dict[str, int]:
    """Return the resources of a kernel, as listed by the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", text)}


class Recorder:
    """A replacement for a kernel: a launch compiles the kernel."""

    def __init__(self, kernel: Any, found: list[Compiled], architectures: tuple[int, ...]) -> None:
        self._kernel = kernel
        self._found = found
        self._architectures = architectures

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*args: Any, **named: Any) -> None:
            arguments = {**dict(zip(self._kernel.arg_names, args, strict=False)), **named}
            self._found.extend(compile_for(self._kernel, arguments, one) for one in self._architectures)

        return launched


@contextmanager
def compiled(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[list[Compiled]]:
    """Compile the kernels that the body launches, instead of launching them; return the list of results."""
    found: list[Compiled] = []
    patches = [
        patch.object(module, name, Recorder(getattr(module, name), found, architectures))
        for module, name in KERNELS
    ]
    for one in patches:
        one.start()
    try:
        yield found
    finally:
        for one in patches:
            one.stop()
