"""Find a fragment of Python in the syntax tree of a module, and replace it.

A fragment is an expression, a statement or several consecutive statements. Syntax trees are compared, so line
breaks, quotes, comments and docstrings do not matter. A fragment is looked for in one function, class body or
module body; functions and classes inside are scopes of their own, named ``outer.inner``. The ``def`` or
``class`` line, with decorators and defaults, belongs to the scope that it begins.

A block that is only ``...`` matches any block, and ``...`` in the replacement stands for that block::

    old = "with torch.no_grad(): ..."
    new = "..."
"""

import ast
import difflib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keyedopt.conformance.mutants import Change, MutantError

#: The scope of the statements of a module that are in no function or class.
MODULE = "<module>"
#: Parts of a syntax tree that have no influence on what the code does.
IGNORED = ("kind", "type_comment")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: A statement: the block that it is in, and its index there.
_Slot = tuple[list[ast.stmt], int]
_Scopes = Sequence[tuple[ast.AST, _Slot | None]]


@dataclass(frozen=True)
class _Place:
    """An occurrence of ``old``: the first node, the blocks that ``...`` matched, and how to replace it."""

    node: ast.expr | ast.stmt
    blocks: list[list[ast.stmt]]
    put: Callable[[Any], None]


def replace(tree: ast.Module, change: Change) -> None:
    """Replace a fragment in the syntax tree of a module, in place.

    Raises:
        MutantError: a fragment is not valid Python, does not occur, occurs several times while the change
            names no occurrence, or equals its replacement.
    """
    old, new = _parse(change.old, "old"), _parse(change.new, "new")
    if not old or _is_any(old):
        raise MutantError("`old` is empty: give the code to replace")
    if ast.dump(ast.Module(old, [])) == ast.dump(ast.Module(new, [])):
        raise MutantError("`old` and `new` are the same code: a mutant must change something")
    scopes = _scopes(tree, change.function or MODULE)
    one, other = _expression(old), _expression(new)
    places = _expressions_like(one, scopes) if one and other else _statements_like(old, scopes)
    place = _choose(sorted(places, key=lambda place: (place.node.lineno, place.node.col_offset)), change)
    for part in (part for node in new for part in ast.walk(node)):
        ast.copy_location(part, place.node)
    place.put(other if one and other else _fill(new, place.blocks))


def _parse(source: str, which: str) -> list[ast.stmt]:
    try:
        return ast.parse(source.strip("\n")).body
    except SyntaxError as error:
        raise MutantError(f"`{which}` is not valid Python ({error}):\n{source}") from error


def _expression(statements: Sequence[ast.stmt]) -> ast.expr | None:
    """Return the expression if a fragment is only one, and not ``...``."""
    if len(statements) == 1 and isinstance(statements[0], ast.Expr) and not _is_any(statements):
        return statements[0].value
    return None


def _choose(places: Sequence[_Place], change: Change) -> _Place:
    """Return the only place, or the one that the change names."""
    if not places:
        raise MutantError(f"`old` does not occur: adapt it to the code as it is now.\n{change.old}")
    if change.occurrence is None and len(places) > 1:
        lines = ", ".join(str(place.node.lineno) for place in places)
        raise MutantError(
            f"`old` occurs {len(places)} times (lines {lines}): "
            f"add more of the surrounding code, or `occurrence`, from 1 on.\n{change.old}"
        )
    number = 1 if change.occurrence is None else change.occurrence
    if not 1 <= number <= len(places):
        raise MutantError(f"`occurrence` is {number}, but `old` occurs {len(places)} times.\n{change.old}")
    return places[number - 1]


# --- scopes ---------------------------------------------------------------------------------------


