"""Stage 1: versions, what can be imported, and `keyedopt doctor`."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.gpu.stage import Context

#: What the stages import; a missing one costs only what needs it.
MODULES = (
    *("numpy", "pytest", "hypothesis", "typer", "rich", "packaging", "jsonschema", "tomlkit", "triton"),
    *("fbgemm_gpu", "torchrec", "asv", "pandas", "matplotlib", "keyedopt.cli.main", "keyedopt.fused"),
)
#: Programs of the CUDA toolkit and the driver.
PROGRAMS = ("nvidia-smi", "nvcc", "ncu", "compute-sanitizer", "cuobjdump")


def run(context: Context) -> None:
    """Save the environment, the imports, the programs and the output of the doctor."""
    found: dict[str, object] = {"environment": environment(context.device), "imports": imports()}
    found["cuda"] = torch.version.cuda
    context.save(found)
    archive, cache = os.environ.get("KEYEDOPT_FIRST_LIGHT_KERNELS"), os.environ.get("TRITON_CACHE_DIR")
    if archive and cache:
        use = [sys.executable, "-m", "keyedopt.tools.kernel_cache", "use", cache, "--archive", archive]
        found["kernels_code"], found["kernels"] = context.command(use, "kernels")
        context.save(found)
    bundle = Path(archive).with_name("manifest.json") if archive else None
    if bundle is not None and bundle.exists():
        found["bundle"] = json.loads(bundle.read_text(encoding="utf-8"))
    found["programs"] = {name: version(name) for name in PROGRAMS}
    context.save(found)
    doctor = [sys.executable, "-m", "keyedopt.cli.main", "doctor"]
    found["doctor_code"], found["doctor"] = context.command(doctor, "doctor")
    context.save(found)


def imports() -> dict[str, str]:
    """Return by module its version, or why it cannot be imported."""
    found = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
            found[name] = str(getattr(module, "__version__", "imported"))
        except Exception as error:  # of any type, as for a library built for another version
            found[name] = f"{type(error).__name__}: {error}"
    return found


def version(program: str) -> str:
    """Return the last line of what a program says about its version; "missing" without the program."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "missing"
    return ((done.stdout or done.stderr).strip().splitlines() or [""])[-1]
