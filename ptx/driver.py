"""A driver for Triton without a GPU: kernels are compiled as for a GPU, and launches run in the machine."""

import gc
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from keyedopt.ptx.machine import Report, Schedule, load, run

#: The most bytes of shared memory of a program, by architecture.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448}


class FoundError(Exception):
    """A launch did something that hardware may do wrong."""


@dataclass
class Session:
    """What runs while `executing` is active.

    Args:
        architecture: for which kernels are compiled, such as 90.
        schedule: of the next launch, by the number of the launch.
        change: makes the PTX that runs of the kernel's name and PTX; to plant faults.
        strict: whether a launch with findings raises `FoundError`.

    Attributes:
        reports: of all launches.
    """

    architecture: int
    schedule: Callable[[int], Schedule]
    change: Callable[[str, str], str] | None = None
    strict: bool = True
    reports: list[Report] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """All findings, one line each."""
        return [f"{one.kernel}, {one.schedule}: {found}" for one in self.reports for found in one.findings]

    def launch(
        self, kernel: Any, types: Sequence[str], grid: tuple[int, int, int], values: Sequence[Any]
    ) -> None:
        """Run a compiled kernel.

        Raises:
            FoundError: it did something wrong, and the session is strict.
        """
        ptx = kernel.ptx if self.change is None else self.change(kernel.name, kernel.ptx)
        given = [_bits(kind, value) for kind, value in zip(types, values, strict=True)]
        schedule = self.schedule(len(self.reports))
        memory = memory_of([value for value in values if isinstance(value, Tensor)])
        report = run(load(ptx), grid, kernel.warps, kernel.shared, given, memory, schedule)
        self.reports.append(report)
        if report.findings and self.strict:
            found = "\n".join(f"  {one}" for one in report.findings)
            raise FoundError(f"{report.kernel}{list(grid)}, {schedule}:\n{found}")


def memory_of(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Return what a kernel with these arguments may access: begin, end and granule of each piece of memory.

    These are the arguments, and tensors whose address is an element of an int64 argument.
    """
    addresses = {
        address for one in tensors if one.dtype is torch.int64 and one.numel() < 1 << 20
        for address in one.flatten().tolist() if address > 1 << 20
    }  # fmt: skip
    named = [one for one in _live_tensors() if one.data_ptr() in addresses] if addresses else []
    pieces = sorted(
        (one.data_ptr(), one.data_ptr() + _extent(one), one.element_size())
        for one in (*tensors, *named)
        if one.numel()
    )
    joined: list[tuple[int, int, int]] = []
    for begin, end, granule in pieces:
        if joined and begin < joined[-1][1]:
            first, last, other = joined[-1]
            joined[-1] = (first, max(last, end), min(other, granule))
        else:
            joined.append((begin, end, granule))
    return joined


def _extent(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _live_tensors() -> list[Tensor]:
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.device.type == "cpu"]


def _bits(kind: str, value: Any) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if kind in ("fp32", "f32"):
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    if kind in ("fp64", "f64"):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)


@dataclass(frozen=True)
class _Kernel:
    name: str
    ptx: str
    warps: int
    shared: int


class _Driver:
    """What Triton asks of a driver."""

    def __init__(self, session: Session, idle: list[str] | None = None) -> None:
        from triton.backends.compiler import GPUTarget

        driver, target = self, GPUTarget("cuda", session.architecture, 32)

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                from triton.runtime.cache import get_cache_manager

                path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")
                with open(path, encoding="utf-8") as file:
                    ptx = file.read()
                self.kernel = _Kernel(metadata.name, ptx, metadata.num_warps, metadata.shared)
                self.kinds = list(source.signature.values())

            def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
                given = [
                    (kind, value)
                    for kind, value in zip(self.kinds, rest[-len(self.kinds) :], strict=True)
                    if kind != "constexpr"
                ]
                kinds, values = [kind for kind, _ in given], [value for _, value in given]
                driver.session.launch(self.kernel, kinds, (x, y, z), values)

        class Idle:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.name = metadata.name

            def __call__(self, *_: Any) -> None:
                launched.append(self.name)

        launched = [] if idle is None else idle
        self.device = session.architecture if idle is None else next(_idle_devices)
        self.session, self.target, self.utils = session, target, self
        self.launcher_cls: Any = Launcher if idle is None else Idle

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return 1, 2, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        shared = SHARED.get(self.target.arch, max(SHARED.values()))
        return {"max_shared_mem": shared, "multiprocessor_count": 4, "warpSize": 32, "max_num_regs": 65536}

    def get_current_device(self) -> int:
        return self.device  # Triton keeps compiled kernels, with what launches them, by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@contextmanager
def idle(architecture: int = 90) -> Iterator[list[str]]:
    """Compile kernels that the body launches as for a GPU, and run none of them; return their names.

    What a launch then takes is Python's and Triton's part of it.
    """
    from triton.runtime import driver

    launched: list[str] = []
    before = driver._active
    driver.set_active(_Driver(Session(architecture, Schedule.of), launched))
    try:
        yield launched
    finally:
        driver._active = before


@contextmanager
def executing(
    architecture: int = 90,
    schedule: Callable[[int], Schedule] = Schedule.of,
    change: Callable[[str, str], str] | None = None,
    strict: bool = True,
) -> Iterator[Session]:
    """Run Triton kernels that the body launches with tensors on the CPU in the machine.

    Kernels are compiled and specialized as for a GPU of the architecture. Compiled kernels are kept for the
    next `executing` in the process.

    Args:
        architecture: such as 80 or 90.
        schedule: of the next launch, by its number.
        change: see `Session`.
        strict: see `Session`.
    """
    from triton.runtime import driver

    session = Session(architecture, schedule, change, strict)
    known = _drivers.get(architecture)
    if known is None:
        known = _drivers[architecture] = _Driver(session)
    before, active = known.session, driver._active
    known.session = session
    driver.set_active(known)
    try:
        yield session
    finally:
        known.session = before
        driver._active = active


_drivers: dict[int, _Driver] = {}
_idle_devices = count(1000)
