"""State moves between keyedopt's tables, torchrec's collections, FBGEMM's module and unfused optimizers."""

import copy
import warnings

import pytest
import torch

from keyedopt import fused, reference

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fused])
KINDS = pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad"])
ROWS, WIDTH = 9, 4
#: The name of one ends with the other.
TABLES = ("item", "user_item")


def configs(kind):
    return [
        kind(num_embeddings=ROWS, embedding_dim=WIDTH, name=name, feature_names=[name]) for name in TABLES
    ]


@pytest.fixture(scope="module")
def jagged(torchrec):
    def make(seed):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 4, (2 * len(TABLES),), generator=draw)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
        return torchrec.KeyedJaggedTensor(list(TABLES), values, lengths=lengths)

    return make


def ours(implementation, name, options=None):
    kind = getattr(implementation, name)
    config = configs(implementation.EmbeddingBagConfig)
    return implementation.EmbeddingBagCollection(config, kind, {"lr": 0.1, **(options or {})})


def theirs(torchrec, name):
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    kind = RowWiseAdagrad if name == "RowWiseAdagrad" else getattr(torch.optim, name)
    config = configs(torchrec.EmbeddingBagConfig)
    return FusedEmbeddingBagCollection(config, kind, {"lr": 0.1}, device=torch.device("cpu"))


def train(module, jagged, seeds):
    for seed in seeds:
        module(jagged(seed)).values().square().sum().backward()


def weights(module):
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


@KINDS
@IMPLEMENTATIONS
@pytest.mark.parametrize("first", ["torchrec", "keyedopt"])
def test_fused_collections_continue_each_others_training(torchrec, jagged, implementation, name, first):
    upstream, module = theirs(torchrec, name), ours(implementation, name)
    source, target = (upstream, module) if first == "torchrec" else (module, upstream)
    train(source, jagged, range(4))
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    if first == "torchrec":
        module.fused_optimizer.load_state_dict(copy.deepcopy(upstream.fused_optimizer().state_dict()))
    else:
        upstream.fused_optimizer().load_state_dict(module.fused_optimizer.state_dict_in("torchrec"))
    for one in (source, target):
        train(one, jagged, range(10, 14))
    # Four steps of each round their sums in another order: an ULP of weights below 1 in each step.
    torch.testing.assert_close(weights(target), weights(source), rtol=0, atol=8 * 2**-24)


@KINDS
@IMPLEMENTATIONS
def test_the_way_through_torchrec_and_back_keeps_every_bit(torchrec, jagged, implementation, name):
    module, other, upstream = (
        ours(implementation, name),
        ours(implementation, name),
        theirs(torchrec, name).fused_optimizer(),
    )
    train(module, jagged, range(4))
    upstream.load_state_dict(module.fused_optimizer.state_dict_in("torchrec"))
    other.fused_optimizer.load_state_dict(upstream.state_dict())
    before, after = (one.fused_optimizer.state_dict()["state"] for one in (module, other))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@KINDS
@IMPLEMENTATIONS
def test_the_split_state_of_fbgemms_module_moves_both_ways(torchrec, jagged, implementation, name):
    upstream, module, other = (
        theirs(torchrec, name),
        ours(implementation, name),
        ours(implementation, name),
    )
    tbe = upstream._emb_modules[0]._emb_module
    train(module, jagged, range(4))
    given = module.fused_optimizer.state_dict_in("fbgemm")["state"]
    for table, live in zip(TABLES, tbe.split_optimizer_states() or [(), ()], strict=True):
        for state, tensor in zip(live, given[f"{table}.weight"].values(), strict=True):
            state.copy_(tensor)
    states = tbe.get_optimizer_state() if name != "SGD" else [{}, {}]
    entries = {f"{table}.weight": entry for table, entry in zip(TABLES, states, strict=True)}
    other.fused_optimizer.load_state_dict({"state": entries})
    before, after = (one.fused_optimizer.state_dict()["state"] for one in (module, other))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.5}),
        ("Adagrad", {}),
        ("RowWiseAdagrad", {}),
        ("Adam", {}),
        ("LAMB", {}),
        ("Ftrl", {}),
    ],
)
@IMPLEMENTATIONS
def test_the_state_of_unfused_optimizers_moves_both_ways(implementation, name, options):
    module, other = ours(implementation, name, options), ours(implementation, name, options)
    features = {table: (torch.tensor([1, 3]), torch.tensor([0, 1, 2])) for table in TABLES}
    for _ in range(3):
        outputs = module(features)
        (outputs["item"].square().sum() + outputs["user_item"].sum()).backward()
    params = dict(module.fused_optimizer.params)

    def factory(chosen):
        return getattr(implementation, name)(chosen, lr=0.1, **options)

    plain = {key: torch.nn.Parameter(weight.detach().clone()) for key, weight in params.items()}
    unfused = implementation.KeyedOptimizerWrapper(plain, factory)
    unfused.init_state()
    unfused.load_state_dict(module.fused_optimizer.state_dict_in("unfused"))
    other.fused_optimizer.load_state_dict(unfused.state_dict())
    before, after = (one.fused_optimizer.state_dict()["state"] for one in (module, other))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        ("unfused", "step", torch.float64),
        ("fbgemm", "row_counter", torch.float32),
        ("torchrec", "item.weight.row_counter", torch.float32),
    ],
)
def test_counts_of_rows_have_the_dtype_of_their_form(implementation, form, name, dtype):
    module = ours(implementation, "Adam", {"bias_correction": "per_row"})
    features = {table: (torch.tensor([1, 3]), torch.tensor([0, 2])) for table in TABLES}
    for _ in range(2):
        module(features)["item"].sum().backward()
    count = module.fused_optimizer.state_dict_in(form)["state"]["item.weight"][name]
    assert (count.dtype, count.tolist()) == (dtype, [0, 2, 0, 2, 0, 0, 0, 0, 0])


@IMPLEMENTATIONS
def test_names_may_have_the_path_of_a_module_in_front(implementation, torchrec, jagged):
    module, other = ours(implementation, "RowWiseAdagrad"), ours(implementation, "RowWiseAdagrad")
    train(module, jagged, range(2))
    state = module.fused_optimizer.state_dict()["state"]
    given = {f"sparse_arch.embedding_bags.{key}": entry for key, entry in state.items()}
    other.fused_optimizer.load_state_dict({"state": copy.deepcopy(given)})
    torch.testing.assert_close(other.fused_optimizer.state_dict()["state"], state, rtol=0, atol=0)


@IMPLEMENTATIONS
def test_a_count_that_is_missing_raises(implementation):
    module = ours(implementation, "Adam")
    state = module.fused_optimizer.state_dict_in("torchrec")["state"]
    assert list(state["item.weight"]) == [
        f"item.weight.{key}" for key in ("momentum_1", "momentum_2", "iter")
    ]
    without = {key: {k: v for k, v in entry.items() if "iter" not in k} for key, entry in state.items()}
    with pytest.raises(ValueError, match="count"):
        module.fused_optimizer.load_state_dict({"state": without})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.fused_optimizer.load_state_dict({"state": state})
