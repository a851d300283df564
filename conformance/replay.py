"""A case written out as a stand-alone script: torch and the implementation, nothing of keyedopt.

The script holds what the case needs of ``suite/support.py`` and of its own file, the public names of
the implementation and where they live, and the literal inputs. It exits with 1 while the case fails.
"""

import ast
import pprint
from collections.abc import Iterable, Sequence
from pathlib import Path

from keyedopt.conformance import spec
from keyedopt.conformance.implementation import Surface, find
from keyedopt.conformance.result import Case, Result

SUITE = Path(__file__).parent / "suite"
#: Never part of a script: they only mark and feed cases.
HARNESS = ("keyedopt", "pytest", "hypothesis")


class ReplayError(Exception):
    """A case that cannot be written out; the message says why."""


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement at module level binds."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Import() | ast.ImportFrom():
            return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        case ast.Assign() | ast.AnnAssign():
            targets: Iterable[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
            return {item.id for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)}
    return set()


def _used(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def _is_harness(node: ast.stmt) -> bool:
    modules = (
        [alias.name for alias in node.names]
        if isinstance(node, ast.Import)
        else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    )  # fmt: skip
    return any(module.partition(".")[0] in HARNESS for module in modules)


def _needed(name: str, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that a function needs, itself included, in the order of the source."""
    needed: set[int] = set()
    wanted, seen = [name], set()
    while wanted:
        current = wanted.pop()
        if current in seen:
            continue
        seen.add(current)
        for index, node in enumerate(statements):
            if current in _defined(node) and index not in needed:
                needed.add(index)
                wanted += _used(node)
    return [statements[index] for index in sorted(needed)]


def _source(name: str) -> list[ast.stmt]:
    path = SUITE / f"{name}.py"
    if not path.exists():
        raise ReplayError(f"the suite has no file {name}.py any more; the result is of another version")
    return ast.parse(path.read_text(encoding="utf-8")).body


def _text(node: ast.stmt, decorated: bool) -> str:
    if isinstance(node, ast.FunctionDef) and not decorated:
        node.decorator_list = []
    return ast.unparse(node)


def _places(surface: Surface) -> dict[str, str]:
    """Return where each public name that the implementation has is defined."""
    names = [name for area in spec.areas().values() for name in area.names if surface.has(name)]
    found = {}
    for name in names:
        value = getattr(surface, name)
        found[name] = f"{value.__module__}:{value.__qualname__}"
    return found


def script(run: Result, case: Case) -> str:
    """Return the script that repeats a case of a result.

    Raises:
        ReplayError: the suite no longer has the case, or an input was not kept as a literal.
    """
    file, _, rest = case.case.partition("::")
    name = rest.partition("[")[0]
    statements = [node for node in [*_source("support"), *_source(file)] if not _is_harness(node)]
    parts = _needed(name, statements)
    function = parts[-1] if parts else None
    if not isinstance(function, ast.FunctionDef) or function.name != name:
        raise ReplayError(f"the suite has no case {name} in {file}.py any more")
    missing = {item.arg for item in function.args.args} - {"impl", "device", "dtype", *case.inputs}
    if missing:
        raise ReplayError(f"the inputs {sorted(missing)} of {case.case} were not kept")
    target = run.implementation["target"]
    inputs = {
        key: value
        for key, value in {"device": case.device, "dtype": case.dtype, **case.inputs}.items()
        if key in {item.arg for item in function.args.args}
    }
    imports = [ast.unparse(node) for node in parts if isinstance(node, ast.Import | ast.ImportFrom)]
    bodies = [
        _text(node, decorated=node is not function)
        for node in parts
        if not isinstance(node, ast.Import | ast.ImportFrom)
    ]
    statement = "; ".join(
        f"{clause} ({spec.clauses()[clause].level}): {spec.clauses()[clause].statement}"
        for clause in case.clauses
        if clause in spec.clauses()
    )
    places = pprint.pformat(_places(find(target).surface()), width=100)
    head = [
        f'"""{" ".join(case.clauses)} on {run.implementation["name"]} {run.implementation["version"]}.',
        "",
        statement.replace("\\", "\\\\").replace('"""', "'''"),
        "",
        "Needs torch and the implementation alone. Exits with 1 while the case fails.",
        '"""',
    ]
    main = [
        "PLACES = " + places,
        "",
        "",
        "class Implementation:",
        "    def __getattr__(self, name):",
        "        if name not in PLACES:",
        "            raise AttributeError(f'the implementation has no {name}')",
        "        module, _, attribute = PLACES[name].partition(':')",
        "        found = importlib.import_module(module)",
        "        for part in attribute.split('.'):",
        "            found = getattr(found, part)",
        "        return found",
        "",
        "",
        'if __name__ == "__main__":',
        "    torch.manual_seed(0)",
        "    try:",
        f"        seen = {name}(Implementation(), **{inputs!r})",
        "    except Exception as error:",
        "        print(f'fails: {type(error).__name__}: {error}')",
        "        sys.exit(1)",
        "    print('holds' if seen is None else f'holds; observed: {seen}')",
    ]
    needed = dict.fromkeys(["import importlib", "import sys", "import torch", *imports])
    return "\n".join([*head, "", *needed, "", "", "\n\n\n".join(bodies), "", "", *main]) + "\n"
