"""The native kernels and fused/bulk under sanitizers, fed by fuzzers; a long run is one command.

``tools/sanitize/run.sh 600`` does the same for ten minutes with each sanitizer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import keyedopt.tools

RUN = Path(keyedopt.tools.__file__).parent / "sanitize" / "run.sh"
FLAGS = {
    "address": "-fsanitize=address,undefined",
    "thread": "-fsanitize=thread",
    "module": "-fsanitize=address,undefined",
}
REQUIRED = os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1"
SECONDS = 5


def why_not(kind, scratch):
    """Return why this machine cannot build with a sanitizer; empty where it can."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None or shutil.which("bash") is None:
        return "there is no C++ compiler, or no bash"
    source = scratch / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [compiler, FLAGS[kind], str(source), "-o", str(scratch / "empty")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if built.returncode == 0 else f"{compiler} {FLAGS[kind]}: {built.stderr.strip()[-200:]}"


@pytest.mark.complete(spread=True)
@pytest.mark.parametrize("kind", list(FLAGS))
def test_a_fuzzer_finds_nothing(kind, tmp_path):
    why = why_not(kind, tmp_path)
    if why and not REQUIRED:
        pytest.skip(why)
    assert not why
    command = ["bash", str(RUN), str(SECONDS), kind]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls, all good" in done.stdout
    assert not done.stdout.split("\n")[1].startswith("0 calls")
