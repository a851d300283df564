"""The machine, in C++: runs one launch under one schedule, and reports what was wrong with it."""

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from keyedopt.ptx.encode import Code
from keyedopt.ptx.translate import translate

#: What can be wrong; the order is that of `Kind` in machine.h.
KINDS = (
    "out of bounds",
    "misaligned",
    "race between programs",
    "race within a program",
    "divergence",
    "deadlock",
    "unwritten shared memory",
    "instruction limit",
)
ORDERS = ("ascending", "descending", "random")
DRAINS = ("at the end", "at once", "at random")
#: Findings that one launch reports; equal ones are counted.
ROOM = 64


@dataclass(frozen=True)
class Schedule:
    """One way in which the hardware may run a launch.

    Args:
        seed: of all random choices.
        resident: the most programs at a time.
        order: in which programs begin, of `ORDERS`.
        drain: when other programs see plain stores, of `DRAINS`.
        slice: the most instructions that a warp runs at a time.
        starve: whether one program at a time nearly stands still.
        limit: the most instructions of all warps together.
    """

    seed: int = 0
    resident: int = 4
    order: str = "ascending"
    drain: str = "at the end"
    slice: int = 200
    starve: bool = False
    limit: int = 400_000_000

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        """Return the schedule of a seed; seeds in sequence vary everything.

        >>> Schedule.of(0).resident, Schedule.of(1).resident, Schedule.of(4).order
        (1, 2, 'descending')
        """
        return cls(
            seed,
            resident=(1, 2, 3, 6)[seed % 4],
            order=ORDERS[seed // 4 % 3],
            drain=DRAINS[seed // 12 % 3] if seed % 4 else "at the end",
            slice=(400, 20, 3000, 1, 100)[seed % 5],
            starve=seed % 7 >= 4,
        )


@dataclass(frozen=True)
class Finding:
    """Something that hardware may do wrong.

    Args:
        kind: of `KINDS`.
        instruction: the PTX.
        source: "file:line" of the kernel, or "".
        other: for a race the source and PTX of the earlier access, else "".
        count: how often.
        address, program, thread: of the first time.
    """

    kind: str
    instruction: str
    source: str
    other: str
    count: int
    address: int
    program: int
    thread: int

    @property
    def label(self) -> str:
        """The kind and the instructions, without what differs between schedules."""
        other = f"; before that {self.other}" if self.other else ""
        return f"{self.kind}: {self.source} `{self.instruction}`{other}"

    def __str__(self) -> str:
        first = f"thread {self.thread} of program {self.program} at {self.address:#x}"
        return f"{self.label}; {self.count} times, first by {first}"


@dataclass(frozen=True)
class Report:
    """What one launch did.

    Args:
        kernel: its name.
        grid: programs in x, y and z.
        schedule: under which it ran.
        findings: what was wrong.
        instructions: of all warps.
        read, written: bytes of global memory, counted at each access of a thread.
        atomics: accesses of global memory by atomics.
    """

    kernel: str
    grid: tuple[int, int, int]
    schedule: Schedule
    findings: tuple[Finding, ...]
    instructions: int
    read: int
    written: int
    atomics: int


@cache
def _library() -> Any:
    """Load the machine.

    Raises:
        RuntimeError: it was not built.
    """
    spec = importlib.util.find_spec("keyedopt.ptx._machine")
    if spec is None or spec.origin is None:
        raise RuntimeError("the PTX executor was not built: install keyedopt with g++ 10 or later")
    library = ctypes.CDLL(spec.origin)
    library.ptx_operations.restype = ctypes.c_char_p
    library.ptx_launch.restype = ctypes.c_int64
    return library


@cache
def load(ptx: str) -> Code:
    """Translate a kernel for the machine."""
    names = _library().ptx_operations().decode().split()
    return translate(ptx, {name: number for number, name in enumerate(names)})


def _numbers(kind: Any, numbers: Sequence[int]) -> Any:
    return (kind * max(len(numbers), 1))(*numbers)


@cache
def _words(code: Code) -> Any:
    return _numbers(ctypes.c_int32, code.words)


def run(
    code: Code,
    grid: tuple[int, int, int],
    warps: int,
    shared: int,
    values: Sequence[int],
    memory: Sequence[tuple[int, int, int]],
    schedule: Schedule,
) -> Report:
    """Run a launch.

    Args:
        code: the kernel.
        grid: programs in x, y and z.
        warps: of a program.
        shared: bytes of shared memory of a program.
        values: of the parameters; floats as bits.
        memory: begin, end and granule in bytes of all memory that the kernel may access, not overlapping.
        schedule: the way to run it.
    """
    constants = [*code.constants]
    for slots, value in zip(code.parameters, values, strict=False):
        constants += [(slot, width, value) for slot, width in slots]
    for slot, value in zip(code.grid, (*grid, 32 * warps), strict=True):
        if slot >= 0:
            constants.append((slot, 4, value))
    int64 = ctypes.c_int64
    flat = [(number + 2**63) % 2**64 - 2**63 for row in constants for number in row]
    found, counters = (int64 * (9 * ROOM))(), (int64 * 4)()
    order, drain = ORDERS.index(schedule.order), DRAINS.index(schedule.drain)
    how = [
        schedule.seed,
        schedule.resident,
        order,
        drain,
        schedule.slice,
        int(schedule.starve),
        schedule.limit,
    ]
    count = _library().ptx_launch(
        _words(code),
        int64(len(code.words) // 14),
        _numbers(int64, flat),
        int64(len(constants)),
        _numbers(int64, code.special),
        _numbers(int64, [code.slots, warps, shared, *grid]),
        _numbers(int64, [number for row in memory for number in row]),
        int64(len(memory)),
        _numbers(int64, how),
        found,
        int64(ROOM),
        counters,
    )
    rows = [found[9 * k : 9 * k + 9] for k in range(min(count, ROOM))]
    return Report(code.parsed.name, grid, schedule, tuple(_finding(code, row) for row in rows), *counters)


def _finding(code: Code, row: Sequence[int]) -> Finding:
    kind, line, other, count, address, program, thread = row[:7]

    def place(number: int) -> tuple[str, str]:
        return code.parsed.text[number - 1].strip() if number else "", code.parsed.sources.get(number, "")

    instruction, source = place(line)
    before = " ".join(f"{where} `{what}`" for what, where in [place(other)]) if other else ""
    return Finding(KINDS[kind], instruction, source, before, count, address, program, thread)
