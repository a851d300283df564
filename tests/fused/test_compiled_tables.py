"""Models with tables are exported, compiled into one graph, and quantized through torchrec's collections."""

import io
import itertools

import pytest
import torch
from torch import nn

from keyedopt import fused, reference

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fused])
KINDS = pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
#: Features of two forward passes, with other numbers of values and bags.
BAGS = (
    {"a": [[1, 2], [3], []], "b": [[0], [], [4, 4]]},
    {"a": [[5], [0], [1, 2], [3, 3, 1]], "b": [[2], [1], [], [0]]},
)


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables

    def forward(self, features):
        found = self.tables(features)
        if not isinstance(found, dict):
            return (found.values() * 2).square().sum()
        outputs = [one if torch.is_tensor(one) else one.values() for one in found.values()]
        return sum((output * (place + 1)).square().sum() for place, output in enumerate(outputs))


def fill(weight):
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).view_as(weight) / 7 - 1)


def model(implementation, kind, optimizer="Adagrad", weighted=False):
    config = getattr(implementation, kind.replace("Collection", "Config"))
    tables = [config(6, 4, "t", feature_names=["a", "b"], init_fn=fill)]
    tables.append(config(5, 8, "u", feature_names=["b"], init_fn=fill))
    chosen = None if optimizer is None else getattr(implementation, optimizer)
    options = None if optimizer is None else {"lr": 0.1}
    return Model(getattr(implementation, kind)(tables, chosen, options, is_weighted=weighted))


def mapping(bags, weighted=False):
    made = {}
    for name, listed in bags.items():
        values = torch.tensor([row for bag in listed for row in bag])
        offsets = torch.tensor(list(itertools.accumulate(map(len, listed), initial=0)))
        made[name] = (values, offsets, torch.arange(len(values)) / 4) if weighted else (values, offsets)
    return made


def keyed(bags, weighted=False):
    jagged = pytest.importorskip("torchrec").KeyedJaggedTensor
    listed = {"z": [[7]] * len(bags["a"]), **dict(reversed(bags.items()))}
    values = torch.tensor([row for each in listed.values() for bag in each for row in bag])
    lengths = torch.tensor([len(bag) for each in listed.values() for bag in each])
    weights = torch.arange(len(values)) / 4 if weighted else None
    return jagged(keys=list(listed), values=values, lengths=lengths, weights=weights)


INPUTS = pytest.mark.parametrize("features", [mapping, keyed])


@pytest.fixture(autouse=True)
def _without_graphs_of_others():
    torch._dynamo.reset()


def expect_equal(one, other):
    for name, weight in other.tables.state_dict().items():
        torch.testing.assert_close(one.tables.state_dict()[name], weight, rtol=1e-6, atol=1e-6)
    states = (each.tables.fused_optimizer.state_dict()["state"] for each in (one, other))
    torch.testing.assert_close(*states, rtol=1e-6, atol=1e-6)


def expect_one_graph(compiled, plain, features):
    """Train one model compiled into one graph and another without; expect equal outputs, tables and state."""
    graph = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for each in (graph, plain):
        each(features(BAGS[0])).backward()
    compiled.eval()
    torch.testing.assert_close(graph(features(BAGS[1])), plain(features(BAGS[1])))
    expect_equal(compiled, plain)


@pytest.mark.complete(sample=4)
@IMPLEMENTATIONS
@KINDS
@INPUTS
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training_in_one_graph(implementation, kind, features, backend):
    """Two forward passes with the same features count twice in their one backward pass."""
    compiled, plain = (model(implementation, kind) for _ in range(2))
    graph = torch.compile(compiled, backend=backend, fullgraph=True)
    for bags in BAGS * 2:
        losses = [each(features(bags)) + each(features(bags)) for each in (graph, plain)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    expect_equal(compiled, plain)


@IMPLEMENTATIONS
def test_two_lookups_in_one_graph_count_twice(implementation):
    compiled, plain = (model(implementation, "EmbeddingBagCollection", "SGD") for _ in range(2))
    given = mapping(BAGS[0])

    def loss(each):
        return each(given) + each(given)

    torch.compile(lambda: loss(compiled), backend="aot_eager", fullgraph=True)().backward()
    loss(plain).backward()
    expect_equal(compiled, plain)


@pytest.mark.complete(sample=2)
@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_table_that_the_loss_does_not_depend_on_is_not_updated(implementation, kind, backend):
    """Adam would move it by its momentum."""
    compiled, plain = (model(implementation, kind, "Adam") for _ in range(2))

    def loss(tables, names):
        found = tables(mapping(BAGS[0]))
        return sum(found[name].sum() for name in names)

    for names in (["a", "b@t", "b@u"], ["a"], ["b@u"]):
        torch.compile(loss, backend=backend, fullgraph=True)(compiled.tables, names).backward()
        loss(plain.tables, names).backward()
    expect_equal(compiled, plain)


@pytest.mark.complete(sample=1)
@IMPLEMENTATIONS
@INPUTS
def test_frozen_tables_and_evaluation(implementation, features):
    compiled, plain = (model(implementation, "EmbeddingBagCollection") for _ in range(2))
    for each in (compiled, plain):
        each.tables.embedding_bags["u"].weight.requires_grad_(False)
    expect_one_graph(compiled, plain, features)


@pytest.mark.complete(sample=1)
@IMPLEMENTATIONS
@INPUTS
@pytest.mark.parametrize("name", ["t", "u"])
def test_a_table_with_a_rate_of_its_own(implementation, features, name):
    compiled, plain = (model(implementation, "EmbeddingBagCollection") for _ in range(2))
    for each in (compiled, plain):
        table = each.tables.embedding_bags[name].weight
        each.tables.set_optimizer(implementation.Adagrad, [table], {"lr": 0.5})
    expect_one_graph(compiled, plain, features)


@IMPLEMENTATIONS
def test_tables_without_an_optimizer_and_weights_with_gradients_are_differentiated(implementation):
    compiled, plain = (model(implementation, "EmbeddingBagCollection", None) for _ in range(2))
    torch.compile(compiled, backend="eager")(mapping(BAGS[0])).backward()
    plain(mapping(BAGS[0])).backward()
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense())
    weighted = [model(implementation, "EmbeddingBagCollection", weighted=True) for _ in range(2)]
    gradients = []
    for each in (torch.compile(weighted[0], backend="eager"), weighted[1]):
        given = mapping(BAGS[0], weighted=True)
        given["a"][2].requires_grad_()
        each(given).backward()
        gradients.append(given["a"][2].grad)
    torch.testing.assert_close(*gradients)
    expect_equal(*weighted)


