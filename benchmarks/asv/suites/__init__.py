"""The suites that asv runs: today's benchmarks measure old commits of keyedopt.

asv imports this folder under its bare name, `suites`, in an environment in which the commit under test is
installed. The commit may have no benchmarks, or older ones. Before anything imports them, this module
therefore makes the folder `benchmarks` of this checkout the package `keyedopt.benchmarks`. All other packages
of keyedopt are those of the commit, so benchmarks may use only its public names.
"""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = "keyedopt.benchmarks"


def use_benchmarks_of_this_checkout() -> None:
    """Make the folder `benchmarks` that contains this module the package `keyedopt.benchmarks`.

    Raises:
        ImportError: another `keyedopt.benchmarks` was imported before.
    """
    folder = Path(__file__).resolve().parents[2]
    known = sys.modules.get(PACKAGE)
    if known is None:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec
        assert spec.loader
        sys.modules[PACKAGE] = known = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(known)
        with contextlib.suppress(ImportError):
            setattr(importlib.import_module("keyedopt"), "benchmarks", known)  # noqa: B010 - mypy knows better
    if Path(str(known.__file__)).resolve().parent != folder:
        raise ImportError(f"{PACKAGE} was already imported from {known.__file__}: import {__name__} first")


use_benchmarks_of_this_checkout()
