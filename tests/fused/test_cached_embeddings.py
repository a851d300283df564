"""Tables on the host with a cache of rows: the same results as with all rows on the device.

In `fused` the bits are the same. In the reference, torch adds gradients of two features of a table in an
order that depends on row numbers, so its tables are float64 here, and compared nearly to the last bit.
"""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim

from keyedopt import fused, reference
from keyedopt.reference.embedding.row_cache import RowCache

LIBRARIES = pytest.mark.parametrize("library", [reference, fused], ids=["reference", "fused"])
ROWS = {"t0": 60, "t1": 40}

#: Optimizers with all kinds of state: none, full, by row, counts of steps, and counts of rows.
OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9},
    "LarsSGD": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.5},
    "RowWiseAdagrad": {"lr": 0.1, "lr_decay": 0.01},
    "Adam": {"lr": 0.1},
    "Adam by row": {"lr": 0.1, "bias_correction": "per_row"},
    "PartialRowWiseAdam": {"lr": 0.1, "optimizer_state_dtypes": {"momentum1": torch.float16}},
    "LAMB": {"lr": 0.1, "weight_decay": 0.1},
    "PartialRowWiseLAMB": {"lr": 0.1},
}


def tables(library, data_type=None):
    data_type = data_type or (torch.float64 if library is reference else torch.float32)

    def config(name, width, features):
        return library.EmbeddingBagConfig(ROWS[name], width, name, data_type, features)

    return [config("t0", 4, ["a", "both"]), config("t1", 12, ["both", "b"])]


def pair(library, kind="Adam", cached_rows=16, data_type=None, options=None, **more):
    """Return a collection, and the same with a cache."""
    name = kind.split(" ")[0]
    arguments = getattr(library, name), OPTIMIZERS[kind] if options is None else options
    torch.manual_seed(0)
    plain = library.EmbeddingBagCollection(tables(library, data_type), *arguments, **more)
    torch.manual_seed(0)
    cached = library.CachedEmbeddings(
        library.EmbeddingBagCollection, tables(library, data_type), cached_rows, *arguments, **more
    )
    return plain, cached


