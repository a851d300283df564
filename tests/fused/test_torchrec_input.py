"""A script for torchrec runs with keyedopt's modules: its input, configurations, checkpoints and results."""

import io

import pytest
import torch

from keyedopt import fused, reference

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fused])
KEYS, BAGS = ["f2", "unused", "f0", "shared", "f1"], 4


@pytest.fixture(scope="module")
def jagged(torchrec):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def make(seed=0, weighted=False, dtype=torch.int64):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (len(KEYS) * BAGS,), generator=draw)
        count = int(lengths.sum())
        values = torch.randint(0, 10, (count,), generator=draw).to(dtype)
        weights = torch.rand(count, generator=draw) if weighted else None
        return KeyedJaggedTensor(KEYS, values, weights=weights, lengths=lengths)

    return make


def tables(config, pooling=None, widths=(4, 8, 12), **more):
    def filled(weight):
        with torch.no_grad():
            return weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))

    pooled = {} if pooling is None else {"pooling": pooling}
    return [
        config(
            num_embeddings=10,
            embedding_dim=width,
            name=f"t{number}",
            feature_names=[f"f{number}"] + (["shared"] if number < 2 else []),
            init_fn=filled,
            **pooled,
            **more,
        )
        for number, width in enumerate(widths)
    ]


@IMPLEMENTATIONS
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
@pytest.mark.parametrize(  # torchrec has no weighted mean
    ("pooling", "weighted"), [("SUM", False), ("MEAN", False), ("SUM", True)]
)
def test_a_keyed_jagged_tensor_gives_torchrecs_keyed_tensor(
    torchrec, jagged, implementation, optimizer, pooling, weighted
):
    kind = torchrec.modules.embedding_configs.PoolingType[pooling]
    upstream = torchrec.EmbeddingBagCollection(
        tables(torchrec.EmbeddingBagConfig, kind), is_weighted=weighted
    )
    mine = implementation.EmbeddingBagCollection(
        tables(torchrec.EmbeddingBagConfig, kind), optimizer, {"lr": 0.5}, is_weighted=weighted
    )
    features = jagged(weighted=weighted)
    want, got = upstream(features), mine(features)
    assert type(got) is type(want)
    assert (got.keys(), got.length_per_key()) == (want.keys(), want.length_per_key())
    torch.testing.assert_close(got.values(), want.values())
    assert all(got[key].data_ptr() >= got.values().data_ptr() for key in got.keys())  # noqa: SIM118
    scale = torch.linspace(1, 2, want.values().numel()).view_as(want.values())
    (want.values() * scale).sum().backward()
    (got.values() * scale).sum().backward()
    if optimizer is None:
        for name, parameter in upstream.named_parameters():
            assert mine.get_parameter(name).grad.is_sparse
            torch.testing.assert_close(mine.get_parameter(name).grad.to_dense(), parameter.grad)
    else:
        optimizer(upstream.parameters(), lr=0.5).step()
        for name, parameter in upstream.named_parameters():
            torch.testing.assert_close(mine.get_parameter(name), parameter)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_collection_without_pooling_gives_jagged_tensors(torchrec, jagged, implementation, dtype):
    configs = tables(torchrec.EmbeddingConfig, widths=(4, 4))
    want = torchrec.EmbeddingCollection(tables(torchrec.EmbeddingConfig, widths=(4, 4)))(jagged(dtype=dtype))
    got = implementation.EmbeddingCollection(configs, torch.optim.SGD, {"lr": 0.1})(jagged(dtype=dtype))
    assert list(got) == list(want)
    for name, expected in want.items():
        assert type(got[name]) is type(expected)
        assert torch.equal(got[name].values(), expected.values())
        assert torch.equal(got[name].lengths(), expected.lengths())


@IMPLEMENTATIONS
def test_a_mapping_may_have_jagged_tensors(torchrec, jagged, implementation):
    mine = implementation.EmbeddingBagCollection(tables(implementation.EmbeddingBagConfig))
    features = jagged(weighted=True)
    want, got = mine(features), mine(features.to_dict())
    assert set(got) == set(want.keys())
    assert all(torch.equal(got[key], want[key]) for key in got)


def test_the_joined_output_of_the_kernels_is_not_a_copy(torchrec, jagged, monkeypatch):
    mine = fused.EmbeddingBagCollection(tables(fused.EmbeddingBagConfig), fused.RowWiseAdagrad, {"lr": 0.1})

    def refuse(*_, **__):
        raise AssertionError("outputs are concatenated")

    features = jagged()
    monkeypatch.setattr(torch, "cat", refuse)
    mine(features).values().sum().backward()


