"""Tables train as torchrec's do, but for the order in which sums are rounded."""

import pytest


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad"])
def test_tables_drift_no_further_than_torchrec_from_one_unit_away(torchrec, name):
    from keyedopt.tools import drift

    assert name in drift.OPTIMIZERS
    ours, theirs = drift.drifts(name, steps=12)
    assert theirs > 0
    assert ours <= 2 * theirs