def batch(seed, weighted=False):
    """Bags of Zipf's rows: a few distinct rows of many."""
    draw = torch.Generator().manual_seed(seed)

    def feature(rows):
        lengths = torch.randint(0, 4, (3,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = (torch.rand(int(offsets[-1]), generator=draw) ** 4 * rows).long()
        return (values, offsets, *([torch.rand(len(values), generator=draw)] if weighted else []))

    return {"a": feature(60), "both": feature(40), "b": feature(40)}


def train(module, seeds, weighted=False):
    for seed in seeds:
        sum((one * one).sum() for one in module(batch(seed, weighted)).values()).backward()


def assert_same(plain, cached):
    """Compare tables and state: the bits of `fused`, and nearly those of the reference."""
    assert_states_same(states(plain), states(cached), "fused" in type(plain).__module__)


def states(module):
    return module.state_dict(), module.fused_optimizer.state_dict()


def assert_states_same(one, other, in_bits):
    near = {"rtol": 0, "atol": 0} if in_bits else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(one, other, **near)


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


class Clip:
    """What updates are deferred for."""


@LIBRARIES
@pytest.mark.parametrize("applied", ["step", "backward"])
def test_rows_stay_until_the_step_that_their_update_waits_for(library, applied):
    config = library.EmbeddingBagConfig(20, 4, "t", torch.float32, ["f"], init_fn=nn.init.ones_)
    arguments = optim.SGD, {"lr": 0.5}
    plain = library.EmbeddingBagCollection([config], *arguments)
    cached = library.CachedEmbeddings(library.EmbeddingBagCollection, [config], 8, *arguments)
    for module in (plain, cached):
        clip = Clip()
        module.fused_optimizer.defer_updates(clip, inside=())
        look_up(module, range(4)).backward()
        with torch.no_grad():
            look_up(module, range(4, 8))
            look_up(module, range(8, 12))
            assert (module.embedding_bags["t"].weight == 1).all()
        if applied == "step":
            module.fused_optimizer.step()
        del clip
        look_up(module, range(12, 16)).backward()  # applies an update whose clip is gone
        look_up(module, range(16, 20))
    assert_same(plain, cached)
    assert cached.embedding_bags["t"].weight[:, 0].tolist() == [0.5] * 4 + [1] * 8 + [0.5] * 4 + [1] * 4
    clip = Clip()
    cached.fused_optimizer.defer_updates(clip, inside=())
    look_up(cached, range(6)).backward()
    with pytest.raises(ValueError, match="9 rows of table 't' must be on the device"):
        look_up(cached, range(6, 9))
    cached.fused_optimizer.zero_grad()
    look_up(cached, range(6, 14))
    assert_same(plain, cached)
    del clip


def look_up(module, rows):
    """Return the sum of some rows."""
    return module({"f": (torch.tensor(list(rows)), torch.tensor([0, len(rows)]))})["f"].sum()


@LIBRARIES
def test_what_is_saved_or_read_is_the_newest(library):
    plain, cached = pair(library)
    for read in (
        lambda module: copy.deepcopy(dict(module.state_dict())),
        lambda module: copy.deepcopy(module.fused_optimizer.state_dict()),
        lambda module: {n: one.weight.detach().clone() for n, one in module.embedding_bags.items()},
        lambda module: [copy.deepcopy(dict(e)) for e in module.fused_optimizer.state.values()],
    ):
        for module in (plain, cached):
            train(module, range(8))
        assert_states_same(read(plain), read(cached), library is fused)
    assert not any(cache._updated.any() for cache in cached.fused_optimizer.caches.values())


@LIBRARIES
def test_steps_write_nothing_back(library, monkeypatch):
    _, cached = pair(library, cached_rows=60)
    dense = nn.Parameter(torch.ones(3))
    other = library.KeyedOptimizerWrapper({"dense": dense}, lambda params: optim.SGD(params, lr=0.1))
    optimizer = library.GradientClippingOptimizer(
        library.CombinedOptimizer([("", cached.fused_optimizer), ("", other)]), max_gradient=0.2
    )
    monkeypatch.setattr(RowCache, "write_back", lambda self: pytest.fail("all rows are written back"))
    for seed in range(5):
        optimizer.zero_grad()
        (sum(one.sum() for one in cached(batch(seed)).values()) + dense.sum()).backward()
        optimizer.step()


@LIBRARIES
def test_checkpoints_go_from_one_to_the_other_and_training_resumes(library):
    plain, cached = pair(library)
    train(plain, range(10))
    saved = copy.deepcopy(states(plain))
    train(cached, range(100, 110))  # rows on the device are newer than those that the load replaces
    for module in (cached, pair(library)[0]):
        module.load_state_dict(saved[0])
        module.fused_optimizer.load_state_dict(saved[1])
        train(module, range(10, 20))
        if module is cached:
            last = copy.deepcopy(states(module))
    train(plain, range(10, 20))
    assert_states_same(states(plain), last, library is fused)


@LIBRARIES
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_continues_alike_and_apart(library, copied):
    plain, cached = pair(library)
    for module in (plain, cached):
        train(module, range(10))
    twin = copied(cached)
    train(twin, range(50, 60))
    for module in (plain, cached):
        train(module, range(10, 20))
    assert_same(plain, cached)
    train(plain := copied(plain), range(3))
    train(cached := copied(cached), range(3))
    assert_same(plain, cached)


@LIBRARIES
def test_options_and_frozen_tables_act_at_once(library):
    modules = pair(library, "Adagrad")
    for module in modules:
        train(module, range(3))
        module.fused_optimizer.param_groups[0]["lr"] = 0.01
        train(module, range(3, 6))
        module.embedding_bags["t0"].weight.requires_grad_(False)
        train(module, range(6, 9))
        module.embedding_bags["t0"].weight.requires_grad_(True)
        module.fused_optimizer.param_groups[0]["lr"] = 0.02
        weights = [table.weight for table in module.embedding_bags.values()]
        library.apply_optimizer_in_backward(library.Adagrad, weights[:1], {"lr": 0.3})
        train(module, range(9, 12))
        assert sorted(group["lr"] for group in module.fused_optimizer.param_groups) == [0.02, 0.3]
    assert_same(*modules)
    for options, said in (({"rows": "all"}, "rows must be"), ({"lr": -1.0}, "lr")):
        with pytest.raises(ValueError, match=said):
            library.apply_optimizer_in_backward(library.Adagrad, weights, {"lr": 0.3, **options})
    with pytest.raises(ValueError, match="each once"):
        modules[1].set_optimizer(library.Adagrad, [nn.Parameter(torch.ones(1))], {"lr": 0.3})
    assert sorted(group["lr"] for group in module.fused_optimizer.param_groups) == [0.02, 0.3]


@LIBRARIES
def test_rows_that_are_used_often_stay(library):
    config = library.EmbeddingBagConfig(1000, 4, "t", torch.float32, ["f"])
    cached = library.CachedEmbeddings(
        library.EmbeddingBagCollection, [config], {"t": 8}, optim.SGD, {"lr": 0.1}
    )
    for step in range(50):
        for values in (torch.tensor([0, 1, 2, 3]), torch.tensor([100 + step, 200 + step])):
            cached({"f": (values, torch.tensor([0, len(values)]))})["f"].sum().backward()
    (cache,) = cached.fused_optimizer.caches.values()
    assert (cache.used, cache.loaded) == (300, 4 + 100)
    said = "t: 8 of 1000 rows on cpu; of 300 distinct rows in all batches 104 came from the host"
    assert cached.explain().splitlines()[0] == cached.fused_optimizer.explain().splitlines()[0] == said
    if library is fused:
        assert "t (torch.float32, cpu): sgd by " in fused.explain(cached)


@LIBRARIES
def test_writing_a_table_on_the_host_is_seen_or_refused(library):
    plain, cached = pair(library)
    for module in (plain, cached):
        train(module, range(5))
    kept = list(cached.parameters())
    cached.flush()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), kept, strict=True):
            one.mul_(2)
            other.mul_(2)
    for module in (plain, cached):
        train(module, range(5, 10))
    assert_same(plain, cached)
    train(cached, [10])
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(RuntimeError, match=r"table 't0' or its state was written on the host .*: call flush"):
        cached(batch(11))