@IMPLEMENTATIONS
def test_malformed_keyed_input_is_refused_before_anything_is_read(torchrec, implementation):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    mine = implementation.EmbeddingBagCollection(
        [implementation.EmbeddingBagConfig(10, 4, name="t", feature_names=["a", "b"])],
        torch.optim.SGD,
        {"lr": 1},
    )
    values = torch.tensor([1, 2, 3])
    wrong = {
        "rise": [[0, 3, 4, 2, 3], [0, 1, 1, 2, 2], [1, 1, 2, 3, 3]],
        "fall": [[0, 2, 1, 2, 3]],
        "shape": [[0, 1, 2, 3]],
    }
    for message, offsets in [(message, one) for message, several in wrong.items() for one in several]:
        with pytest.raises(ValueError, match=message):
            mine(KeyedJaggedTensor(["a", "b"], values, offsets=torch.tensor(offsets), stride=2))
    with pytest.raises(ValueError, match="row numbers from 0 to 9"):
        mine(KeyedJaggedTensor(["a", "b"], values * 5, offsets=torch.tensor([0, 1, 3])))
    with pytest.raises(ValueError, match="features has no 'b'"):
        mine(KeyedJaggedTensor(["a", "c"], values, offsets=torch.tensor([0, 1, 3])))
    with pytest.raises(ValueError, match="variable batch size"):
        mine(
            KeyedJaggedTensor(
                ["a", "b"],
                values,
                lengths=torch.tensor([1, 1, 1]),
                stride_per_key_per_rank=[[2], [1]],
            )
        )


@IMPLEMENTATIONS
@pytest.mark.parametrize("form", ["as it is", "compiled", "cached"])
def test_a_variable_batch_size_gives_torchrecs_keyed_tensor(torchrec, implementation, form):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    features = KeyedJaggedTensor(
        ["f1", "shared", "f0", "f2"],
        torch.tensor([0, 9, 3, 3, 3, 1, 5, 7]),
        lengths=torch.tensor([2, 0, 1, 3, 1, 0, 1]),
        stride_per_key_per_rank=[[1, 1], [1, 0], [2, 0], [1, 1]],
        inverse_indices=(
            ["f0", "shared", "f2", "f1"],
            torch.tensor([[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1], [0, 0, 1, 1, 0]]),
        ),
    )
    upstream = torchrec.EmbeddingBagCollection(tables(torchrec.EmbeddingBagConfig))
    kind, arguments = implementation.EmbeddingBagCollection, (torch.optim.SGD, {"lr": 0.5})
    if form == "cached":
        mine = implementation.CachedEmbeddings(kind, tables(torchrec.EmbeddingBagConfig), 8, *arguments)
    else:
        mine = kind(tables(torchrec.EmbeddingBagConfig), *arguments)
    look_up = torch.compile(mine, backend="eager") if form == "compiled" else mine
    want, got = upstream(features), look_up(features)
    assert (got.keys(), got.length_per_key()) == (want.keys(), want.length_per_key())
    torch.testing.assert_close(got.values(), want.values())
    scale = torch.linspace(1, 2, want.values().numel()).view_as(want.values())
    (want.values() * scale).sum().backward()
    (got.values() * scale).sum().backward()
    torch.optim.SGD(upstream.parameters(), lr=0.5).step()
    trained = mine.state_dict()
    for name, value in upstream.state_dict().items():
        torch.testing.assert_close(trained[name], value)


@IMPLEMENTATIONS
def test_torchrecs_configurations_are_taken(torchrec, implementation):
    from torchrec.modules.embedding_configs import DataType

    config = torchrec.EmbeddingBagConfig
    dtypes = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
    for name, dtype in dtypes.items():
        mine = implementation.EmbeddingBagCollection([config(3, 4, name="t", data_type=DataType[name])])
        assert mine.embedding_bags["t"].weight.dtype is dtype
        assert [one.feature_names for one in mine.embedding_bag_configs()] == [["t"]]
        assert not mine.is_weighted()
        assert mine.device == torch.device("cpu")
    with pytest.raises(ValueError, match="data_type of table 't' must be one of"):
        implementation.EmbeddingBagCollection([config(3, 4, name="t", data_type=DataType.INT8)])
    with pytest.raises(ValueError, match="use_virtual_table of table 't' is not supported"):
        implementation.EmbeddingBagCollection([config(3, 4, name="t", use_virtual_table=True)])
    pooling = torchrec.modules.embedding_configs.PoolingType.NONE
    with pytest.raises(ValueError, match="pooling of table 't' must be a member of PoolingType"):
        implementation.EmbeddingBagCollection([config(3, 4, name="t", pooling=pooling)])