@pytest.mark.complete(sample=6)
@IMPLEMENTATIONS
@KINDS
@INPUTS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export_and_load(implementation, kind, features, weighted, strict):
    """An exported model reads the tables that it was saved with, for features of other lengths."""
    exported = model(implementation, kind, weighted=weighted)
    if features is keyed and strict:
        pytest.skip("torch.export traces the classes of torchrec only with strict=False")
    given = features(BAGS[0], weighted)
    expected = exported(given).detach()
    saved = io.BytesIO()
    torch.export.save(torch.export.export(exported.eval(), (given,), strict=strict), saved)
    exported.train()(given).backward()
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    torch.testing.assert_close(loaded(given).detach(), expected)


@IMPLEMENTATIONS
def test_errors_of_features_are_those_of_forward(implementation):
    graph = torch.compile(model(implementation, "EmbeddingBagCollection"), backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="feature 'a' must be row numbers from 0 to 5"):
        graph(mapping({**BAGS[0], "a": [[6], [], []]}))
    before = model(implementation, "EmbeddingBagCollection")
    expect_equal(graph._orig_mod, before)


@IMPLEMENTATIONS
def test_torchrec_quantizes_the_tables_or_nothing(implementation):
    pytest.importorskip("torchrec")
    modules = pytest.importorskip("torchrec.inference.modules")
    given = nn.Sequential(model(implementation, "EmbeddingBagCollection").tables, nn.Identity())
    expected = given[0](keyed(BAGS[0])).values().detach()
    with pytest.raises(ValueError, match="as_torchrec"):
        modules.quantize_inference_model(given)
    torch.ao.quantization.quantize_dynamic(given, {nn.Linear}, inplace=True)
    converted = fused.as_torchrec(given)
    torch.testing.assert_close(converted[0](keyed(BAGS[0])).values().detach(), expected)
    quantized = modules.quantize_inference_model(converted)
    assert "quant" in type(quantized[0]).__module__
    torch.testing.assert_close(quantized[0](keyed(BAGS[0])).values(), expected, rtol=0.02, atol=0.05)
    unpooled = model(implementation, "EmbeddingCollection")
    with pytest.raises(ValueError, match="as_torchrec"):
        torch.ao.quantization.quantize_dynamic(unpooled, {implementation.EmbeddingCollection: None})


@IMPLEMENTATIONS
def test_collections_of_torchrec_have_the_same_weights(implementation):
    torchrec = pytest.importorskip("torchrec")
    config = implementation.EmbeddingConfig
    listed = [config(5, 4, name, feature_names=[name]) for name in "tu"]
    tables = implementation.EmbeddingCollection(listed, implementation.SGD, need_indices=True).eval()
    converted = fused.as_torchrec(tables)
    assert type(converted) is torchrec.EmbeddingCollection
    assert converted.need_indices()
    assert not converted.training
    assert list(converted.state_dict()) == list(tables.state_dict())
    for one, other in zip(converted.parameters(), tables.parameters(), strict=True):
        assert one is other
    wide = implementation.EmbeddingBagConfig(3, 4, "w", feature_names=["f"], data_type=torch.float64)
    with pytest.raises(ValueError, match="data_type of table 'w'"):
        fused.as_torchrec(implementation.EmbeddingBagCollection([wide]))
    with pytest.raises(ValueError, match="weighted"):
        fused.as_torchrec(model(implementation, "EmbeddingCollection", weighted=True).tables)