@LIBRARIES
def test_too_many_rows_at_once_are_refused_and_nothing_is_lost(library):
    plain, cached = pair(library, cached_rows={"t0": 60, "t1": 3})
    many = {"a": batch(0)["a"], **dict.fromkeys(("both", "b"), (torch.arange(5), torch.tensor([0, 1, 2, 5])))}
    with pytest.raises(ValueError, match=r"5 rows of table 't1' must be on the device .*cached_rows is 3"):
        cached(many)
    few = {"a": batch(0)["a"], **dict.fromkeys(("both", "b"), (torch.arange(2), torch.tensor([0, 0, 1, 2])))}
    waiting = cached(few)
    other = {**few, **dict.fromkeys(("both", "b"), (torch.arange(2) + 2, torch.tensor([0, 0, 1, 2])))}
    with pytest.raises(ValueError, match=r"4 rows of table 't1' .* wait for their update"):
        cached(other)
    for outputs in (waiting, plain(few)):
        sum(one.sum() for one in outputs.values()).backward()
    for module in (plain, cached):
        sum(one.sum() for one in module(other).values()).backward()
    assert_same(plain, cached)


WINDOW = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 2}


@LIBRARIES
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cached_rows": 0}, "cached_rows of table 't0' must be an integer of at least 1, not 0"),
        ({"cached_rows": True}, "must be an integer of at least 1, not True"),
        ({"cached_rows": {"t0": 4}}, r"one for each of \['t0', 't1'\], not for \['t0'\]"),
        ({"kind": "AccumulateSGD", "options": WINDOW}, "must not accumulate"),
        ({"options": {"lr": 0.1, "rows": "all"}}, "rows must be 'given' or 'nonzero'"),
        ({"process_group": object()}, "process_group must be None"),
        ({"collection_class": nn.EmbeddingBag}, "collection_class must be a collection of keyedopt"),
    ],
)
def test_bad_arguments(library, change, said):
    given = {"kind": "SGD", "collection_class": library.EmbeddingBagCollection, "options": {"lr": 0.1}}
    given |= {"cached_rows": 8, "process_group": None, **change}
    kind = getattr(library, given["kind"])
    first = given["collection_class"], tables(library), given["cached_rows"], kind, given["options"]
    with pytest.raises(ValueError, match=said):
        library.CachedEmbeddings(*first, process_group=given["process_group"])


@LIBRARIES
def test_inputs_are_checked_and_the_module_stays_where_it_is(library):
    _, cached = pair(library)
    with pytest.raises(ValueError, match="values of feature 'a' must be row numbers from 0 to 59"):
        cached({**batch(0), "a": (torch.tensor([60]), torch.tensor([0, 1, 1, 1]))})
    with pytest.raises(ValueError, match="must be where the cache is, on cpu, not on meta"):
        cached._values({"a": SimpleNamespace(values=torch.ones(1, device="meta"))}, "a")
    model = nn.Sequential(cached, nn.Linear(2, 2)).to("cpu")
    with pytest.raises(RuntimeError, match=r"the cache stays on cpu in torch\.float\d\d: make new"):
        model.half()
    with pytest.raises(ValueError, match="filled in place: call load_state_dict without assign=True"):
        cached.load_state_dict(cached.state_dict(), assign=True)
    with pytest.raises(ValueError, match="the groups of an embedding module are of its tables"):
        cached.fused_optimizer.add_param_group({"params": []})
