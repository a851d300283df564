"""Registering the pretend accelerator changes torch for a process, so these tests have one of their own."""

import os

if os.environ.get("KEYEDOPT_TESTS_PRETEND") != "1":
    collect_ignore_glob = ["test_*.py"]
