"""Shared by the tests of the harness."""

import os

import pytest


def pytest_collection_modifyitems(items):
    """Slow tests, those that run the whole suite, come last."""
    items.sort(key=lambda item: "test_suite_verdicts" in item.nodeid or "test_mutants" in item.nodeid)


@pytest.fixture(scope="session")
def torchrec():
    """Skip where torchrec is not installed, unless it has to be (CI)."""
    try:
        import torchrec
    except ImportError:
        if os.environ.get("KEYEDOPT_REQUIRE_TORCHREC") == "1":
            raise
        pytest.skip("torchrec is not installed: see the README, section torchrec")
    return torchrec