#: A user's script: what it imports from torchrec is all that changes.
SCRIPT = """
{imports}
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import DataType, PoolingType

def build():
    tables = [
        EmbeddingBagConfig(
            num_embeddings=50, embedding_dim=8, name=name, feature_names=[f"{{name}}_id"],
            data_type=DataType.FP32, pooling=pooling,
        )
        for name, pooling in (("user", PoolingType.SUM), ("item", PoolingType.MEAN))
    ]
    bags = FusedEmbeddingBagCollection(
        tables, optimizer_type=torch.optim.Adagrad, optimizer_kwargs={{"lr": 0.05, "eps": 1e-8}}
    )
    model = DLRM(EmbeddingBagCollection(tables), 4, [8, 8], [8, 1])
    model.sparse_arch.embedding_bag_collection = bags
    draw = torch.Generator().manual_seed(0)
    for values in model.state_dict().values():
        values.uniform_(-0.3, 0.3, generator=draw)
    dense = dict(model.dense_arch.named_parameters(prefix="dense"))
    dense |= dict(model.over_arch.named_parameters(prefix="over"))
    tower = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
    tower = WarmupOptimizer(tower, [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)], lr=0.01)
    tower = GradientClippingOptimizer(tower, clipping=GradientClipping.NORM, max_gradient=0.5)
    return model, bags, CombinedOptimizer([bags.fused_optimizer(), ("tower", tower)])

def batch(step):
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (16,), generator=draw)
    features = KeyedJaggedTensor(
        ["item_id", "user_id"], torch.randint(0, 50, (int(lengths.sum()),), generator=draw), lengths=lengths
    )
    return torch.rand(8, 4, generator=draw), features, torch.rand(8, 1, generator=draw)

def train(model, optimizer, steps):
    for step in steps:
        dense, sparse, label = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), label)
        loss.backward()
        optimizer.step()

model, bags, optimizer = build()
train(model, optimizer, range(4))
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, buffer)
train(model, optimizer, range(4, 8))

resumed, bags, again = build()
again.init_state()
buffer.seek(0)
checkpoint = torch.load(buffer, weights_only=False)
resumed.load_state_dict(checkpoint["model"])
again.load_state_dict(checkpoint["optimizer"])
train(resumed, again, range(4, 8))
"""
UPSTREAM = """
from torchrec import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
"""
MINE = """
from keyedopt.{name} import EmbeddingBagCollection
from keyedopt.{name} import EmbeddingBagCollection as FusedEmbeddingBagCollection
from keyedopt.{name}.clipping import GradientClipping, GradientClippingOptimizer
from keyedopt.{name}.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from keyedopt.{name}.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
"""


def run(imports):
    names = {"torch": torch, "buffer": io.BytesIO()}
    exec(SCRIPT.format(imports=imports), names)
    return names


@IMPLEMENTATIONS
def test_a_script_gives_torchrecs_result_after_its_imports_are_changed(torchrec, implementation):
    """Adagrad's square roots and the sums of rows differ in rounding, by an ULP or two in a step."""
    upstream = run(UPSTREAM)
    mine = run(MINE.format(name=implementation.__name__.rpartition(".")[2]))
    want, got = upstream["model"].state_dict(), mine["model"].state_dict()
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: name + text
        )
    saved, expected = mine["optimizer"].state_dict(), upstream["optimizer"].state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for key, value in mine["resumed"].state_dict().items():
        assert torch.equal(value, got[key]), f"{key} differs after a resume"


@IMPLEMENTATIONS
def test_loading_into_a_fresh_optimizer_says_what_to_do(implementation):
    def optimizer():
        params = {"w": torch.nn.Parameter(torch.ones(2))}
        return implementation.KeyedOptimizerWrapper(params, lambda each: torch.optim.Adam(each, lr=0.1))

    first = optimizer()
    first.init_state()
    with pytest.raises(ValueError, match=r"call init_state\(\) first"):
        optimizer().load_state_dict(first.state_dict())


def test_explain_says_which_path_runs_and_why_no_other():
    configs = [
        fused.EmbeddingBagConfig(3, 4, name=str(dtype)[6:], data_type=dtype, feature_names=["f"])
        for dtype in (torch.float32, torch.float64)
    ]
    mine = fused.EmbeddingBagCollection(configs, fused.RowWiseAdagrad, {"lr": 0.1})
    wide, double = mine.explain().split("\nfloat64")
    assert "rowwise_adagrad by backend" in wide
    assert "no CUDA" in wide or "triton' (" in wide
    assert "by backend 'torch'" in double
    assert "weights must be float32, float16 or bfloat16" in double or "not 'native': its C++" in double
    assert "float64: backend='torch'" in repr(mine)
