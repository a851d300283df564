"""Statements as numbers for the executor: an operation, and the slots of its operands in the register file."""

import re
import struct
from dataclasses import dataclass

from keyedopt.ptx.parse import WIDTHS, Parsed, Statement, UnsupportedInstruction, parse

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
#: Modifiers that change nothing here.
_IGNORED = {"sync", "aligned", "cta", "gpu", "sys", "rn", "to", "uni", "sat", "full", "b16x2", "noftz"}
_NOTHING = ("nanosleep", "prefetch", "prefetchu", "discard", "griddepcontrol", "pragma")


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


def bits_of(kind: str) -> int:
    """Return the number of bytes of a type: 1 for b8, 2 for bf16."""
    return (
        1 if kind == "pred" else int(kind.lstrip("usbf").removesuffix("x2") or 0) // 8 * (1 + ("x2" in kind))
    )


class Translator:
    """Translates one kernel."""

    def __init__(self, parsed: Parsed, operations: dict[str, int]) -> None:
        self._parsed, self._operations = parsed, operations
        self._words: list[int] = []
        self._constants: dict[tuple[int, int], int] = {}
        self._parameters: list[list[tuple[int, int]]] = [[] for _ in parsed.parameters]
        self._names = {name: index for index, (_, name) in enumerate(parsed.parameters)}
        self._special: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._branches: list[tuple[int, str]] = []
        self._slots = 0
        self._last = _last_uses(parsed)
        self._local = {name for names in self._last.values() for name in names}
        self._free: dict[int, list[int]] = {}  # by width: lanes of another width lie elsewhere
        self._held: dict[str, int] = {}
        self._line = 0

    def run(self) -> Code:
        """Translate all statements."""
        for index, one in enumerate(self._parsed.body):
            if isinstance(one, str):
                self._labels[one] = len(self._words) // 14
                continue
            self._line = one.line
            self._statement(one)
            for name in self._last.get(index, ()):
                if name in self._held:
                    self._free.setdefault(self._width(name), []).append(self._held.pop(name))
        self._emit("ret")
        for at, label in self._branches:
            self._words[at] = self._labels[label]
        grid = tuple(
            self._special.get(name, -1) for name in ("%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x")
        )
        return Code(
            self._parsed,
            tuple(self._words),
            tuple((slot, width, value) for (width, value), slot in self._constants.items()),
            tuple(map(tuple, self._parameters)),
            tuple(self._special.get(name, -1) for name in SPECIAL),
            grid,
            self._slots,
        )

    # --- operands ---------------------------------------------------------------------------------

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
        raise UnsupportedInstruction(f"line {self._line}: operand {name}")

    def _address(self, operand: str, shared: bool) -> tuple[int, int]:
        matched = re.fullmatch(r"\[\s*(%?[\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if matched is None:
            raise UnsupportedInstruction(f"line {self._line}: address {operand}")
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
            text = self._parsed.text[self._line - 1].strip()
            raise UnsupportedInstruction(f"line {self._line}: {text} ({name})")
        predicate = self._slot(guard.predicate, 1) if guard and guard.predicate else -1
        negated = int(guard.negated) if guard else 0
        words = [number, predicate, negated, self._line, count, flags, *x, *[-1] * (8 - len(x))]
        self._words += [(word + (1 << 31)) % (1 << 32) - (1 << 31) for word in words]

    # --- statements -------------------------------------------------------------------------------

    def _statement(self, one: Statement) -> None:
        parts = one.name.replace("::", ".").split(".")
        head = parts[0]
        handler = getattr(self, f"_do_{head}", None)
        if handler is not None:
            handler(one, parts)
        elif head not in _NOTHING:
            self._plain(one, parts)

    def _plain(self, one: Statement, parts: list[str]) -> None:
        """Translate an instruction whose lanes do not interact; type and options make up its name."""
        head, kind, *_ = parts[0], parts[-1]
        options = [part for part in parts[1:-1] if part not in _IGNORED]
        operands, size = list(one.operands), max(bits_of(kind), 1)
        widths = [size] * len(operands)
        if kind == "pred":
            name = f"{head}.pred"
        elif head in ("mul", "mad") and "wide" in options:
            name = f"{head}.wide.{kind}"
            widths[0] = 2 * size
            if head == "mad":
                widths[3] = 2 * size
        elif head in (
            "add",
            "sub",
            "mul",
            "mad",
            "and",
            "or",
            "xor",
            "not",
            "neg",
            "shl",
            "mov",
            "selp",
        ) and (kind[0] in "usb" and not kind.startswith("bf")):
            middle = ".lo" if "lo" in options else ""
            name = f"{head}.{'hi.' + kind if 'hi' in options else f'{8 * size}'}"
            if middle:
                name = f"{head}.lo.{8 * size}"
        elif head in ("mov", "selp"):
            name = f"{head}.{8 * size}"
        else:
            name = ".".join([head, *(option for option in options if option != "approx" or size == 4), kind])
            name = (
                name.replace("div.approx", "div").replace("sqrt.approx", "sqrt").replace("rcp.approx", "rcp")
            )
            name = name.replace("approx.ftz", "approx")
            if head == "shr" and kind[0] == "b":
                name = f"shr.u{kind[1:]}"
            if name.startswith("div.ftz"):
                name = "div.f32"
        if head in ("shl", "shr"):
            widths[2] = 4
        elif head == "bfe":
            widths[2:] = [4, 4]
        elif head == "shf":
            name = f"shf.{parts[1]}.{parts[2]}.b32"
        elif head in ("popc", "clz"):
            widths[0] = 4
        elif head == "selp":
            widths[3] = 1
        self._emit(name, *(self._slot(*pair) for pair in zip(operands, widths, strict=True)), guard=one)

    def _do_setp(self, one: Statement, parts: list[str]) -> None:
        compare, kind = parts[1], parts[-1]
        if kind[0] == "b" and not kind.startswith("bf"):
            kind = f"u{kind[1:]}"
        compare = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
        size = bits_of(kind)
        target, *other = one.operands[0].split("|")
        left, right = (self._slot(operand, size) for operand in one.operands[1:3])
        self._emit(f"setp.{compare}.{kind}", self._slot(target, 1), left, right, guard=one)
        combine = next((part for part in parts[2:-1] if part in ("and", "or", "xor")), "")
        if combine:
            to = self._slot(target, 1)
            self._emit(f"{combine}.pred", to, to, self._slot(one.operands[3], 1), guard=one)
        if other:
            self._emit("not.pred", self._slot(other[0], 1), self._slot(target, 1), guard=one)

    def _do_cvt(self, one: Statement, parts: list[str]) -> None:
        options = [part for part in parts[1:-2] if part not in _IGNORED]
        to, source = parts[-2], parts[-1]
        integers = "us"
        if to[0] in integers and source[0] in integers:
            name = f"cvt.{max(16, 8 * bits_of(to))}.{source}"
            if bits_of(to) == 1:
                name = f"cvt.16.{to}"
        elif source[0] in integers:
            name = f"cvt.{to}.{source}"
        else:
            name = ".".join(["cvt", *options, to, source])
        widths = [self._width(one.operands[0]), *[max(2, bits_of(source))] * (len(one.operands) - 1)]
        self._emit(name, *(self._slot(*pair) for pair in zip(one.operands, widths, strict=True)), guard=one)

    def _do_mov(self, one: Statement, parts: list[str]) -> None:
        to, source = one.operands
        whole = bits_of(parts[1])
        if to.startswith("{"):
            names = _names(to)
            slots = [-1 if name == "_" else self._slot(name, 0) for name in names]
            slots += [-1] * (4 - len(slots))
            given = self._slot(source, whole)
            self._emit("unpack", *slots, given, count=len(names), flags=whole // len(names), guard=one)
        elif source.startswith("{"):
            names = _names(source)
            part = whole // len(names)
            given = [self._slot(name, max(part, 2)) for name in names]
            self._emit("pack", self._slot(to, 0), -1, -1, -1, *given, count=len(names), flags=part, guard=one)
        else:
            self._plain(one, parts)

    def _do_lop3(self, one: Statement, parts: list[str]) -> None:
        self._emit("lop3.b32", *(self._slot(operand, 4) for operand in one.operands), guard=one)

    def _do_bra(self, one: Statement, parts: list[str]) -> None:
        self._branches.append((len(self._words) + 6, one.operands[0]))
        self._emit("bra", 0, guard=one)

    def _do_ret(self, one: Statement, parts: list[str]) -> None:
        self._emit("ret", guard=one)

    _do_exit = _do_ret

    def _do_bar(self, one: Statement, parts: list[str]) -> None:
        if parts[1] == "warp":
            self._emit("warp_sync", -1, -1, -1, -1, self._slot(one.operands[0], 4), guard=one)
        elif "sync" in parts and one.operands == ("0",):
            self._emit("bar", guard=one)
        else:
            raise UnsupportedInstruction(f"line {one.line}: {one.name} {', '.join(one.operands)}")

    _do_barrier = _do_bar

    def _do_fence(self, one: Statement, parts: list[str]) -> None:
        self._emit("fence", guard=one)

    _do_membar = _do_fence

    def _do_activemask(self, one: Statement, parts: list[str]) -> None:
        self._emit("active", self._slot(one.operands[0], 4), guard=one)

    def _do_ld(self, one: Statement, parts: list[str]) -> None:
        if "param" in parts:
            name = one.operands[1].strip("[] ")
            if name not in self._names:
                raise UnsupportedInstruction(f"line {one.line}: {one.name} {one.operands[1]}")
            width = self._width(one.operands[0])
            slot = self._new()
            self._parameters[self._names[name]].append((slot, width))
            self._emit(f"mov.{8 * width}", self._slot(one.operands[0], width), slot, guard=one)
            return
        shared, flags = self._memory(one, parts)
        names = _names(one.operands[0])
        address, offset = self._address(one.operands[1], shared)
        widths = [self._width(name) for name in names if name != "_"]
        slots = [-1 if name == "_" else self._slot(name, 0) for name in names]
        flags |= SIZE * bits_of(parts[-1]) + WIDTH * widths[0] + SIGNED * (parts[-1][0] == "s")
        self._emit("ld", *(slots + [-1] * 4)[:4], address, offset, count=len(names), flags=flags, guard=one)

    def _do_st(self, one: Statement, parts: list[str]) -> None:
        shared, flags = self._memory(one, parts)
        address, offset = self._address(one.operands[0], shared)
        names, size = _names(one.operands[1]), bits_of(parts[-1])
        widths = [self._width(name) for name in names if name in self._parsed.registers]
        width = widths[0] if widths else max(size, 2)
        slots = [self._slot(name, width) for name in names]
        flags |= SIZE * size + WIDTH * width
        self._emit("st", *(slots + [-1] * 4)[:4], address, offset, count=len(names), flags=flags, guard=one)

    def _memory(self, one: Statement, parts: list[str]) -> tuple[bool, int]:
        shared = "shared" in parts
        if not shared and "global" not in parts:
            raise UnsupportedInstruction(f"line {one.line}: {one.name}")
        strong = {"volatile", "relaxed", "acquire", "release", "acq_rel"} & set(parts)
        flags = STRONG * bool(strong) + SHARED * shared
        flags |= ACQUIRE * bool({"acquire", "acq_rel"} & strong) + RELEASE * bool(
            {"release", "acq_rel"} & strong
        )
        return shared, flags

    def _do_atom(self, one: Statement, parts: list[str]) -> None:
        shared, flags = self._memory(one, parts)
        operation = next(
            part for part in parts if part in ("add", "exch", "or", "and", "xor", "min", "max", "cas")
        )
        kind, size = parts[-1], bits_of(parts[-1])
        if operation in ("min", "max"):
            operation += f".{kind[0]}"
        elif operation == "add" and kind in ("f32", "f64"):
            operation += f".{kind}"
        operands = list(one.operands) if parts[0] == "atom" else ["_", *one.operands]
        to = -1 if operands[0] == "_" else self._slot(operands[0], size)
        address, offset = self._address(operands[1], shared)
        given = [self._slot(operand.strip("{} "), size) for operand in operands[2:]]
        given = [to, *given, -1][:3]  # "cas" has what it compares with, then what it stores
        flags |= STRONG + SIZE * size
        self._emit(f"atom {operation}", *given, -1, address, offset, flags=flags, guard=one)

    _do_red = _do_atom

    def _do_shfl(self, one: Statement, parts: list[str]) -> None:
        target, *valid = one.operands[0].split("|")
        slots = [self._slot(target, 4), *(self._slot(operand, 4) for operand in one.operands[1:5])]
        self._emit(f"shfl.{parts[2]}", *slots, self._slot(valid[0], 1) if valid else -1, guard=one)

    def _do_vote(self, one: Statement, parts: list[str]) -> None:
        target, given, mask = one.operands
        to = self._slot(target, 4 if parts[2] == "ballot" else 1)
        predicate = self._slot(given.lstrip("!"), 1)
        negated = int(given.startswith("!"))
        self._emit(f"vote.{parts[2]}", to, predicate, -1, -1, self._slot(mask, 4), flags=negated, guard=one)

    def _do_redux(self, one: Statement, parts: list[str]) -> None:
        name = f"redux.{parts[2]}.{parts[3]}" if parts[2] in ("min", "max") else f"redux.{parts[2]}"
        to, given, mask = (self._slot(operand, 4) for operand in one.operands)
        self._emit(name, to, given, -1, -1, mask, guard=one)

    def _do_ldmatrix(self, one: Statement, parts: list[str]) -> None:
        names = _names(one.operands[0])
        address, offset = self._address(one.operands[1], shared=True)
        slots = [self._slot(name, 4) for name in names] + [-1] * (5 - len(names))
        self._emit(
            "ldmatrix", *slots, address, offset, count=len(names), flags=int("trans" in parts), guard=one
        )


def _names(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _last_uses(parsed: Parsed) -> dict[int, list[str]]:
    """Return the registers whose slot is free after a statement: they are used in one block only, first written."""
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


def translate(ptx: str, operations: dict[str, int]) -> Code:
    """Translate the text of a module with one kernel.

    Args:
        ptx: the text.
        operations: the numbers of the machine's operations, by name.

    Raises:
        UnsupportedInstruction: names an instruction that the machine does not have.
    """
    return Translator(parse(ptx), operations).run()
