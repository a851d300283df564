"""Embedding modules: clipping around their fused optimizer."""

import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support import (
    expect,
    expect_close,
    expect_equal,
    parameters,
    snapshot,
)
from keyedopt.conformance.suite.support_embedding import (
    ONE_TABLE,
    collection,
    jagged,
    tables_of,
)


def clipped(impl: Any, optimizer: Any, kind: str, bound: float, **options: Any) -> Any:
    """Put clipping around a fused optimizer; None where it is refused, which is as good."""
    try:
        return impl.GradientClippingOptimizer(
            optimizer, getattr(impl.GradientClipping, kind), bound, **options
        )
    except ValueError:
        return None


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("window", [1, 2])
def test_clipping_by_value(impl, window):
    """Clipping by value bounds the summed gradient of each row in the backward pass, or it is refused."""
    accumulating = {"use_accumulate": True, "accumulate_step": window} if window > 1 else {}
    chosen = "AccumulateSGD" if accumulating else "SGD"
    module = collection(impl, chosen, {"lr": 1.0, **accumulating}, tables=ONE_TABLE)
    if clipped(impl, module.fused_optimizer, "VALUE", 0.5) is None:
        return
    before = tables_of(module)["t"].detach().clone()
    rows = [[0, [0.25, 0.5, -0.5, 0.0]], [0, [0.125, 0.5, -0.5, 0.0]], [1, [0.25, -8.0, 0.0, 0.5]]]
    for _ in range(window):
        scale = torch.tensor([grad for _, grad in rows]) / window
        (module(jagged({"f": [[row] for row, _ in rows]}))["f"] * scale).sum().backward()
    wanted = torch.zeros(6, 4)
    wanted[0] = torch.tensor([0.375, 0.5, -0.5, 0.0])
    wanted[1] = torch.tensor([0.25, -0.5, 0.0, 0.5])
    expect_close(before - tables_of(module)["t"].detach(), wanted.double(), "what was subtracted", ulps=2**22)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
def test_clipping_by_norm(impl, norm_type):
    """Clipping by norm takes that of the summed gradients of all rows of all tables, or it is refused."""
    tables = (("t", 6, 4, ("f",)), ("u", 5, 4, ("h",)))
    module = collection(impl, "SGD", {"lr": 1.0}, tables=tables)
    wrapper = clipped(impl, module.fused_optimizer, "NORM", 1.0, norm_type=norm_type)
    if wrapper is None:
        return
    before = snapshot(tables_of(module))
    wrapper.zero_grad()
    outputs = module(jagged({"f": [[0], [0], [1]], "h": [[3], [3], []]}))
    grads = torch.tensor([[1.0, 2.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0], [0.0, 0.0, -4.0, 0.0]])
    ((outputs["f"] * grads).sum() + outputs["h"][:, :1].sum()).backward()
    wrapper.step()
    total = {"t": torch.zeros(6, 4), "u": torch.zeros(5, 4)}
    total["t"][0], total["t"][1], total["u"][3, 0] = torch.tensor([3.0, 4.0, 0, 0]), grads[2], 2.0
    flat = torch.cat([each.reshape(-1) for each in total.values()]).double()
    norm = torch.linalg.vector_norm(flat, float(norm_type))
    for name, table in tables_of(module).items():
        wanted = total[name].double() / (norm + 1e-6)
        expect_close(before[name] - table.detach(), wanted, f"what was subtracted from {name}", ulps=2**22)
    if hasattr(wrapper, "last_total_grad_norm"):
        expect_close(float(wrapper.last_total_grad_norm), float(norm), "last_total_grad_norm", ulps=2**32)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_clipping_by_norm_nonfinite(impl):
    """A norm that is not finite spoils no row that is."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    if clipped(impl, module.fused_optimizer, "NORM", 1.0) is None:
        return
    grads = torch.ones(2, 4)
    grads[0, 0] = float("nan")
    (module(jagged({"f": [[0], [1]]}))["f"] * grads).sum().backward()
    expect(torch.isfinite(tables_of(module)["t"].detach()[1:]).all(), "finite rows", tables_of(module)["t"])


@pytest.mark.clause("FUSED-073")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_clipping_of_a_mixed_tree(impl, kind):
    """In a mixed tree the dense part is clipped; a fused part that is not, is warned of."""
    module, params = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE), parameters(1)
    dense = impl.KeyedOptimizerWrapper(params, lambda listed: torch.optim.SGD(listed, lr=1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = clipped(impl, impl.CombinedOptimizer([module.fused_optimizer, dense]), kind, 0.5)
    if whole is None:
        return
    table = tables_of(module)["t"]
    before = table.detach().clone()
    (module(jagged({"f": [[0]]}))["f"] * 8.0).sum().backward()
    taken = float((before - table.detach()).max())
    expect(taken <= 0.5001 or caught, "a clipped table or a warning", f"{taken} without a warning")
    params["p0"].grad = torch.tensor([8.0, 0.0, 0.0])
    weight = params["p0"].detach().clone()
    whole.step()
    step = (weight - params["p0"].detach()).double()
    expect_close(step, torch.tensor([0.5, 0.0, 0.0]).double(), "the dense step", ulps=2**34)


@pytest.mark.clause("FUSED-074")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_two_modules_by_norm(impl):
    """The norm of two modules, unknown in the backward pass of one, is refused or warned of."""
    modules = [collection(impl, "SGD", tables=ONE_TABLE) for _ in range(2)]
    whole = impl.CombinedOptimizer(
        [(str(number), each.fused_optimizer) for number, each in enumerate(modules)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapper = clipped(impl, whole, "NORM", 0.5)
    expect(wrapper is None or caught, "an error or a warning", "neither")


@pytest.mark.clause("FUSED-075")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_nested_clipping(impl):
    """Clipping around clipping applies both; clipping that takes its place applies alone."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    inner = clipped(impl, module.fused_optimizer, "VALUE", 0.25)
    if inner is None:
        return

    def taken() -> float:
        before = float(tables_of(module)["t"].detach()[0, 0])
        (module(jagged({"f": [[0]]}))["f"] * 8.0).sum().backward()
        return round(before - float(tables_of(module)["t"].detach()[0, 0]), 4)

    clipped(impl, inner, "VALUE", 0.5)
    expect_equal(taken(), 0.25, "step bounded by both")
    clipped(impl, module.fused_optimizer, "VALUE", 2.0)
    expect_equal(taken(), 2.0, "step bounded by the new one alone")
