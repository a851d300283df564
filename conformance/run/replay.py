"""Write a case as a stand-alone script that imports only torch and the implementation.

The script contains the case and the code of the suite that the case uses, where each public name of the
implementation lives, and the literal inputs. It exits with 1 while the case fails. Names of cases and inputs
come from a result file, which may be forged: only cases of the suite are written, and only literals.
"""

import ast
import copy
import functools
import graphlib
import pprint
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.untrusted import one_line, source
from keyedopt.conformance.run import case_sources
from keyedopt.conformance.suite.support.described import held_options

SUITE = Path(__file__).parents[1] / "suite"
#: The dtypes that a target may have; all of them, if its result does not name its own.
DTYPES = ("float32", "float64", "bfloat16", "float16")
#: Never imported by a script: they only mark cases and give them inputs.
HARNESS = ("keyedopt", "pytest", "hypothesis")
SUPPORT = "keyedopt.conformance.suite.support."


class ReplayError(KeyedoptError):
    """A case cannot be written as a script; the message says why."""


@dataclass(frozen=True)
class Declared:
    """What the suite says of a case.

    Args:
        inputs: the literal inputs, and the dtype.
        drawn: the names of the inputs that Hypothesis draws.
    """

    inputs: Mapping[str, Any]
    drawn: tuple[str, ...] = ()

    def check(self, case: Case) -> Mapping[str, Any]:
        """Return the inputs of a case of a result.

        Raises:
            ReplayError: the inputs of the result are not those that the suite declares.
        """
        unknown = [name for name in case.inputs if name not in (*self.inputs, *self.drawn)]
        other = [name for name, value in self.inputs.items() if case.inputs.get(name, value) != value]
        if unknown or other:
            raise ReplayError(
                f"the input {one_line((unknown or other)[0], 100)!r} of {case.case} is not that of the "
                "suite: the result is of another version, or was changed"
            )
        return {**case.inputs, **self.inputs}


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


class _Bare(ast.NodeTransformer):
    """Drops what a script does not need: annotations, and decorators that mark cases and give them inputs."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Drop annotations and decorators of a function."""
        self.generic_visit(node)
        node.returns = None
        if node.name.startswith("test_"):
            node.decorator_list = []
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Drop annotations of a class, but those of a dataclass or a tuple make its fields."""
        if not node.decorator_list and not any("Tuple" in ast.unparse(base) for base in node.bases):
            self.generic_visit(node)
            node.body = node.body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        """Turn an annotated assignment into a plain one."""
        value = node.value
        return ast.copy_location(ast.Assign([node.target], value), node) if value else None

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Drop the annotation of an argument."""
        node.annotation = None
        return node


