"""Kills at random moments of steps and checkpoints lose nothing."""

import subprocess
import sys

import pytest


@pytest.mark.complete
def test_twenty_kills_lose_nothing():
    command = [sys.executable, "-m", "keyedopt.tools.kills", "--kills", "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip().endswith(" step 0"), "no checkpoint was ever complete"
