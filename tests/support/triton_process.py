"""Processes for tests of Triton: its interpreter has to be chosen before triton is imported, or left out.

A test file is the script of its own process. There it writes what it found (`hand_over`); a fixture of the
same file starts the process and reads it (`run_alone`).
"""

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import quick_interpreter  # noqa: F401 - which makes it so


def run_alone(factory: pytest.TempPathFactory, script: str, *given: str, interpret: bool = True) -> Any:
    """Run a test file as a script on one thread, with the interpreter or without; return what it found.

    Args:
        factory: of the folders for its output and for triton's cache.
        script: the test file.
        given: its arguments.
        interpret: whether Triton's interpreter runs the kernels.
    """
    if importlib.util.find_spec("triton") is None and not os.environ.get("KEYEDOPT_REQUIRE_TRITON"):
        pytest.skip("triton is not installed (KEYEDOPT_REQUIRE_TRITON=1 makes this a failure)")
    folder = factory.mktemp("triton")
    output = folder / "found.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(_cache(factory))}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    subprocess.run([sys.executable, script, *given, str(output)], check=True, env=environment, timeout=900)
    return json.loads(output.read_text())


def _cache(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of compiled kernels, which the processes of a run of pytest share."""
    base = factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "triton_cache"


def hand_over(found: Any) -> None:
    """Write what was found where `run_alone` reads it."""
    Path(sys.argv[-1]).write_text(json.dumps(found))


def outcomes(cases: Iterable[tuple[str, Callable[[], None]]]) -> dict[str, str]:
    """Run cases; return what went wrong in each, empty where nothing did."""
    found = {}
    for name, case in cases:
        try:
            case()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    return found
