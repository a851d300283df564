"""Which rows of a table on the host are on the device, and when the host has the newest ones."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from cached_tables import (
    LIBRARIES,
    assert_same,
    assert_states_same,
    batch,
    pair,
    states,
    tables,
    train,
)
from torch import nn, optim

from keyedopt import fused
from keyedopt.reference.embedding.row_cache import RowCache


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


@LIBRARIES
def test_rows_of_every_backward_pass_stay_until_the_step(library):
    config = library.EmbeddingBagConfig(20, 4, "t", torch.float32, ["f"], init_fn=nn.init.ones_)
    cached = library.CachedEmbeddings(library.EmbeddingBagCollection, [config], 8, optim.SGD, {"lr": 0.5})
    clip = Clip()
    cached.fused_optimizer.defer_updates(clip, inside=())
    for rows in (range(3), range(3, 6)):
        look_up(cached, rows).backward()
    with torch.no_grad():
        for rows in (range(10, 12), range(12, 14)):
            look_up(cached, rows)
    cached.fused_optimizer.step()
    assert cached.embedding_bags["t"].weight[:, 0].tolist() == [0.5] * 6 + [1] * 14
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
@pytest.mark.parametrize("part", ["tables", "state"])
def test_a_load_of_one_part_replaces_it_in_the_rows_on_the_device_too(library, part):
    both = pair(library)
    for module in both:
        train(module, range(5))
        owner = module if part == "tables" else module.fused_optimizer
        saved = copy.deepcopy(owner.state_dict())
        train(module, range(5, 10))
        owner.load_state_dict(saved)
        train(module, range(5, 10))
    assert_same(*both)


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
        module.fused_optimizer.update_hyper_parameters({"eps": 0.5})
        assert module.fused_optimizer.param_groups[0]["lr"] == 0.01
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
def test_a_table_that_gets_other_memory_is_read_anew(library):
    plain, cached = pair(library)
    train(plain, range(5))
    train(cached, range(5))
    cached.flush()
    for module in (plain, cached):
        for param in module.parameters():
            param.data = param.data * 2
        train(module, range(5, 10))
    assert_same(plain, cached)
    train(cached, [10])
    kept = next(cached.parameters())
    before = kept.data
    kept.data = before * 2
    with pytest.raises(RuntimeError, match=r"table 't0' or its state was written on the host .*: call flush"):
        cached(batch(11))
    kept.data = torch.cat([before, before])
    with pytest.raises(
        RuntimeError, match=r"is \(\d+, \d+\) on the host, and was .*: a table of another size"
    ):
        cached(batch(11))
    kept.data = before
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
