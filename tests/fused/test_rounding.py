"""Stochastic rounding to half precision."""

import pytest
import torch

from keyedopt import fused
from keyedopt.fused.backends.rounding import round_into


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding(dtype):
    info = torch.finfo(dtype)
    between = [1 + info.eps / 3, -1 - info.eps / 3, info.tiny * 1.0001, -info.tiny / 3]
    values = torch.tensor([*between, 0.0, 1.5, info.max, 65519.0])
    drawn = torch.empty(len(values), 20_000, dtype=dtype)
    round_into(drawn, values[:, None].expand_as(drawn).contiguous(), seed=1)
    again = torch.empty_like(drawn)
    round_into(again, values[:, None].expand_as(drawn).contiguous(), seed=1)
    assert torch.equal(drawn, again)
    for value, seen in zip(values.tolist(), drawn.double(), strict=True):
        exact = torch.tensor(value, dtype=torch.float64)
        nearest = exact.to(dtype).double()
        if nearest == exact:
            assert (seen == exact).all()
            continue
        gap = (seen.max() - seen.min()).item()
        assert seen.unique().numel() == 2 or value > info.max * 0.999  # the neighbours, and nothing else
        assert seen.min() <= exact <= seen.max() or value > info.max * 0.999
        assert abs(seen.mean() - exact) <= 4 * gap / 2 / 20_000**0.5 or value > info.max * 0.999


def test_rounding_of_what_is_not_finite():
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30])
    seen = torch.empty(4, dtype=torch.float16)
    round_into(seen, values, seed=3)
    assert seen[:2].tolist() == [float("inf"), -float("inf")]
    assert seen[2].isnan()
    assert seen[3].isinf()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("groups", [1, 2])
def test_tables_draw_numbers_of_their_own(backend, groups):
    configs = [
        fused.EmbeddingBagConfig(4, 512, name, torch.bfloat16, [name], init_fn=torch.nn.init.ones_)
        for name in ("a", "b")
    ]
    options = {"lr": 2.0**-10, "weight_decay": 0.0}
    module = fused.EmbeddingBagCollection(configs, fused.SGD, options, backend=backend, rounding_seed=3)
    if groups == 2:
        weight = module.embedding_bags["b"].weight
        fused.apply_optimizer_in_backward(fused.SGD, [weight], {**options, "weight_decay": 1e-30})
    inputs = {name: (torch.arange(4), torch.arange(5)) for name in ("a", "b")}
    sum(output.sum() for output in module(inputs).values()).backward()
    one, other = (table.weight.detach() for table in module.embedding_bags.values())
    assert len(module.fused_optimizer.param_groups) == groups
    # An element moves in one of four draws, so 3/8 of the pairs differ, within six standard deviations.
    assert abs((one != other).double().mean() - 3 / 8) <= 6 * (3 / 8 * 5 / 8 / one.numel()) ** 0.5
