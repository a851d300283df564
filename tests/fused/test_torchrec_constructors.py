"""Collections are constructed as torchrec's fused collections are: location, optimizer class, table names."""

import pytest
import torch

from keyedopt import fused, reference

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fused])
KINDS = pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])


def tables(implementation, kind, *described):
    config = getattr(implementation, kind.replace("Collection", "Config"))
    return [config(rows, 4, name, feature_names=list(features)) for name, rows, features in described]


@pytest.fixture
def locations():
    pytest.importorskip("torchrec")
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmbeddingLocation

    return EmbeddingLocation


@IMPLEMENTATIONS
@KINDS
def test_location_goes_with_the_device(implementation, kind, locations):
    make, listed = getattr(implementation, kind), tables(implementation, kind, ("t", 3, "f"))
    assert make(listed, location=locations.HOST).device.type == "cpu"
    assert make(listed, device="cpu", location=None).device.type == "cpu"
    for location in (locations.HOST, locations.DEVICE):
        assert make(listed, device="meta", location=location).device.type == "meta"
    with pytest.raises(ValueError, match="location=DEVICE requires an accelerator as the device"):
        make(listed, location=locations.DEVICE)
    with pytest.raises(ValueError, match="location=HOST requires the device 'cpu'"):
        make(listed, device="cuda", location=locations.HOST)
    for location in (locations.MANAGED, locations.MANAGED_CACHING):
        with pytest.raises(ValueError, match="CachedEmbeddings"):
            make(listed, device="meta", location=location)


@IMPLEMENTATIONS
def test_torchrecs_function_makes_our_collection(implementation, locations, monkeypatch):
    """`fuse_embedding_optimizer` passes device and location."""
    torchrec = pytest.importorskip("torchrec")
    from torchrec.modules import fused_embedding_modules

    monkeypatch.setattr(
        fused_embedding_modules, "FusedEmbeddingBagCollection", implementation.EmbeddingBagCollection
    )
    config = torchrec.EmbeddingBagConfig(num_embeddings=3, embedding_dim=4, name="t", feature_names=["f"])
    model = torch.nn.Sequential(torchrec.EmbeddingBagCollection([config]))
    done = fused_embedding_modules.fuse_embedding_optimizer(
        model, torchrec.optim.RowWiseAdagrad, {"lr": 0.5}, torch.device("cpu"), locations.HOST
    )
    assert type(done[0]) is implementation.EmbeddingBagCollection
    assert list(done.state_dict()) == ["0.embedding_bags.t.weight"]


@IMPLEMENTATIONS
@KINDS
def test_torchrecs_rowwise_adagrad_is_ours(implementation, kind):
    upstream = pytest.importorskip("torchrec").optim.RowWiseAdagrad
    options = {"lr": 0.5, "initial_accumulator_value": 0.25, "weight_decay": 0.125}
    modules = []
    for optimizer in (upstream, implementation.RowWiseAdagrad):
        torch.manual_seed(0)
        module = getattr(implementation, kind)(
            tables(implementation, kind, ("t", 3, "f")), optimizer, options
        )
        for rows in ([0, 1, 1], [2]):
            found = module({"f": (torch.tensor(rows), torch.tensor([0, len(rows)]))})["f"]
            found.square().sum().backward()
        modules.append(module)
    torch.testing.assert_close(*(each.state_dict() for each in modules), rtol=0, atol=0)
    groups = [each.fused_optimizer.param_groups[0] for each in modules]
    assert {**groups[0], "params": None} == {**groups[1], "params": None}
    assert groups[0]["eps"] == 1e-8  # as FBGEMM's
    with pytest.raises(ValueError, match="rho"):
        getattr(implementation, kind)(tables(implementation, kind, ("t", 3, "f")), upstream, {"rho": 0.9})


@IMPLEMENTATIONS
@KINDS
def test_one_name_for_two_tables_raises(implementation, kind):
    make = getattr(implementation, kind)
    for described in (
        [("t", 3, "f"), ("t", 4, "g")],
        [("t", 3, "f"), ("u", 3, "h"), ("t", 3, "g")],
    ):
        with pytest.raises(ValueError, match="Duplicate table name t"):
            make(tables(implementation, kind, *described))
    with pytest.warns(UserWarning, match="are one table"), pytest.raises(ValueError, match="each once"):
        make(tables(implementation, kind, ("t", 3, "f"), ("t", 3, "f")))


@IMPLEMENTATIONS
@KINDS
@pytest.mark.parametrize("others", [[], [("u", 3, "h")]], ids=["alone", "after another table"])
def test_two_configurations_of_one_table_are_one(implementation, kind, others):
    """torchrec's fused collections accept them; its tests look three features up in two such tables."""
    make, described = getattr(implementation, kind), [*others, ("t", 3, "f"), ("t", 3, "g")]
    with pytest.warns(UserWarning, match="two configurations of table 't' are one table"):
        module = make(tables(implementation, kind, *described), implementation.SGD)
    assert len(list(module.parameters())) == 1 + len(others)
    names = [feature for _, _, feature in described]
    found = module({name: (torch.tensor([2]), torch.tensor([0, 1])) for name in names})
    assert list(found) == names
    torch.testing.assert_close(found["f"], found["g"])


@IMPLEMENTATIONS
@pytest.mark.parametrize("form", ["plain", "cached", "compiled"])
def test_need_indices_gives_the_rows_of_each_output_as_torchrec_does(implementation, form):
    torchrec = pytest.importorskip("torchrec")
    described = [("t", 8, ["f", "g"]), ("u", 9, ["g"])]
    make, listed = (
        implementation.EmbeddingCollection,
        tables(implementation, "EmbeddingCollection", *described),
    )
    if form == "cached":
        ours = implementation.CachedEmbeddings(
            make, listed, 8, torch.optim.SGD, {"lr": 0.1}, need_indices=True
        )
    else:
        ours = make(listed, torch.optim.SGD, {"lr": 0.1}, need_indices=True)
    theirs = torchrec.EmbeddingCollection(
        tables=[
            torchrec.EmbeddingConfig(num_embeddings=rows, embedding_dim=4, name=name, feature_names=features)
            for name, rows, features in described
        ],
        need_indices=True,
    )
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["f", "g"], values=torch.tensor([7, 1, 7, 0, 3]), lengths=torch.tensor([1, 2, 0, 2])
    )
    look_up = torch.compile(ours, fullgraph=True, backend="aot_eager") if form == "compiled" else ours
    found, wanted = look_up(features), theirs(features)
    assert {name: one.weights().tolist() for name, one in found.items()} == {
        name: one.weights().tolist() for name, one in wanted.items()
    }
    assert [one.lengths().tolist() for one in found.values()] == [[1, 2], [0, 2], [0, 2]]


@IMPLEMENTATIONS
def test_without_need_indices_an_output_has_no_weights(implementation):
    torchrec = pytest.importorskip("torchrec")
    made = implementation.EmbeddingCollection(tables(implementation, "EmbeddingCollection", ("t", 3, "f")))
    assert not made.need_indices()
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([2]), torch.tensor([1, 0]))
    assert made(features)["f"].weights_or_none() is None


@IMPLEMENTATIONS
def test_need_indices_of_pooled_bags_is_refused(implementation):
    listed = tables(implementation, "EmbeddingBagCollection", ("t", 3, "f"))
    with pytest.raises(ValueError, match="need_indices=True is not supported by EmbeddingBagCollection"):
        implementation.EmbeddingBagCollection(listed, need_indices=True)
