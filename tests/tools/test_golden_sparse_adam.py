"""The golden trajectories of SparseAdam are what their script makes."""

import pytest

from keyedopt.tools.golden import make_sparse_adam


@pytest.mark.complete
def test_the_stored_trajectories_are_what_the_script_makes():
    assert make_sparse_adam.DATA.read_text(encoding="utf-8") == make_sparse_adam.text()
