"""Tables on the host with a cache of rows: the same results as with all rows on the device."""

import copy

import pytest
import torch
from cached_tables import (
    LIBRARIES,
    OPTIMIZERS,
    assert_same,
    batch,
    pair,
    train,
)
from torch import nn, optim

from keyedopt import fused


@LIBRARIES
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_gives_the_same_results(library, kind):
    plain, cached = pair(library, kind)
    assert_same(plain, cached)
    for seeds in (range(20), range(20, 30)):
        for module in (plain, cached):
            train(module, seeds)
        assert_same(plain, cached)
    loaded = [cache.loaded for cache in cached.fused_optimizer.caches.values()]
    assert all(count > 16 for count in loaded), "no row ever left the device"


@LIBRARIES
def test_outputs_are_the_same_in_training_and_evaluation(library):
    plain, cached = pair(library, is_weighted=True)
    for seed in range(10):
        for module in (plain, cached):
            module.train(seed % 2 == 0)
        given = batch(seed, weighted=True)
        one, other = plain(given), cached(given)
        assert list(one) == list(other)
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        for outputs in (one, other):
            assert [value.requires_grad for value in outputs.values()] == [seed % 2 == 0] * 4
        if seed % 2 == 0:
            for outputs in (one, other):
                sum(value.sum() for value in outputs.values()).backward()
    assert_same(plain, cached)


@pytest.mark.parametrize("data_type", [torch.float64, torch.bfloat16])
def test_other_dtypes(data_type):
    plain, cached = pair(fused, "RowWiseAdagrad", data_type=data_type)
    for module in (plain, cached):
        train(module, range(15))
    assert_same(plain, cached)


@LIBRARIES
def test_without_pooling_and_with_jagged_input(library, torchrec):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    collections = (library.EmbeddingCollection, library.EmbeddingBagCollection)
    for collection, config in zip(
        collections, (library.EmbeddingConfig, library.EmbeddingBagConfig), strict=True
    ):
        configs = [
            config(50, 4, "t0", torch.float64, ["a", "both"]),
            config(50, 4, "t1", torch.float64, ["both"]),
        ]
        arguments = (optim.Adagrad, {"lr": 0.1})
        torch.manual_seed(0)
        plain = collection(configs, *arguments)
        torch.manual_seed(0)
        cached = library.CachedEmbeddings(collection, configs, 12, *arguments)
        for seed in range(6):
            draw = torch.Generator().manual_seed(seed)
            lengths = torch.randint(0, 3, (6,), generator=draw)
            values = torch.randint(0, 50, (int(lengths.sum()),), generator=draw)
            given = KeyedJaggedTensor(["both", "a"], values, lengths=lengths)
            one, other = plain(given), cached(given)
            assert type(one) is type(other)
            if collection is library.EmbeddingBagCollection:
                assert (one.keys(), one.length_per_key()) == (other.keys(), other.length_per_key())
                assert torch.equal(one.values(), other.values())
                losses = [each.values().square().sum() for each in (one, other)]
            else:
                assert list(one) == list(other)
                assert all(torch.equal(one[key].offsets(), other[key].offsets()) for key in one)
                losses = [sum(each[key].values().square().sum() for key in one) for each in (one, other)]
            for loss in losses:
                loss.backward()
        assert_same(plain, cached)


@LIBRARIES
def test_a_backward_pass_through_several_forward_passes_keeps_all_their_rows(library):
    plain, cached = pair(library, cached_rows=24)
    for first in range(0, 20, 2):
        for module in (plain, cached):
            outputs = [*module(batch(first)).values(), *module(batch(first + 1)).values()]
            sum((one * one).sum() for one in outputs).backward()
    assert_same(plain, cached)


@LIBRARIES
def test_a_graph_that_is_dropped_or_only_differentiated_keeps_no_row(library):
    plain, cached = pair(library, cached_rows=14)
    for seed in range(20):
        for module in (plain, cached):
            module(batch(100 + seed))
            outputs = module(batch(200 + seed))
            torch.autograd.grad(sum(one.sum() for one in outputs.values()), list(outputs.values()))
            del outputs
            train(module, [seed])
    assert_same(plain, cached)


@LIBRARIES
def test_a_second_backward_pass_after_rows_have_left_is_an_error(library):
    _, cached = pair(library, cached_rows=14)
    loss = sum(one.sum() for one in cached(batch(0)).values())
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    train(cached, range(1, 12))
    before = copy.deepcopy(cached.state_dict())
    with pytest.raises(RuntimeError, match=r"rows of table 't\d' have left the device"):
        loss.backward()
    torch.testing.assert_close(cached.state_dict(), before, rtol=0, atol=0)


@LIBRARIES
@pytest.mark.parametrize("clipping", ["norm", "value", "joint norm"])
def test_clipped_warmed_up_and_combined(library, clipping):
    modules = pair(library, cached_rows=30)
    for module in modules:
        dense = nn.Parameter(torch.ones(3))
        optimizer = module.fused_optimizer
        if clipping == "joint norm":
            other = library.KeyedOptimizerWrapper({"dense": dense}, lambda params: optim.SGD(params, lr=0.1))
            optimizer = library.CombinedOptimizer([("", optimizer), ("", other)])
        kind = library.GradientClipping.VALUE if clipping == "value" else library.GradientClipping.NORM
        optimizer = library.WarmupOptimizer(
            library.GradientClippingOptimizer(optimizer, clipping=kind, max_gradient=0.2),
            [library.WarmupStage(library.WarmupPolicy.LINEAR, max_iters=8, value=0.1)],
            lr=0.5,
        )
        for seed in range(16):
            optimizer.zero_grad()
            for part in range(2):  # the gradients of the first wait for the step
                outputs = module(batch(2 * seed + part)).values()
                (sum((one * one).sum() for one in outputs) + dense.square().sum()).backward()
            module.eval()
            module(batch(100 + seed))
            module.train()
            optimizer.step()
    assert_same(*modules)
    one, other = (module.fused_optimizer.param_groups[0]["lr"] for module in modules)
    assert one == other != 0.1
