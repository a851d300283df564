"""Embedding modules: clipping around clipping of tables, in the order of dense parameters."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_close
from keyedopt.conformance.suite.support.device import zeros
from keyedopt.conformance.suite.support.embedding import ONE_TABLE, collection, tables_of, train_rows
from keyedopt.conformance.suite.support.inputs import _numbers

CLIPPINGS = [("NORM", 1.0), ("VALUE", 0.5), ("NORM", 0.75)]


@pytest.mark.clause("FUSED-075")
@pytest.mark.plain_only("it has wrappers of its own")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "GradientClipping")
@pytest.mark.needs("KeyedOptimizerWrapper", "CombinedOptimizer")
@pytest.mark.parametrize("clippings", [CLIPPINGS[:2], CLIPPINGS[1::-1], CLIPPINGS], ids=["NV", "VN", "NVN"])
def test_order_of_nested_clipping_beside_a_dense_parameter(impl, clippings):
    """Nested clipping of a table and a dense parameter has the result of two dense parameters."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    beside, alike, dense = (torch.nn.Parameter(zeros(2, 4)) for _ in range(3))

    def keyed(**params):
        return impl.KeyedOptimizerWrapper(params, lambda listed: torch.optim.SGD(listed, lr=1.0))

    with_table = impl.CombinedOptimizer([("t", module.fused_optimizer), ("d", keyed(w=beside))])
    of_dense = impl.CombinedOptimizer([("t", keyed(w=alike)), ("d", keyed(w=dense))])
    for kind, bound in clippings:
        clipping = getattr(impl.GradientClipping, kind)
        try:
            with_table = impl.GradientClippingOptimizer(with_table, clipping, bound)
        except ValueError:
            return
        of_dense = impl.GradientClippingOptimizer(of_dense, clipping, bound)
    before = tables_of(module)["t"].detach().clone()
    grads, others = (_numbers((2, 4), seed).to(dense) * 2 for seed in (1, 2))
    beside.grad, alike.grad, dense.grad = others.clone(), grads.clone(), others.clone()
    train_rows(module, [1, 4], grads)
    with_table.step()
    of_dense.step()
    taken = (before - tables_of(module)["t"].detach())[[1, 4]]
    expect_close(taken, -alike.detach().double(), "the step of the table", ulps=2**22)
    expect_close(-beside.detach(), -dense.detach().double(), "the step of the dense parameter", ulps=2**22)


@pytest.mark.clause("FUSED-075")
@pytest.mark.plain_only("it has wrappers of its own")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "GradientClipping")
@pytest.mark.needs("KeyedOptimizerWrapper")
@pytest.mark.parametrize("clippings", [CLIPPINGS[:2], CLIPPINGS[1::-1], CLIPPINGS], ids=["NV", "VN", "NVN"])
def test_order_of_nested_clipping(impl, clippings):
    """Nested clipping of a table has the result of nested clipping of a dense parameter: the outer first."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    dense = torch.nn.Parameter(zeros(2, 4))
    of_table = module.fused_optimizer
    of_dense = impl.KeyedOptimizerWrapper({"w": dense}, lambda params: torch.optim.SGD(params, lr=1.0))
    for kind, bound in clippings:
        clipping = getattr(impl.GradientClipping, kind)
        try:
            of_table = impl.GradientClippingOptimizer(of_table, clipping, bound)
        except ValueError:
            return
        of_dense = impl.GradientClippingOptimizer(of_dense, clipping, bound)
    before, grads = tables_of(module)["t"].detach().clone(), _numbers((2, 4), 1).to(dense) * 2
    train_rows(module, [1, 4], grads)
    of_table.step()
    dense.grad = grads.clone()
    of_dense.step()
    taken = (before - tables_of(module)["t"].detach())[[1, 4]]
    expect_close(taken, -dense.detach().double(), "the step, beside that of a dense parameter", ulps=2**22)
