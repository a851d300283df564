"""The pytest side of the suite: which implementation, which cases, and a record of each.

pytest loads this plugin in every environment that has keyedopt, so it does nothing, and imports
nothing heavy, unless ``--implementation`` is given::

    pytest --pyargs keyedopt.conformance.suite --implementation acme.optim

``keyedopt check`` drives the same plugin in worker processes, with a folder for the records
(``--keyedopt-records``) and a time limit for each case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from keyedopt.conformance.implementation import Surface

SUITE = Path(__file__).parent / "suite"
_SURFACE = pytest.StashKey["Surface"]()
_IMPLEMENTATION = pytest.StashKey["Implementation"]()
_CASE = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the suite."""
    group = parser.getgroup("keyedopt", "conformance of optimizers")
    group.addoption("--implementation", metavar="TARGET", help="the implementation to check")
    group.addoption("--keyedopt-device", default=None, help="device of the cases (default: its first)")
    group.addoption("--keyedopt-dtype", action="append", help="only these dtypes (default: all of its)")
    group.addoption("--keyedopt-area", action="append", help="only cases with a clause of these areas")
    group.addoption("--keyedopt-clause", action="append", help="only cases of these clauses")
    group.addoption("--keyedopt-records", metavar="DIR", help="where the records go (for the runner)")
    group.addoption("--keyedopt-limit", type=float, default=0, help="seconds a case may take")


