"""Statements as numbers for the machine: an operation, and the slots of its operands in the register file."""

from keyedopt.ptx.encode import (
    ACQUIRE,
    RELEASE,
    SHARED,
    SIGNED,
    SIZE,
    SPECIAL,
    STRONG,
    WIDTH,
    Code,
    Encoder,
    size_of,
)
from keyedopt.ptx.parse import WIDTHS, Statement, UnsupportedInstructionError, parse

#: Modifiers that change nothing here.
_IGNORED = {"sync", "aligned", "cta", "gpu", "sys", "rn", "to", "uni", "sat", "full", "b16x2", "noftz"}
_NOTHING = ("nanosleep", "prefetch", "prefetchu", "discard", "griddepcontrol", "pragma")


class Translator(Encoder):
    """Translates one kernel."""

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

    # --- statements -------------------------------------------------------------------------------

    def _statement(self, one: Statement) -> None:
        parts = one.name.replace("::", ".").split(".")
        head = parts[0]
        handler = getattr(self, f"_do_{head}", None)
        try:
            if handler is not None:
                handler(one, parts)
            elif head not in _NOTHING:
                self._plain(one, parts)
        except (UnsupportedInstructionError, ValueError) as error:
            text = self._parsed.text[one.line - 1].strip()
            raise UnsupportedInstructionError(f"line {one.line}: {text}: {error}") from error

    def _plain(self, one: Statement, parts: list[str]) -> None:
        """Translate an instruction whose lanes do not interact; type and options make up its name."""
        head, kind, *_ = parts[0], parts[-1]
        options = [part for part in parts[1:-1] if part not in _IGNORED]
        operands, size = list(one.operands), max(size_of(kind), 1)
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
        size = size_of(kind)
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
            name = f"cvt.{max(16, 8 * size_of(to))}.{source}"
            if size_of(to) == 1:
                name = f"cvt.16.{to}"
        elif source[0] in integers:
            name = f"cvt.{to}.{source}"
        else:
            name = ".".join(["cvt", *options, to, source])
        width = max(2, size_of(source))
        slots = [self._slot(one.operands[0], max(2, size_of(to)))]
        slots += [
            self._slot(name, 0 if name in self._parsed.registers else width) for name in one.operands[1:]
        ]
        held = self._parsed.registers.get(one.operands[1], "")
        if held and WIDTHS[held] > width:  # only the low bits are read
            slots[1] = self._new()
            self._emit(f"cvt.{8 * width}.u{8 * WIDTHS[held]}", slots[1], self._slot(one.operands[1], 0))
        self._emit(name, *slots, guard=one)

    def _do_mov(self, one: Statement, parts: list[str]) -> None:
        to, source = one.operands
        whole = size_of(parts[1])
        if to.startswith("{"):
            names = _names(to)
            slots = [-1 if name == "_" else self._slot(name, 0) for name in names]
            slots += [-1] * (4 - len(slots))
            given = self._slot(source, whole)
            self._emit("unpack", *slots, given, count=len(names), flags=whole // len(names), guard=one)
        elif source.startswith("{"):
            names = _names(source)
            part = whole // len(names)
            parts_of = [self._slot(name, max(part, 2)) for name in names]
            self._emit(
                "pack", self._slot(to, 0), -1, -1, -1, *parts_of, count=len(names), flags=part, guard=one
            )
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
            raise UnsupportedInstructionError("this barrier")

    _do_barrier = _do_bar

    def _do_fence(self, one: Statement, parts: list[str]) -> None:
        self._emit("fence", guard=one)

    _do_membar = _do_fence

    def _do_activemask(self, one: Statement, parts: list[str]) -> None:
        self._emit("active", self._slot(one.operands[0], 4), guard=one)

    def _do_ld(self, one: Statement, parts: list[str]) -> None:
        if "param" in parts:
            name = one.operands[1].strip("[] ")
            if name not in self._indices:
                raise UnsupportedInstructionError("this parameter")
            width = self._width(one.operands[0])
            slot = self._new()
            self._parameters[self._indices[name]].append((slot, width))
            self._emit(f"mov.{8 * width}", self._slot(one.operands[0], width), slot, guard=one)
            return
        shared, flags = self._memory(one, parts)
        names = _names(one.operands[0])
        address, offset = self._address(one.operands[1], shared)
        widths = [self._width(name) for name in names if name != "_"]
        slots = [-1 if name == "_" else self._slot(name, 0) for name in names]
        flags |= SIZE * size_of(parts[-1]) + WIDTH * widths[0] + SIGNED * (parts[-1][0] == "s")
        self._emit("ld", *(slots + [-1] * 4)[:4], address, offset, count=len(names), flags=flags, guard=one)

    def _do_st(self, one: Statement, parts: list[str]) -> None:
        shared, flags = self._memory(one, parts)
        address, offset = self._address(one.operands[0], shared)
        names, size = _names(one.operands[1]), size_of(parts[-1])
        widths = [self._width(name) for name in names if name in self._parsed.registers]
        width = widths[0] if widths else max(size, 2)
        slots = [self._slot(name, width) for name in names]
        flags |= SIZE * size + WIDTH * width
        self._emit("st", *(slots + [-1] * 4)[:4], address, offset, count=len(names), flags=flags, guard=one)

    def _memory(self, one: Statement, parts: list[str]) -> tuple[bool, int]:
        shared = "shared" in parts
        if not shared and "global" not in parts:
            raise UnsupportedInstructionError("this memory")
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
        kind, size = parts[-1], size_of(parts[-1])
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


def translate(ptx: str, operations: dict[str, int]) -> Code:
    """Translate the text of a module with one kernel.

    Args:
        ptx: the text.
        operations: the numbers of the machine's operations, by name.

    Raises:
        UnsupportedInstructionError: names an instruction that the machine does not have.
    """
    return Translator(parse(ptx), operations).run()
