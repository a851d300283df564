"""Accumulating optimizers: what the document says about arguments that belong together."""

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import ACCUMULATING, fixed_table, train_window
from keyedopt.conformance.suite.support.assertions import expect


@pytest.mark.clause("ACC-025")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("given", ["use_accumulate", "accumulate_step"])
def test_arguments_that_belong_together(impl, kind, given):
    """With one of the two arguments, the other has its documented default, or an error is raised."""
    param = fixed_table()
    try:
        options = {"use_accumulate": True} if given == "use_accumulate" else {"accumulate_step": 3}
        optimizer = getattr(impl, kind)([param], lr=0.125, **options)
    except (TypeError, ValueError):
        return
    before = param.detach().clone()
    train_window(optimizer, param, [0])
    expect(not torch.equal(param.detach(), before), "an update in every step", "no update")
