"""Options of torch's optimizers that tables do not have, and where the filter of parameters is found."""

import importlib

import pytest
import torch

PACKAGES = ("reference", "fused")


@pytest.fixture(params=PACKAGES)
def package(request):
    return request.param


def applied(package, kind, **options):
    embedding = importlib.import_module(f"keyedopt.{package}.embedding")
    apply = importlib.import_module(f"keyedopt.{package}.apply_optimizer_in_backward")
    config = embedding.EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])
    module = embedding.EmbeddingBagCollection(tables=[config])
    apply.apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1, **options})
    return module


def test_an_option_that_tables_lack_is_named_with_its_class(package):
    with pytest.raises(ValueError, match=r"tables do not support the option amsgrad of torch.optim.Adam\b"):
        applied(package, torch.optim.Adam, amsgrad=True)


def test_an_option_that_tables_lack_may_have_its_default(package):
    module = applied(package, torch.optim.Adam, amsgrad=False, foreach=None)
    assert "amsgrad" not in module.fused_optimizer.param_groups[0]


def test_an_unknown_option_is_named(package):
    with pytest.raises(ValueError, match="speed"):
        applied(package, torch.optim.Adam, speed=3)


def test_the_filter_is_where_torchrec_has_it(package):
    optimizers = importlib.import_module(f"keyedopt.{package}.optimizers")
    module = importlib.import_module(f"keyedopt.{package}.apply_optimizer_in_backward")
    assert optimizers.in_backward_optimizer_filter is module.in_backward_optimizer_filter