def _scopes(tree: ast.Module, name: str) -> _Scopes:
    """Return the scopes of a name (several for a property with a setter), each with its place in a block."""
    if name == MODULE:
        return [(tree, None)]
    named = list(_named(tree))
    found = [(slot[0][slot[1]], slot) for known, slot in named if known == name]
    if not found:
        close = difflib.get_close_matches(name, dict.fromkeys(known for known, _ in named))
        hint = f"did you mean {' or '.join(close)}?" if close else "give its qualified name"
        raise MutantError(f"there is no function or class {name!r}: {hint}")
    return found


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, _Slot]]:
    for block in _blocks(node):
        for index, statement in enumerate(block):
            if isinstance(statement, _DEFINITIONS):
                name = prefix + statement.name
                yield name, (block, index)
                yield from _named(statement, f"{name}.")


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of statements in a scope."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list):
            if value and isinstance(value[0], ast.stmt):
                yield value
            for child in value:
                if isinstance(child, ast.AST) and not isinstance(child, (ast.expr, *_DEFINITIONS)):
                    yield from _blocks(child)


def _expressions(node: ast.AST) -> Iterator[tuple[ast.expr, Callable[[Any], None]]]:
    """Yield the expressions in a scope, each with a function that replaces it."""
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            children = [(child, functools.partial(value.__setitem__, at)) for at, child in enumerate(value)]
        else:
            children = [(value, functools.partial(setattr, node, field))]
        for child, put in children:
            if isinstance(child, ast.expr):
                yield child, put
            if isinstance(child, ast.AST) and not isinstance(child, _DEFINITIONS):
                yield from _expressions(child)


# --- comparison -----------------------------------------------------------------------------------


def _expressions_like(old: ast.expr, scopes: _Scopes) -> Iterator[_Place]:
    for node, _ in scopes:
        for found, put in _expressions(node):
            if _matches(old, found, []):
                yield _Place(found, [], put)


def _statements_like(old: list[ast.stmt], scopes: _Scopes) -> Iterator[_Place]:
    for node, slot in scopes:
        runs = [(block, at) for block in _blocks(node) for at in range(len(block) - len(old) + 1)]
        for block, at in [slot, *runs] if slot and len(old) == 1 else runs:
            blocks: list[list[ast.stmt]] = []
            if _matches(old, block[at : at + len(old)], blocks):
                yield _Place(block[at], blocks, functools.partial(_put, block, at, len(old)))


def _put(block: list[ast.stmt], at: int, count: int, new: list[ast.stmt]) -> None:
    empty = ast.copy_location(ast.Pass(), block[at])
    block[at : at + count] = new or ([empty] if count == len(block) else [])


def _matches(old: Any, found: Any, blocks: list[list[ast.stmt]]) -> bool:
    """Whether two parts of a syntax tree are equal; append the blocks that ``...`` stands for."""
    if isinstance(old, list):
        if _is_any(old):
            blocks.append(found)
            return bool(found)
        return len(old) == len(found) and all(map(_matches, old, found, [blocks] * len(old)))
    if type(old) is not type(found):
        return False
    if isinstance(old, ast.AST):
        return all(_matches(*parts, blocks) for parts in _parts(old, found))
    return bool(old == found)


def _parts(old: ast.AST, found: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of two nodes of one type that have to be equal."""
    for name in old._fields:
        one: Any = getattr(old, name, None)
        other: Any = getattr(found, name, None)
        if name == "body" and isinstance(old, _DEFINITIONS) and not _is_any(old.body):
            yield _without_docstring(one), _without_docstring(other)
        elif name not in IGNORED:
            yield one, other


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    documented = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
    return body[1:] if documented else body


def _is_any(block: Sequence[Any]) -> bool:
    """Whether a block is only ``...``."""
    return len(block) == 1 and isinstance(block[0], ast.Expr) and _is_ellipsis(block[0].value)


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


class _Fill(ast.NodeTransformer):
    """Replaces each ``...`` that is a statement by the next of the blocks that were matched."""

    def __init__(self, blocks: Sequence[list[ast.stmt]]) -> None:
        self._blocks = iter(blocks)

    def visit_Expr(self, node: ast.Expr) -> Any:
        return next(self._blocks, node) if _is_ellipsis(node.value) else node


def _fill(new: list[ast.stmt], blocks: Sequence[list[ast.stmt]]) -> list[ast.stmt]:
    module = _Fill(blocks).visit(ast.Module(new, []))
    return list(module.body)
