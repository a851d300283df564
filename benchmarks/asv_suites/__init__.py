"""What asv runs: old commits of keyedopt, measured by the benchmarks of today.

asv loads this folder under its bare name, `asv_suites`, in an environment in which the commit to be measured
is installed. That commit brings benchmarks of its own, or none. So the folder above is made the package
`keyedopt.benchmarks`, before anybody imports it, and everything else of keyedopt is the commit's: the
benchmarks must do with its public names.
"""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGE = "keyedopt.benchmarks"


def use_the_benchmarks_beside_this() -> None:
    """Make the folder above this one `keyedopt.benchmarks`.

    Raises:
        ImportError: others were imported already.
    """
    folder = Path(__file__).resolve().parents[1]
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
        raise ImportError(f"{PACKAGE} is that of {known.__file__}: import asv_suites first")


use_the_benchmarks_beside_this()
