"""Packed input of the C++ kernels: the bits of separate lookups, the same refusals, no split of the input."""

import os
from itertools import accumulate, pairwise
from unittest.mock import patch

import pytest
import torch

from keyedopt import fused
from keyedopt.fused.backends.interface import Step, Table, Tables
from keyedopt.fused.backends.native import NativeBackend
from keyedopt.fused.backends.packed import PackedLayout, PackedLookups

WHY = NativeBackend("").missing()
if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert not WHY, WHY
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "built")

SETS = NativeBackend.instruction_sets()
SIZES = [(40, 8), (1, 5), (3000, 64)]
#: The table of each lookup, its key and its mean: key 1 is looked up in two tables, key 3 in none.
TABLES, KEYS, MEANS = (0, 2, 1, 0, 2), (2, 1, 0, 4, 1), (False, True, False, False, False)
KEY_COUNT, BAGS = 5, 70
STEP = Step("rowwise_adagrad", 0.1, eps=1e-8)


def tables(dtype=torch.float32):
    draw = torch.Generator().manual_seed(7)
    return Tables(
        Table(torch.rand(rows, width, generator=draw).to(dtype), (torch.zeros(rows),))
        for rows, width in SIZES
    )


def packed(weighted=False, bags=BAGS, width_of_grad=1):
    """Return the lookups of a packed input with gradients, whose elements may be apart."""
    draw = torch.Generator().manual_seed(bags)
    lengths = torch.randint(0, 4, (KEY_COUNT * bags,), generator=draw)
    lengths[: bags // 2] = 0
    offsets = torch.tensor([0, *lengths.cumsum(0).tolist()])
    smallest = [min(SIZES[t][0] for t, k in zip(TABLES, KEYS, strict=True) if k == key) for key in (0, 1, 2)]
    smallest += [10**9, SIZES[0][0]]  # nobody reads the rows of a key without a table
    parts = [
        torch.randint(
            0, smallest[key], (int(offsets[(key + 1) * bags] - offsets[key * bags]),), generator=draw
        )
        for key in range(KEY_COUNT)
    ]
    ends = accumulate((SIZES[table][1] for table in TABLES), initial=0)
    layout = PackedLayout(TABLES, MEANS, KEYS, tuple(slice(*pair) for pair in pairwise(ends)), KEY_COUNT)
    values = torch.cat(parts)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    grad = torch.randn(bags, layout.width * width_of_grad, generator=draw)[:, ::width_of_grad]
    return PackedLookups(layout, values, offsets, weights, bags, grad)


def same(one, other):
    return all(
        torch.equal(a, b)
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine.tensors, theirs.tensors, strict=True)
    )


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_packed_input_gives_the_bits_of_separate_lookups(dtype, weighted, threads, name):
    backend = NativeBackend(name, threads)
    for bags, width_of_grad in ((BAGS, 1), (1, 1), (300, 2)):
        lookups = packed(weighted, bags, width_of_grad)
        one, other = tables(dtype), tables(dtype)
        for _ in range(2):  # what is kept from the first time is used the second time
            found = backend.look_up_packed(one, lookups, True)
            assert torch.equal(found, torch.cat(backend.look_up(other, list(lookups)), 1))
            sums = zip(backend.coalesce(one, lookups), backend.coalesce(other, list(lookups)), strict=True)
            for mine, theirs in sums:
                assert mine.table == theirs.table
                assert torch.equal(mine.rows, theirs.rows)
                assert torch.equal(mine.grads, theirs.grads)
            backend.update(one, lookups, STEP)
            backend.update(other, list(lookups), STEP)
            assert same(one, other)


def test_an_expanded_gradient_and_one_in_half_precision_are_summed():
    for grad in (
        torch.ones(1, 1).expand(BAGS, sum(SIZES[table][1] for table in TABLES)),
        packed().grad.half(),
    ):
        lookups, one, other = packed().with_grad(grad), tables(), tables()
        NativeBackend().update(one, lookups, STEP)
        NativeBackend().update(other, list(lookups), STEP)
        assert same(one, other)


