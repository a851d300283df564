"""The tests in the folder `pretend`, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def test_the_pretend_accelerator():
    folder = Path(__file__).with_name("pretend")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        command,
        env=os.environ | {"KEYEDOPT_TESTS_PRETEND": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert " passed" in done.stdout