def _used(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


def _is_harness(node: ast.stmt) -> bool:
    modules = (
        [alias.name for alias in node.names]
        if isinstance(node, ast.Import)
        else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    )  # fmt: skip
    return any(module.partition(".")[0] in HARNESS for module in modules)


@functools.cache
def _statements(path: Path) -> list[ast.stmt]:
    return _Bare().visit(ast.parse(path.read_text(encoding="utf-8"))).body  # type: ignore[no-any-return]


@functools.cache
def _names(path: Path) -> Mapping[str, list[tuple[Path, int]]]:
    """Return the statements that bind each name of a file of the suite, also in the files that it imports."""
    found: dict[str, list[tuple[Path, int]]] = {}
    for index, node in enumerate(_statements(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(SUPPORT):
            other = SUITE / "support" / f"{str(node.module).removeprefix(SUPPORT)}.py"
            found |= {alias.name: _names(other).get(alias.name, []) for alias in node.names}
        elif not _is_harness(node):
            for name in _defined(node):
                found.setdefault(name, []).append((path, index))
    return found


def _needed(wanted: Iterable[tuple[Path, str]]) -> list[ast.stmt]:
    """Return the statements that names of files need, in an order in which they can run.

    Raises:
        ReplayError: two files bind the same name to different things.
    """
    done: dict[tuple[Path, int], ast.stmt] = {}

    def add(path: Path, name: str) -> None:
        for place in _names(path).get(name, ()):
            if place not in done:
                node = _statements(place[0])[place[1]]
                done[place] = node
                for used in sorted(_used(node)):
                    add(place[0], used)

    for path, name in wanted:
        add(path, name)
    bound: dict[str, Path] = {}
    for (path, _), node in done.items():
        for name in () if isinstance(node, ast.Import | ast.ImportFrom) else _defined(node):
            if bound.setdefault(name, path) != path:
                raise ReplayError(f"{name} is another thing in {path.name} than in {bound[name].name}")
    depth = {path: place for place, path in enumerate(_support_files())}
    return [done[key] for key in sorted(done, key=lambda key: (depth.get(key[0], len(depth)), key[1]))]


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
def _support_files() -> list[Path]:
    """Return the support files of the suite, each after those that it imports."""
    imported = {
        path: [
            path.with_name(f"{node.module.removeprefix(SUPPORT)}.py")
            for node in _statements(path)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(SUPPORT)
        ]
        for path in sorted(SUITE.glob("support/*.py"))
    }
    return list(graphlib.TopologicalSorter(imported).static_order())


def source_of(name: str) -> case_sources.CaseSource:
    """Return the source of a case that a result names.

    Raises:
        ReplayError: the suite has no such case.
    """
    file, _, rest = name.partition("::")
    for found in case_sources.cases():
        if (found.file, found.name) == (file, rest.partition("[")[0]):
            return found
    raise ReplayError(f"the suite has no case {one_line(name, 200)}; the result is of another version")


def _inputs(case: str, function: ast.FunctionDef, values: Mapping[str, Any]) -> str:
    """Return the keyword arguments of the call, as source."""
    wanted = [item.arg for item in function.args.args if item.arg != "impl"]
    missing = [name for name in wanted if name not in values]
    if missing:
        raise ReplayError(f"the inputs {', '.join(missing)} of {case} were not kept")
    try:
        return "".join(f", {name}={source(values[name])}" for name in wanted)
    except ValueError as error:
        raise ReplayError(f"an input of {case} was not kept as a literal: {error}") from error


def _in_variant(
    inputs: Mapping[str, Any], adapter: Mapping[str, Any], dtypes: Collection[str]
) -> Mapping[str, Any]:
    """Return inputs whose trajectory has the oracle of the formula that the implementation documents."""
    made = inputs.get("made")
    if not isinstance(made, Mapping) or "algorithm" not in made:
        return inputs
    variant, held = (
        adapter.get("variants", {}).get(made["algorithm"]),
        held_options(adapter, made["algorithm"]),
    )
    if variant is None and not held:
        return inputs
    from keyedopt.conformance.suite.support.trajectories import in_variant  # reads all trajectories

    exact = "float64" if "float64" in dtypes else "float32"
    dtype = str(inputs.get("dtype") or inputs.get("precision") or exact)
    by_bound, by_worst = (in_variant(made, variant or "", dtype, way, held) for way in (True, False))
    return {**inputs, "made": {**by_bound, "worst": by_worst["worst"]}}


def script(
    run: Result,
    case: Case,
    inputs: Mapping[str, Any],
    places: Mapping[str, str],
    imports: Sequence[str] = (),
    adapter: Mapping[str, Any] = MappingProxyType({}),
    limit: float = 0.0,
) -> str:
    """Return the script that repeats a case of a result.

    Args:
        run: the result; only its texts, its device and its time limit are used.
        case: the case.
        inputs: see `Declared.check`.
        places: where each public name of the implementation lives.
        imports: modules that register the device.
        adapter: what the adapter of the implementation says that cases need.
        limit: seconds that the case may take, if more than in the run.

    Raises:
        ReplayError: the suite has no such case, or the result has no literal of an input.
    """
    about = run.implementation
    found = source_of(case.case)
    path = SUITE / found.area / f"{found.file}.py"
    if not places:
        raise ReplayError(
            f"{one_line(about['name'])} is an object that no script can import; give it a place in a module"
        )
    device = str(run.environment["device"])  # that of the case is where operators ran
    elsewhere = device != "cpu"
    wanted = [(path, found.name)]
    situation = str(inputs.get("situation", ""))
    if situation:
        wanted.append((SUITE / "support" / "situations.py", "in_situation"))
    if adapter:
        wanted.append((SUITE / "support" / "described.py", "described"))
    if elsewhere:
        wanted.append((SUITE / "support" / "device.py", "choose_device"))
    ranks_file = SUITE / "support" / "ranks.py"
    if found.on_each_rank:
        wanted.append((ranks_file, "on_ranks"))
    parts = _needed(wanted)
    on_ranks = any("on_ranks" in _defined(node) for node in parts)
    if on_ranks:
        parts = _needed([*wanted, (ranks_file, "choose_ranks")])
    (function,) = (node for node in parts if isinstance(node, ast.FunctionDef) and node.name == found.name)
    parts = [node for node in parts if node is not function]
    inputs = _in_variant(inputs, adapter, about.get("dtypes", DTYPES))
    call = f"{found.name}(Implementation(){_inputs(case.case, function, inputs)})"
    if situation:
        asked = call.replace("Implementation()", "impl", 1)
        call = f"in_situation(lambda impl: {asked}, Implementation(), {situation!r})"
    if found.on_each_rank:
        call = f"on_ranks(lambda: {call})[0]"
    used = _imports([*parts, function])
    bodies = [ast.unparse(node) for node in parts if not isinstance(node, ast.Import | ast.ImportFrom)]
    title = f"{' '.join(found.clauses)} on {one_line(about['name'], 100)} {one_line(about['version'], 100)}."
    statement = "\n".join(
        f"{clause} ({spec.clauses()[clause].level}): {spec.clauses()[clause].statement}"
        for clause in found.clauses
    )
    statement += "".join(
        f"\n{name}: {spec.dimensions()[name]}" for name in situation.split("+") if name in spec.dimensions()
    )
    limit = max(limit, float(run.options.get("limit") or 30))
    guarded = case.outcome == "error"
    modules = (*_IMPORTS, *(("subprocess",) if guarded else ()), *imports)
    return _SCRIPT.format(
        docstring=_docstring(f"{title}\n\n{statement}\n\n{_ABOUT}"),
        imports="\n".join(dict.fromkeys([*(f"import {name}" for name in modules), *used])),
        case=ast.unparse(function),
        bodies="".join(f"{body}\n\n\n" for body in bodies),
        places=pprint.pformat(_asked(places, [*parts, function, ast.parse(call)]), width=100),
        adapter=pprint.pformat(dict(adapter), width=100),
        found="described(found, name, self.adapter)" if adapter else "found",
        dtypes=tuple(dtype for dtype in DTYPES if dtype in about.get("dtypes", DTYPES)),
        device=f"        choose_device({device!r})\n" if elsewhere else "",
        ranks=f"        choose_ranks({int(run.options.get('nproc') or 2)})\n" if on_ranks else "",
        call=call,
        main=(_GUARDED if guarded else _DIRECT).format(limit=limit),
    )


def _asked(places: Mapping[str, str], parts: Sequence[ast.AST]) -> dict[str, str]:
    """Return the places of the names that the parts mention, as an attribute or in a text."""
    texts = {
        getattr(node, "attr", None) or getattr(node, "value", None) or getattr(node, "id", None)
        for part in parts
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute | ast.Constant | ast.Name)
    }
    return {name: place for name, place in places.items() if name in texts}


def _docstring(text: str) -> str:
    safe = text.replace("\\", "\\\\").replace('"', "'")
    return f'"""{safe}\n"""'


_ABOUT = "Needs only torch and the implementation. Exits with 1 while the case fails."
_IMPORTS = ("importlib", "random", "sys", "torch")

_SCRIPT = """\
{docstring}

from __future__ import annotations

{imports}


{case}


{bodies}PLACES = {places}


class Implementation:
    adapter = {adapter}
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
        return {found}


def replay():
    nan, inf = float("nan"), float("inf")
    torch.manual_seed(0)
    random.seed(0)
    try:
{device}{ranks}        seen = {call}
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
        sys.exit("fails: it did not end within {limit:g} s; replay with a longer --time-limit")
    if code not in (10, 11):
        print(f"fails: it ended the interpreter (exit status {{code}})")
    sys.exit(code != 10)
"""
