"""The pytest plugin of the suite, for the workers of ``keyedopt check`` and for pytest without it::

    pytest --pyargs keyedopt.conformance.suite --implementation acme.optim

With ``--level`` or ``--expectations`` the exit status is that of ``keyedopt check``: 1 if the gate is red.
pytest loads this plugin in every environment with keyedopt. It does nothing and imports nothing heavy unless
``--implementation`` is given: then it registers `engine`, which runs the cases.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

SUITE = Path(__file__).parents[1] / "suite"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the suite."""
    group = parser.getgroup("keyedopt", "conformance of optimizers")
    group.addoption("--implementation", metavar="TARGET", help="the implementation to check")
    group.addoption("--keyedopt-import", action="append", help="import this module before the target")
    group.addoption("--keyedopt-device", default=None, help="device of the cases (default: its first)")
    group.addoption("--keyedopt-dtype", action="append", help="only these dtypes (default: all of its)")
    group.addoption("--keyedopt-nproc", type=int, default=2, help="ranks of cases that start ranks")
    group.addoption("--keyedopt-area", action="append", help="only cases with a clause of these areas")
    group.addoption("--keyedopt-clause", action="append", help="only cases of these clauses")
    group.addoption("--level", choices=("must", "should"), help="gate on must clauses only, or on should too")
    group.addoption("--expectations", metavar="FILE", help="known failures (TOML), or a shipped list")
    group.addoption("--keyedopt-defer", action="store_true", help="import it in workers (for the runner)")


def pytest_configure(config: pytest.Config) -> None:
    """Find the implementation, once per process."""
    config.addinivalue_line("markers", "clause(*ids): the clauses of the specification a case tests")
    config.addinivalue_line("markers", "needs(*names): names without which a case is unsupported")
    config.addinivalue_line("markers", "plain_only(reason): a case that does not run in situations")
    config.addinivalue_line("markers", "cpu_only(reason): a case that no other device can run")
    config.addinivalue_line("markers", "on_ranks(more): a case on ranks, and how many more than asked for")
    if not config.getoption("--implementation"):
        return
    judges = bool(config.getoption("--level") or config.getoption("--expectations"))
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        if judges:
            raise pytest.UsageError("--level and --expectations judge a whole run: use no -n")
        return  # the controller of pytest-xdist runs no cases
    from keyedopt.conformance.results.errors import KeyedoptError
    from keyedopt.conformance.targets.find import find

    try:
        deferred = config.getoption("--keyedopt-defer")
        if not deferred:  # the runner has looked at the names
            _refuse_unknown(config)
        imports = config.getoption("--keyedopt-import") or ()
        implementation = None if deferred else find(config.getoption("--implementation"), imports)
        from keyedopt.conformance.run.engine import Engine

        engine = Engine(config, implementation)
        config.pluginmanager.register(engine, "keyedopt-engine")
        if judges:
            from keyedopt.conformance.run.gate import Gate

            config.pluginmanager.register(Gate(config, engine), "keyedopt-gate")
    except KeyedoptError as error:
        raise pytest.UsageError(str(error)) from error


def _refuse_unknown(config: pytest.Config) -> None:
    """Raise UsageError if an option names a clause or an area that there is not."""
    from keyedopt.conformance import spec
    from keyedopt.conformance.results.errors import did_you_mean

    for kind, known, shown in (("clause", spec.clauses(), "clauses"), ("area", spec.areas(), "areas")):
        for name in config.getoption(f"--keyedopt-{kind}") or ():
            if name not in known:
                near = did_you_mean(name, known)
                raise pytest.UsageError(f"there is no {kind} {name!r}{near}; see `keyedopt list {shown}`")


class _SuiteModule(pytest.Module):
    """A file of the suite, imported under its full module name only."""

    def _getobj(self) -> Any:
        if not self.config.getoption("--implementation"):
            raise self.CollectError("say which implementation to check: --implementation TARGET")
        return importlib.import_module(f"keyedopt.conformance.suite.{self.path.parent.name}.{self.path.stem}")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the folders of the suite without importing them as packages."""
    return (
        pytest.Dir.from_parent(parent, path=path)
        if path in (SUITE, SUITE.parent) or path.parent == SUITE
        else None
    )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect a file of the suite by module name."""
    if module_path.parent.parent == SUITE:
        module: pytest.Module = _SuiteModule.from_parent(parent, path=module_path)
        return module
    return None