def broken(what):
    """Return packed lookups that are wrong in one place, and tables."""
    given, made = packed(), tables()
    offsets, values = given.offsets.clone(), given.values.clone()
    if what == "falls inside a key":
        offsets[BAGS + 5] = offsets[BAGS + 9] + 1
    elif what == "falls between keys":
        offsets[2 * BAGS] = offsets[3 * BAGS] + 1
    elif what == "a key begins below 0":
        offsets[BAGS] = -1
    elif what == "does not begin at 0":
        offsets[0] = 1
    elif what == "does not end at the end":
        offsets[-1] += 1
    elif what == "a key ends behind the end":
        offsets[2 * BAGS] = len(values) + 5
    elif what == "too few offsets":
        offsets = offsets[:-1]
    elif what == "no row of the table":
        values[offsets[2 * BAGS]] = 40
    elif what == "a row below 0":
        values[offsets[2 * BAGS]] = -1
    found = PackedLookups(given.layout, values, offsets, None, given.bags, given.grad)
    if what == "too few weights":
        found = PackedLookups(
            given.layout, values, offsets, torch.ones(len(values) - 1), given.bags, given.grad
        )
    elif what == "a narrow gradient":
        found = found.with_grad(given.grad[:, :-1])
    elif what == "a gradient of other rows":  # as many numbers, but the last rows would be behind the end
        found = found.with_grad(given.grad.reshape(BAGS // 2, -1))
    return found, made


WRONG = [
    *("falls inside a key", "falls between keys", "a key begins below 0", "does not begin at 0"),
    *("does not end at the end", "a key ends behind the end", "too few offsets", "no row of the table"),
    *("a row below 0", "too few weights", "a narrow gradient", "a gradient of other rows"),
]


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_packed_input_is_refused_before_anything_is_written(what):
    lookups, made = broken(what)
    backend = NativeBackend()
    with pytest.raises(ValueError, match=r"packed input|offsets|row numbers"):
        backend.update(made, lookups, STEP)
    assert same(made, tables())
    with pytest.raises(ValueError, match=r"packed input|offsets|row numbers"):
        backend.coalesce(made, lookups)
    if "gradient" not in what:
        with pytest.raises(ValueError, match=r"packed input|offsets|row numbers"):
            backend.look_up_packed(made, lookups, True)


@pytest.mark.parametrize("freed", ["values", "offsets", "weights", "grad"])
def test_freed_memory_of_a_packed_input_raises(freed):
    lookups, made = packed(weighted=True), tables()
    getattr(lookups, freed).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has been freed"):
        NativeBackend().update(made, lookups, STEP)
    assert same(made, tables())


@pytest.mark.parametrize("optimizer", [fused.RowWiseAdagrad, fused.AdamW, torch.optim.SGD])
def test_a_module_does_not_split_a_keyed_jagged_tensor(torchrec, optimizer):
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys, lengths = ["b", "nobody", "c", "a"], torch.tensor([1, 0, 2, 1, 0, 3, 1, 1])
    values = torch.tensor([5, 900, 900, 900, 1, 1, 7, 2, 2])
    configs = [
        fused.EmbeddingBagConfig(10, 4, "t0", feature_names=["a", "b"]),
        fused.EmbeddingBagConfig(8, 16, "t1", feature_names=["c", "a"]),
    ]
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(fused.EmbeddingBagCollection(configs, optimizer, {"lr": 0.1}, backend="native"))
    jagged = KeyedJaggedTensor(keys, values, lengths=lengths)
    for _ in range(3):
        with patch.object(PackedLookups, "_split", side_effect=AssertionError("the input is split")):
            joined = modules[0](jagged).values()
            joined.square().sum().backward()
        separate = torch.cat(list(modules[1](jagged.to_dict()).values()), 1)
        separate.square().sum().backward()
        assert torch.equal(joined, separate)
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))
    with pytest.raises(ValueError, match=r"feature 'c'.*row numbers from 0 to 7"):
        modules[0](KeyedJaggedTensor(keys, values.where(values != 7, 8), lengths=lengths))


def module(optimizer=fused.RowWiseAdagrad, dtypes=(torch.float32, torch.float32), backend="native"):
    configs = [
        fused.EmbeddingBagConfig(10, 4, f"t{number}", dtype, [f"f{number}"])
        for number, dtype in enumerate(dtypes)
    ]
    return fused.EmbeddingBagCollection(configs, optimizer, optimizer and {"lr": 0.1}, backend=backend)


def frozen():
    made = module()
    made.embedding_bags["t1"].weight.requires_grad_(False)
    return made


def unpooled():
    configs = [fused.EmbeddingConfig(10, 4, "t", torch.float32, ["f"])]
    return fused.EmbeddingCollection(configs, fused.RowWiseAdagrad, {"lr": 0.1}, backend="native")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (module, "is not split"),
        (unpooled, "is split: rows are not pooled"),
        (lambda: module(dtypes=(torch.float32, torch.float16)), "differ in parameter group, dtype or device"),
        (lambda: module(backend="torch"), "the backend 'torch' takes each feature separately"),
        (lambda: module(optimizer=None), "tables without an optimizer are differentiated by torch"),
        (frozen, "some tables are frozen"),
    ],
)
def test_explain_says_whether_a_keyed_jagged_tensor_is_split(make, said):
    line = make().explain().splitlines()[-1]
    assert line.startswith("a KeyedJaggedTensor is ")
    assert said in line
