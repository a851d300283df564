"""Operands of statements as slots of the register file, and instructions as numbers for the machine."""

import re
import struct
from dataclasses import dataclass

from keyedopt.ptx.parse import WIDTHS, Parsed, Statement, UnsupportedInstructionError

#: Instructions that the warp or the program takes part in; the order is that of `Control` in machine.h.
CONTROL = (
    *("bra", "ret", "bar", "ld", "st", "fence"),
    *("shfl.bfly", "shfl.up", "shfl.down", "shfl.idx", "vote.ballot", "vote.any", "vote.all"),
    *("redux.add", "redux.min.s32", "redux.max.s32", "redux.min.u32", "redux.max.u32"),
    *("redux.and", "redux.or", "redux.xor", "ldmatrix", "warp_sync", "active"),
)
#: Atomics; the order is that of `Atomic` in memory.cpp.
ATOMICS = ("add", "exch", "or", "and", "xor", "min.u", "max.u", "min.s", "max.s", "cas", "add.f32", "add.f64")
MOST_ATOMICS = 16
#: Registers that the machine fills when a program begins; the order is that of `begin` in launch.cpp.
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid", "%warpid")
STRONG, ACQUIRE, RELEASE, SIGNED, SHARED, SIZE, WIDTH = 1, 2, 4, 8, 16, 1 << 8, 1 << 16


@dataclass(frozen=True, eq=False)
class Code:
    """A kernel as the machine runs it.

    Args:
        parsed: the kernel.
        words: fourteen numbers for each instruction, see `Instruction` in machine.h.
        constants: slot, width in bytes and value of every constant.
        parameters: for each parameter the slots that get its value, each with its width.
        special: the slots of `SPECIAL`, −1 for those that are not used.
        grid: the slots of the size of the grid, in x, y and z, and of the threads of a program.
        slots: of the register file.
    """

    parsed: Parsed
    words: tuple[int, ...]
    constants: tuple[tuple[int, int, int], ...]
    parameters: tuple[tuple[tuple[int, int], ...], ...]
    special: tuple[int, ...]
    grid: tuple[int, ...]
    slots: int


def size_of(kind: str) -> int:
    """Return the number of bytes of a type: 1 for b8, 2 for bf16."""
    matched = re.fullmatch(r"(?:[usb]|b?f)(\d+)(x2)?", kind)
    if kind != "pred" and matched is None:
        raise UnsupportedInstructionError(f"the type {kind}")
    return 1 if matched is None else int(matched[1]) // 8 * (2 if matched[2] else 1)


class Encoder:
    """The slots, constants and instructions of one kernel."""

    def __init__(self, parsed: Parsed, operations: dict[str, int]) -> None:
        self._parsed, self._operations = parsed, operations
        self._words: list[int] = []
        self._constants: dict[tuple[int, int], int] = {}
        self._parameters: list[list[tuple[int, int]]] = [[] for _ in parsed.parameters]
        self._indices = {name: index for index, (_, name) in enumerate(parsed.parameters)}
        self._special: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._branches: list[tuple[int, str]] = []
        self._slots = 0
        self._last = _last_uses(parsed)
        self._local = {name for names in self._last.values() for name in names}
        self._free: dict[int, list[int]] = {}  # by width: lanes of another width lie elsewhere
        self._held: dict[str, int] = {}
        self._line = 0

    def _new(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _constant(self, value: int, width: int) -> int:
        value = (value + (1 << 63)) % (1 << 64) - (1 << 63)
        key = (width, value)
        if key not in self._constants:
            self._constants[key] = self._new()
        return self._constants[key]

    def _slot(self, name: str, width: int) -> int:
        """Return the slot of a register, a number or a symbol that is read or written with this width."""
        name = name.strip()
        if name in SPECIAL or name.startswith(("%nctaid", "%ntid")):
            if name not in self._special:
                self._special[name] = self._new()
            return self._special[name]
        if name in ("%tid.y", "%tid.z"):
            return self._constant(0, width)
        if name in self._parsed.registers:
            if width not in (0, self._width(name)):
                raise UnsupportedInstructionError(f"{name} has {self._width(name)} bytes")
            if name not in self._held:
                free = self._free.get(self._width(name)) if name in self._local else None
                self._held[name] = free.pop() if free else self._new()
            return self._held[name]
        if name == "global_smem" or name.startswith("_$_str"):
            return self._constant(0, width)
        if name == "WARP_SZ":
            return self._constant(32, width)
        if floating := re.fullmatch(r"0([fd])([0-9a-fA-F]+)", name):
            return self._constant(int(floating[2], 16), width)
        if re.fullmatch(r"-?\d+\.\d+(?:[eE][+-]?\d+)?", name):
            code = "<fi" if width == 4 else "<dq"
            return self._constant(
                struct.unpack(f"<{code[2]}", struct.pack(f"<{code[1]}", float(name)))[0], width
            )
        if re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?", name):
            return self._constant(int(name.rstrip("U"), 0), width)
        raise UnsupportedInstructionError(f"operand {name}")

    def _address(self, operand: str, shared: bool) -> tuple[int, int]:
        matched = re.fullmatch(r"\[\s*(%?[\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if matched is None:
            raise UnsupportedInstructionError(f"address {operand}")
        return self._slot(matched[1], 4 if shared else 8), int(matched[2] or 0)

    def _width(self, name: str) -> int:
        return WIDTHS[self._parsed.registers[name]]

    def _emit(
        self, name: str, *x: int, count: int = 1, flags: int = 0, guard: Statement | None = None
    ) -> None:
        if name in CONTROL:
            number = CONTROL.index(name)
        elif name.startswith("atom "):
            number = len(CONTROL) + ATOMICS.index(name[5:])
        elif name in self._operations:
            number = len(CONTROL) + MOST_ATOMICS + self._operations[name]
        else:
            raise UnsupportedInstructionError(name)
        predicate = self._slot(guard.predicate, 1) if guard and guard.predicate else -1
        negated = int(guard.negated) if guard else 0
        words = [number, predicate, negated, self._line, count, flags, *x, *[-1] * (8 - len(x))]
        self._words += [(word + (1 << 31)) % (1 << 32) - (1 << 31) for word in words]


def _last_uses(parsed: Parsed) -> dict[int, list[str]]:
    """Return the registers whose slot is free after a statement: of one block only, and first written."""
    blocks: dict[str, set[int]] = {}
    first: dict[str, bool] = {}
    last: dict[str, int] = {}
    block = 0
    for index, one in enumerate(parsed.body):
        if isinstance(one, str):
            block += 1
            continue
        named = [one.predicate] if one.predicate else []
        given = [name for operand in one.operands[1:] for name in re.findall(r"%\w+", operand)]
        to = re.findall(r"%\w+", one.operands[0]) if one.operands else []
        written = set() if one.name.startswith("st") else set(to) - set(given)
        for name in (*named, *to, *given):
            blocks.setdefault(name, set()).add(block)
            first.setdefault(name, name in written and not one.predicate)
            last[name] = index
        if one.name.startswith("bra"):
            block += 1
    found: dict[int, list[str]] = {}
    for name, index in last.items():
        if len(blocks[name]) == 1 and first[name] and name in parsed.registers:
            found.setdefault(index, []).append(name)
    return found
