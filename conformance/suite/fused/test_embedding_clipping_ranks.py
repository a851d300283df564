"""Embedding modules: clipping around their fused optimizer by a norm over several ranks."""

import warnings

import pytest

from keyedopt.conformance.suite.support.assertions import expect_close
from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.embedding import ONE_TABLE, collection, tables_of, train_rows
from keyedopt.conformance.suite.support.mirror import mirrored_ranks
from keyedopt.conformance.suite.support.sharded import everyone


@pytest.mark.clause("FUSED-106")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_norm_of_tables_over_ranks(impl):
    """The norm counts the rows of a table on both ranks, or the clipping optimizer raises or warns."""
    with mirrored_ranks(2):
        module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
        table = tables_of(module)["t"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                wrapper = impl.GradientClippingOptimizer(
                    module.fused_optimizer,
                    impl.GradientClipping.NORM,
                    1.0,
                    enable_global_grad_clip=True,
                    param_to_pgs={table: [everyone()]},
                )
            except ValueError:
                return
        if caught:
            return
        before = table.detach().clone()
        train_rows(module, [2], tensor([[3.0, 0.0, 4.0, 0.0]]))
        wrapper.step()
        wanted = tensor([3.0, 0.0, 4.0, 0.0]).double() / (50**0.5 + 1e-6)  # twice 3² + 4²
        expect_close((before - table.detach())[2].double(), wanted, "the step of the row", ulps=2**34)
