"""Write a case as a stand-alone script that imports only torch and the implementation.

The script contains the code that the case needs from ``suite/support/`` and from its own file, where each
public name of the implementation lives, and the literal inputs. It exits with 1 while the case fails.
"""

import ast
import copy
import functools
import graphlib
import pprint
from collections.abc import Iterable, Sequence
from pathlib import Path

from keyedopt.conformance import spec
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.untrusted import source

SUITE = Path(__file__).parents[1] / "suite"
#: The dtypes of results that do not name those of the target.
DTYPES = ("float32", "float64", "bfloat16", "float16")
#: Never imported by a script: they only mark cases and give them inputs.
HARNESS = ("keyedopt", "pytest", "hypothesis")


class ReplayError(KeyedoptError):
    """A case cannot be written as a script; the message says why."""


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


def _needed(names: Iterable[str], statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that functions need, themselves included, in the order of the source."""
    needed: set[int] = set()
    wanted, seen = list(names), set()
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


def _imports(statements: Sequence[ast.stmt]) -> list[str]:
    """Return the imports that the statements use, one name per line, to drop duplicates of several files."""
    used = set[str]().union(*(_used(node) for node in statements))
    lines = []
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            single = copy.copy(node)
            for alias in node.names:
                single.names = [alias]
                if _defined(single) & used:
                    lines.append(ast.unparse(single))
    return lines


@functools.cache
def _source(name: str) -> list[ast.stmt]:
    found = sorted(SUITE.glob(f"*/{name}.py")) if name.isidentifier() else []
    if not found:
        raise ReplayError(f"the suite has no file {name}.py any more; the result is of another version")
    return _statements(found[0])


@functools.cache
def _statements(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def _support_files() -> list[Path]:
    """Return the support files of the suite, each after those that it imports."""
    own = "keyedopt.conformance.suite.support."
    imported = {
        path: [
            path.with_name(f"{node.module.removeprefix(own)}.py")
            for node in _statements(path)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(own)
        ]
        for path in sorted(SUITE.glob("support/*.py"))
    }
    return list(graphlib.TopologicalSorter(imported).static_order())


def _inputs(case: Case, function: ast.FunctionDef) -> str:
    """Return the keyword arguments of the call, as source."""
    wanted = [item.arg for item in function.args.args if item.arg != "impl"]
    values = case.inputs if case.dtype is None else {"dtype": case.dtype, **case.inputs}
    missing = [name for name in wanted if name not in values]
    if missing:
        raise ReplayError(f"the inputs {', '.join(missing)} of {case.case} were not kept")
    try:
        return "".join(f", {name}={source(values[name])}" for name in wanted)
    except ValueError as error:
        raise ReplayError(f"an input of {case.case} was not kept as a literal: {error}") from error


def script(run: Result, case: Case) -> str:
    """Return the script that repeats a case of a result.

    Raises:
        ReplayError: the suite has no such case, or the result has no literal of an input.
    """
    file, _, rest = case.case.partition("::")
    name = rest.partition("[")[0]
    shared = [node for path in _support_files() for node in _statements(path)]
    statements = [node for node in [*shared, *_source(file)] if not _is_harness(node)]
    for index, node in enumerate(statements):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            statements[index] = bare = copy.copy(node)
            bare.decorator_list = []  # they only mark the case and give it inputs
    device = str(run.environment["device"])  # that of the case is where operators ran
    elsewhere = device != "cpu"
    needed = [name, "described"] + (["choose_device"] if elsewhere else [])
    parts = _needed(needed, statements)
    found = [node for node in parts if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise ReplayError(f"the suite has no case {name} in {file}.py any more")
    call = f"{name}(Implementation(){_inputs(case, found[-1])})"
    imports = _imports(parts)
    bodies = [ast.unparse(node) for node in parts if not isinstance(node, ast.Import | ast.ImportFrom)]
    about = run.implementation
    if not about.get("places"):
        raise ReplayError(
            f"{about['name']} is an object that no script can import; give it a place in a module"
        )
    title = f"{' '.join(case.clauses)} on {about['name']} {about['version']}."
    statement = "\n".join(
        f"{clause} ({spec.clauses()[clause].level}): {spec.clauses()[clause].statement}"
        for clause in case.clauses
        if clause in spec.clauses()
    )
    places = pprint.pformat(about["places"], width=100)
    limit = float(run.options.get("limit") or 30)
    return _SCRIPT.format(
        docstring=_docstring(f"{title}\n\n{statement}\n\n{_ABOUT}"),
        imports="\n".join(dict.fromkeys([*_IMPORTS, *imports, *_modules(run)])),
        bodies="\n\n\n".join(bodies),
        places=places,
        dtypes=tuple(about.get("dtypes") or DTYPES),
        adapter=pprint.pformat(about.get("adapter", {}), width=100),
        device=f"        choose_device({device!r})\n" if elsewhere else "",
        call=call,
        main=(_GUARDED if case.outcome == "error" else _DIRECT).format(limit=limit),
    )


def _modules(run: Result) -> list[str]:
    """Return the imports of the modules that register a device."""
    names = run.options.get("imports") or ()
    return [f"import {name}" for name in names if all(part.isidentifier() for part in name.split("."))]


def _docstring(text: str) -> str:
    safe = text.replace("\\", "\\\\").replace('"', "'")
    return f'"""{safe}\n"""'


_ABOUT = "Needs only torch and the implementation. Exits with 1 while the case fails."
_IMPORTS = ("import importlib", "import random", "import subprocess", "import sys", "import torch")

_SCRIPT = """\
{docstring}

from __future__ import annotations

{imports}

{bodies}


PLACES = {places}


ADAPTER = {adapter}


class Implementation:
    adapter = ADAPTER
    dtypes = {dtypes!r}

    def lacks(self, name):
        return False

    def stated(self, name):
        return True

    def __getattr__(self, name):
        if name not in PLACES:
            raise AttributeError(f"the implementation has no {{name}}")
        module, _, attribute = PLACES[name].partition(":")
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return described(found, name, ADAPTER)


def replay():
    nan, inf = float("nan"), float("inf")
    torch.manual_seed(0)
    random.seed(0)
    try:
{device}        seen = {call}
    except BaseException as error:
        print(f"fails: {{type(error).__name__}}: {{error}}")
        return 1
    print("holds" if seen is None else f"holds; observed: {{seen!r}}")
    return 0


{main}"""

_DIRECT = """\
if __name__ == "__main__":
    sys.exit(replay())
"""

#: For a case that ended its process, or did not end: another process reports that.
_GUARDED = """\
if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        sys.exit(10 + replay())
    try:
        code = subprocess.run([sys.executable, __file__, "--here"], timeout={limit}).returncode
    except subprocess.TimeoutExpired:
        sys.exit("fails: it did not end within {limit:g} s")
    if code not in (10, 11):
        print(f"fails: it ended the interpreter (exit status {{code}})")
    sys.exit(code != 10)
"""
