"""The text of a kernel in PTX as instructions: predicate, name, operands, and the source line of each."""

import re
from dataclasses import dataclass

#: The bytes of the types of registers; a predicate has one.
WIDTHS = {"pred": 1, "b8": 2, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8}
WIDTHS |= {f"{kind}{bits}": max(2, bits // 8) for kind in "us" for bits in (8, 16, 32, 64)}

_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z]\w*(?:[.:]+\w+)*)\s*(.*)", re.DOTALL)


class UnsupportedInstructionError(Exception):
    """The executor has no model of an instruction or declaration; the message quotes it."""


@dataclass(frozen=True)
class Statement:
    """One instruction.

    Args:
        name: with all modifiers, such as "ld.global.v4.b32".
        operands: as written, such as "%r1", "[ %rd2 + 16 ]" or "{%r1, %r2}".
        predicate: the register of the guard, or "".
        negated: whether the guard is negated.
        line: of the PTX text, from 1.
    """

    name: str
    operands: tuple[str, ...]
    predicate: str
    negated: bool
    line: int


@dataclass(frozen=True, eq=False)
class Parsed:
    """A kernel.

    Args:
        name: of the kernel.
        parameters: the type of each parameter, such as "u64", in order.
        registers: the type of each register, such as "b32".
        body: statements, and labels as strings.
        sources: "file:line" of the source for lines of the PTX text that have one.
        text: the lines of the PTX text.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    registers: dict[str, str]
    body: tuple[Statement | str, ...]
    sources: dict[int, str]
    text: tuple[str, ...]


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside of braces.

    >>> split_operands("{%r1, %r2}, [ %rd1 + 8 ]")
    ('{%r1, %r2}', '[ %rd1 + 8 ]')
    """
    found, depth, begin = [], 0, 0
    for index, one in enumerate(text):
        depth += (one in "{[") - (one in "}]")
        if one == "," and not depth:
            found.append(text[begin:index].strip())
            begin = index + 1
    rest = text[begin:].strip()
    return (*found, rest) if rest else tuple(found)


def parse(ptx: str) -> Parsed:
    """Parse a module with one kernel.

    Raises:
        UnsupportedInstructionError: the module has a declaration that the executor does not model.
    """
    entry = re.search(r"\.visible\s+\.entry\s+(\w+)\(([^)]*)\)", ptx)
    if entry is None:
        raise UnsupportedInstructionError("the PTX has no .visible .entry")
    parameters = tuple(re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", entry[2].strip()))
    for declared in re.findall(r"^\s*\.(?:extern |visible |func).*$", ptx, re.MULTILINE):
        if "global_smem" not in declared and ".entry" not in declared:
            raise UnsupportedInstructionError(declared.strip())
    files = {
        number: path.rpartition("/")[2] for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)
    }
    begin = ptx.index("{", entry.end())
    first = ptx.count("\n", 0, begin) + 1
    registers: dict[str, str] = {}
    body: list[Statement | str] = []
    sources: dict[int, str] = {}
    source, scope, scopes = "", "", 0
    for line, raw in enumerate(ptx[begin + 1 :].split("\n"), first):
        text = raw.partition("//")[0].strip()
        if located := re.match(r"\.loc\s+(\d+)\s+(\d+)", text):
            source = f"{files.get(located[1], located[1])}:{located[2]}"
            continue
        if text == "}" and raw.startswith("}"):
            break
        if labelled := re.match(r"(\$\w+):\s*", text):
            body.append(labelled[1])
            text = text[labelled.end() :]
        for part in text.replace("{ .reg", ";\n{;.reg").split(";"):
            part = part.strip()
            if part == "{":  # a scope with registers of its own
                scopes += 1
                scope = f"%scope{scopes}_"
            elif part == "}":
                scope = ""
            elif part and not part.startswith((".pragma", ".file", ".section")):
                if declared := re.match(r"\.reg\s+\.(\w+)\s+(.*)", part):
                    _declare(declared[1], declared[2], scope, registers)
                    continue
                if scope:
                    part = re.sub(r"(?<![%\w.])([A-Za-z]\w*)(?![\w.])", rf"{scope}\1", part)
                    part = re.sub(rf"{scope}([a-z0-9]+\.)", r"\1", part)
                body.append(_statement(part, line))
                sources[line] = source
    return Parsed(
        entry[1], tuple((kind, name) for kind, name in parameters), registers, tuple(body), sources,
        tuple(ptx.split("\n")),
    )  # fmt: skip


def _declare(kind: str, names: str, scope: str, registers: dict[str, str]) -> None:
    for name in names.split(","):
        name = name.strip()
        if many := re.fullmatch(r"(%\w+)<(\d+)>", name):
            registers |= {f"{many[1]}{k}": kind for k in range(int(many[2]))}
        else:
            registers[name if name.startswith("%") else scope + name] = kind


def _statement(text: str, line: int) -> Statement:
    matched = _STATEMENT.fullmatch(text)
    if matched is None:
        raise UnsupportedInstructionError(f"line {line}: {text}")
    negated, predicate, name, operands = matched.groups()
    return Statement(name, split_operands(operands), predicate or "", bool(negated), line)