def pytest_configure(config: pytest.Config) -> None:
    """Find the implementation, once a process."""
    config.addinivalue_line("markers", "clause(*ids): the clauses of the specification a case tests")
    config.addinivalue_line("markers", "needs(*names): names without which a case is unsupported")
    if not config.getoption("--implementation"):
        return
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # the controller of pytest-xdist runs no case
    import hypothesis

    from keyedopt.conformance.implementation import TargetError, find

    hypothesis.settings.register_profile(
        "keyedopt",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=25,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("keyedopt")
    try:
        implementation = find(config.getoption("--implementation"))
        config.stash[_IMPLEMENTATION] = implementation
        config.stash[_SURFACE] = implementation.surface()
    except TargetError as error:
        raise pytest.UsageError(str(error)) from error


# --- collection: the suite is imported by its full name, never by path ----------------------------


class _SuiteModule(pytest.Module):
    """A file of the suite, under its one and only module name."""

    def _getobj(self) -> Any:
        return importlib.import_module(f"keyedopt.conformance.suite.{self.path.stem}")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the suite's folder, and those above it, without importing them under another name."""
    if path == SUITE or path in SUITE.parents:
        return pytest.Dir.from_parent(parent, path=path)
    return None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Collect a file of the suite by module name."""
    if module_path.parent == SUITE:
        return _SuiteModule.from_parent(parent, path=module_path)
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a case that takes ``dtype`` once for each dtype of the implementation."""
    implementation = metafunc.config.stash.get(_IMPLEMENTATION, None)
    if implementation is not None and "dtype" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--keyedopt-dtype")
        metafunc.parametrize("dtype", asked or implementation.dtypes)


def _clauses(item: pytest.Item) -> list[str]:
    return [clause for mark in item.iter_markers("clause") for clause in mark.args]


def case_id(nodeid: str) -> str:
    """Return the name of a case: ``test_keyed_load::test_shapes[2]``."""
    path, _, case = nodeid.partition("::")
    return f"{Path(path).stem}::{case}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cases that were asked for."""
    if _IMPLEMENTATION not in config.stash:
        return
    from keyedopt.conformance import spec

    known = spec.clauses()
    areas = set(config.getoption("--keyedopt-area") or ())
    wanted = set(config.getoption("--keyedopt-clause") or ())
    kept, dropped = [], []
    for item in items:
        ids = _clauses(item)
        item.stash[_CASE] = {
            "case": case_id(item.nodeid),
            "clauses": ids,
            "device": device(config),
            "dtype": item.callspec.params.get("dtype") if hasattr(item, "callspec") else None,
        }
        keep = not areas or any(known[clause].area in areas for clause in ids if clause in known)
        keep = keep and (not wanted or bool(wanted & set(ids)))
        (kept if keep else dropped).append(item)
    items[:] = kept
    folder = config.getoption("--keyedopt-records")
    if folder:  # what is collected has to give a record: the runner looks for silence
        scratch = Path(folder) / f"collected-{os.getpid()}"
        scratch.write_text(json.dumps({item.stash[_CASE]["case"]: item.stash[_CASE] for item in kept}))
        scratch.replace(Path(folder) / "collected.json")
    if dropped:
        config.hook.pytest_deselected(items=dropped)


# --- running a case -------------------------------------------------------------------------------


def device(config: pytest.Config) -> str:
    """Return the device of the cases."""
    asked = config.getoption("--keyedopt-device")
    return str(asked or config.stash[_IMPLEMENTATION].devices[0])


@pytest.fixture(name="device", scope="session")
def _device(request: pytest.FixtureRequest) -> str:
    return device(request.config)


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> Surface:
    """The public names of the implementation under test."""
    if _SURFACE not in request.config.stash:
        raise pytest.UsageError("say which implementation to check: --implementation TARGET")
    return request.config.stash[_SURFACE]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out the cases of areas, and of names, that the implementation does not claim.

    A name of the mark ``needs`` may speak of the inputs of the case: ``"{algorithm}.decay"``.
    """
    surface = item.config.stash.get(_SURFACE, None)
    if surface is None or _CASE not in item.stash:
        return
    from keyedopt.conformance import spec

    claimed = item.config.stash.setdefault(_CLAIMED, frozenset(surface.claimed()))
    missing = {spec.clauses()[clause].area for clause in _clauses(item)} - claimed
    if missing:
        pytest.skip(f"unsupported: {', '.join(sorted(missing))}")
    inputs = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    needed = [name.format(**inputs) for mark in item.iter_markers("needs") for name in mark.args]
    absent = [name for name in needed if item.config.stash[_IMPLEMENTATION].lacks(name)]
    if absent:
        pytest.skip(f"unsupported: {', '.join(absent)}")


_CLAIMED = pytest.StashKey[frozenset[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note that a case runs, where a crash leaves it, and end the process if it takes too long."""
    folder = item.config.getoption("--keyedopt-records")
    if not folder or _CASE not in item.stash:
        return (yield)
    path = Path(folder) / f"running-{os.getpid()}"
    with path.open("w", encoding="utf-8") as running:
        running.write(json.dumps({**item.stash[_CASE], "started": time.time()}) + "\n")
        running.flush()
        item.stash[_RUNNING] = running
        faulthandler.enable(file=running, all_threads=False)
        limit = item.config.getoption("--keyedopt-limit")
        if limit:  # a thread in C that needs no interpreter lock: it also ends a hanging extension
            faulthandler.dump_traceback_later(limit, exit=True, file=running)
        try:
            result = yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
    path.unlink()
    return result


_RUNNING = pytest.StashKey[IO[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a case with fresh seeds, and keep what it returns: the record of an observation."""
    if _CASE not in pyfuncitem.stash:
        return None
    import torch

    torch.manual_seed(0)
    case = pyfuncitem.stash[_CASE]
    function = pyfuncitem.obj
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    case["inputs"] = {name: value for name, value in arguments.items() if name != "impl"}
    if hasattr(function, "hypothesis"):
        _persist_draws(pyfuncitem)
    with _steps_put_back(pyfuncitem.config.stash[_SURFACE]):
        case["observed"] = function(**arguments)
    return True


@contextlib.contextmanager
def _steps_put_back(surface: Surface) -> Iterator[None]:
    """Undo what torch does to the classes, so that no case depends on those before it.

    torch patches `step` of a class, for good, when its base is initialized or a copy unpickled.
    """
    from keyedopt.conformance import spec

    names = [name for area in spec.areas().values() for name in area.names if surface.has(name)]
    bases = {base for name in names for base in getattr(getattr(surface, name), "__mro__", ())}
    before = {base: base.__dict__.get("step") for base in bases}
    try:
        yield
    finally:
        for base, step in before.items():
            if step is None and "step" in base.__dict__:
                del base.step
            elif base.__dict__.get("step") is not step:
                base.step = step


def _persist_draws(item: pytest.Function) -> None:
    """Write each drawn input down before it runs, so that a crash still has one."""
    drawn = item.obj.hypothesis
    inner = getattr(drawn, "keyedopt_inner", drawn.inner_test)
    drawn.keyedopt_inner = inner

    def noted(*args: Any, **kwargs: Any) -> Any:
        inputs = {name: value for name, value in kwargs.items() if name != "impl"}
        item.stash[_CASE]["inputs"] = inputs
        if _RUNNING in item.stash:
            item.stash[_RUNNING].write(json.dumps({"inputs": inputs}, default=repr) + "\n")
            item.stash[_RUNNING].flush()
        return inner(*args, **kwargs)

    drawn.inner_test = noted


# --- the record -----------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the record of a case to its report."""
    report = yield
    if _CASE not in item.stash or (report.when != "call" and report.outcome == "passed"):
        return report
    from keyedopt.conformance import spec
    from keyedopt.conformance.suite.support import Mismatch

    case = dict(item.stash[_CASE], seconds=round(report.duration, 4))
    error = call.excinfo.value if call.excinfo else None
    if report.outcome == "skipped":
        case.update(outcome="unsupported", seen=str(error))
    elif error is None:
        levels = {spec.clauses()[clause].level for clause in case["clauses"]}
        case["outcome"] = "observed" if levels == {"observe"} else "pass"
    else:
        summary = " ".join((getattr(item, "obj").__doc__ or "no error").split())  # noqa: B009
        case["outcome"] = "fail"
        case["expected"] = error.expected if isinstance(error, Mismatch) else summary
        case["seen"] = error.seen if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
        case["trace"] = str(call.excinfo.getrepr(style="short", chain=False)) if call.excinfo else ""
    report.user_properties.append(("keyedopt", json.loads(json.dumps(case, default=repr))))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the record to the journal: in the controller, or where there is only one process."""
    if _journal is None:
        return
    records = [value for name, value in report.user_properties if name == "keyedopt"]
    if not records and report.when == "???":  # pytest-xdist: the worker died in this case
        records = [{"case": case_id(report.nodeid), "outcome": "error"}]
    for record in records:
        _journal.write(json.dumps(record) + "\n")
        _journal.flush()


_journal: IO[str] | None = None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Open the journal where the reports arrive."""
    global _journal
    folder = session.config.getoption("--keyedopt-records")
    if folder and not hasattr(session.config, "workerinput"):
        _journal = (Path(folder) / "records.jsonl").open("a", encoding="utf-8")
