"""What `keyedopt.fused` does to many tensors at once: the extension against torch, and loads without it."""

import contextlib
import ctypes
import mmap
import os
import random
import re
from pathlib import Path

import pytest
import torch

from keyedopt.fused import (
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    bulk,
)
from keyedopt.fused.backends.interface import Lookup, Step, Table
from keyedopt.fused.backends.native import _with_gradients
from keyedopt.fused.backends.native.describe import describe_table
from keyedopt.fused.bulk import bulk_fill, native
from keyedopt.reference.keyed.bulk import ONE_BY_ONE

if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert native is not None, "fused/bulk has not been built"
built = pytest.mark.skipif(native is None, reason="fused/bulk has not been built")

SETS = ("", "plain", "avx2", "avx512")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def any_tensor(draw):
    shape = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randint(0, 3))]
    made = torch.ones(shape, dtype=draw.choice(DTYPES))
    turned = made.transpose(0, 1) if made.ndim > 1 else made
    return draw.choice([made, made, made, turned, made.expand(2, *shape), made.to("meta")])


def copied(live, new):
    told = []
    done = native.copy(live, new, told.extend)
    assert [id(one) for one in told] == [id(one) for one in live if done]
    return done


@built
def test_a_copy_is_complete_or_not_made():
    draw, made = random.Random(0), 0
    for _ in range(600):
        live = [any_tensor(draw) for _ in range(draw.randint(0, 4))]
        new = [torch.zeros_like(one) if draw.random() < 0.9 else any_tensor(draw) for one in live]
        fits = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(live, new, strict=True))
        before = [one.clone() for one in live]
        done = copied(live, new)
        made += done
        assert fits or not done
        for one, expected in zip(live, new if done else before, strict=True):
            assert one.is_meta or torch.equal(one, expected)
    assert made > 200


@built
@pytest.mark.parametrize("count", [3, 5000])
def test_shared_memory_is_seen(count):
    live = list(torch.arange(3.0 * count).split(3))
    assert not copied(live, live[1:] + live[:1])
    assert not copied(live, [torch.zeros(3) for _ in live[1:]] + [live[0].view(3)])
    assert copied(live, live)
    assert copied(live, [torch.zeros(3) for _ in live])
    assert not any(one.any() for one in live)


@built
def test_a_number_that_is_stored_with_the_opposite_sign_is_not_copied():
    part = torch.tensor(1 + 2j).conj().imag
    assert part.is_neg()
    assert not copied([torch.zeros(())], [part])
    assert not copied([part], [torch.zeros(())])


@built
def test_the_sum_of_squares_does_not_depend_on_threads_or_instruction_sets():
    tensors = [torch.randn(size) for size in (0, 1, 63, 1025, 1 << 21)]
    exact = sum(float(one.double().square().sum()) for one in tensors)
    sums = [native.square_sum(tensors, threads, name) for threads in (1, 2, 5) for name in SETS]
    found = set(sums) - {None}  # which a machine says that does not have an instruction set
    assert len(found) == 1
    assert sums[0] in found
    assert found.pop() == pytest.approx(exact, rel=1e-8)
    assert native.square_sum([torch.ones(2, 2).t(), torch.ones(3).double()], 1, "") is None
    assert native.square_sum(tensors, 1, "abacus") is None
    for wrong in ((), (tensors, 1), (tuple(tensors), 1, ""), (tensors, 1.0, ""), (tensors, 1, 2)):
        with pytest.raises(TypeError):
            native.square_sum(*wrong)
    with pytest.raises(OverflowError):
        native.square_sum(tensors, 2**70, "")


@built
def test_autograd_is_told_of_a_load_and_not_of_a_refused_one():
    live, new = [torch.zeros(3) for _ in range(1200)], [torch.ones(3) for _ in range(1200)]
    assert native.copy(live, new, torch.autograd.graph.increment_version)
    assert {one._version for one in live} == {1}
    new[700] = torch.ones(4)
    assert not native.copy(live, new, torch.autograd.graph.increment_version)
    assert {one._version for one in live} == {1}
    with pytest.raises(ZeroDivisionError):
        native.copy(live[:2], new[:2], lambda tensors: 1 / 0)


@built
def test_entries_are_paired_by_their_keys():
    live = {"a": {"x": 1, "y": 2}, "b": {"x": 3}}
    assert native.pairs(live, {"b": {"x": 6}, "a": {"y": 5, "x": 4}}) == ([1, 2, 3], [4, 5, 6])
    assert native.pairs({}, {}) == ([], [])
    for other in (
        {"a": {"x": 4, "y": 5}},
        {"a": {"x": 4, "y": 5}, "c": {"x": 6}},
        {"a": {"x": 4, "z": 5}, "b": {"x": 6}},
        {"a": {"x": 4}, "b": {"x": 6}},
        {"a": {"x": 4, "y": 5}, "b": [6]},
    ):
        assert native.pairs(live, other) is None
        assert native.pairs(other, live) is None
    assert native.pairs({1: {}}, {1: {}}) is None
    with pytest.raises(TypeError, match="dicts"):
        native.pairs([], {})


@built
def test_entries_are_copied_if_their_values_are_of_known_types():
    entries = [{"x": 1, "y": torch.ones(1)}, {}]
    made = native.copies(entries, (int, torch.Tensor))
    assert made == entries
    assert made[0] is not entries[0]
    assert made[0]["y"] is entries[0]["y"]
    assert native.copies([*entries, {"x": True}], (int, torch.Tensor)) is None
    assert native.copies([[]], (int,)) is None


def test_a_tensor_that_has_moved_or_changed_is_in_another_place(monkeypatch):
    base = torch.zeros(4, 4)
    param = torch.nn.Parameter(torch.zeros(2, 2))
    views = [
        *(base[:2], base[:3], base[1:3], base[:2].view(4, 2), base[:2].view(2, 2, 2), base.t()[:2]),
        base[:2].view(torch.int32),
    ]
    for extension in (native, None):
        monkeypatch.setattr(bulk, "native", extension)
        assert len({bulk.places([one, param]) for one in views}) == len(views)
        assert bulk.places([base[:2], param]) == bulk.places([views[0], param])
        assert bulk.places([]) == bulk.places([])
        before = bulk.places([param])
        param.data = torch.zeros(2, 2)
        assert bulk.places([param]) != before


@built
def test_other_tensors_have_no_place():
    class Other(torch.Tensor):
        pass

    assert native.places([]) == b""
    assert native.places([torch.zeros(2), torch.zeros(2).as_subclass(Other)]) is None
    assert bulk.places([torch.zeros(2).as_subclass(Other)])
    with pytest.raises(TypeError, match="a list of tensors"):
        native.places((torch.zeros(1),))


@built
def test_row_numbers_outside_are_found():
    draw = random.Random(0)
    for _ in range(300):
        sizes = tuple(draw.choice([0, 1, 7, 2**40]) for _ in range(draw.randint(1, 3)))
        listed = [[draw.randrange(size) for _ in range(1500)] for size in sizes if size]
        sizes = tuple(size for size in sizes if size) or (0,)
        indices = torch.tensor(listed or [[]], dtype=torch.int64)
        assert native.outside(indices, sizes) is None
        where, bad = draw.randrange(len(sizes)), draw.choice([-1, -(2**63), sizes[0], 2**63 - 1])
        if listed and not 0 <= bad < sizes[where]:
            indices[where, draw.randrange(1500)] = bad
            assert native.outside(indices, sizes) == (sizes[where], bad)
    assert native.outside(torch.zeros(1, 4, dtype=torch.int64), (0,)) == (0, 0)
    for unusual in (torch.zeros(1, 4), torch.zeros(4, dtype=torch.int64), torch.zeros(2, 4).long()[:, ::2]):
        assert native.outside(unusual, (5, 5)) is False


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_listed_tensors_are_described_as_tables_and_lookups(dtype):
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((5,), (3, 4), (6, 2, 2))]
    state = [torch.zeros(param.shape) for param in params]
    indices = [torch.zeros(1, 7, dtype=torch.int64) for _ in params]
    values = [torch.zeros(7, *param.shape[1:]) for param in params]
    lookups = [
        Lookup(number, index[0], grad=value.reshape(7, -1))
        for number, (index, value) in enumerate(zip(indices, values, strict=True))
    ]
    tables = [
        Table(param.detach().view(len(param), -1), (one.view(len(param), -1),))
        for param, one in zip(params, state, strict=True)
    ]
    items, _ = _with_gradients(tables, lookups)
    expected = [describe_table(table, Step("adagrad", 0.1)) for table in tables], items
    assert native.listed(params, [state], indices, values) == expected


@built
def test_listed_tensors_that_are_unusual_are_left_to_the_general_way():
    param, state = torch.nn.Parameter(torch.zeros(5, 4)), torch.zeros(5, 4)
    indices, values = torch.zeros(1, 7, dtype=torch.int64), torch.zeros(7, 4)
    assert native.listed([param], [[state]], [indices], [values]) is not None
    for given in (
        ([param.double()], [[state]], [indices], [values]),
        ([param.to("meta")], [[state]], [indices], [values]),
        ([torch.zeros(4, 5).t()], [[state]], [indices], [values]),
        ([torch.zeros(0, 4)], [[torch.zeros(0, 4)]], [indices], [values]),
        ([torch.zeros(())], [[torch.zeros(())]], [indices], [values]),
        ([param], [[state.half()]], [indices], [values]),
        ([param], [[torch.zeros(5)]], [indices], [values]),
        ([param], [[state], [state], [state]], [indices], [values]),
        ([param], [[state]], [indices.int()], [values]),
        ([param], [[state]], [indices[0]], [values]),
        ([param], [[state]], [indices.expand(2, 7).contiguous()], [values]),
        ([param], [[state]], [indices], [values.half()]),
        ([param], [[state]], [indices], [values[:6]]),
        ([param], [[state]], [indices], [values.t().contiguous().t()]),
        ([param], [[state]], [indices], [torch.zeros(7, 5)]),
        ([param], [[]], [indices], [values]),
    ):
        assert native.listed(*given) is None
    with pytest.raises(TypeError, match="lists"):
        native.listed([param], [[state]], [indices], [])


@built
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="only Linux shows what memory is like")
def test_large_pages_are_asked_for_and_change_nothing():
    small, large = torch.ones(1000), torch.ones(1 << 24)
    native.large_pages(small)
    native.large_pages(large)
    assert bool((large == 1).all())
    middle, inside, flags = large.data_ptr() + large.nbytes // 2, False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags


@built
@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="only Linux shows what memory is like")
def test_small_pages_are_put_together_only_where_all_are_there():
    full = torch.arange(float(1 << 23))
    # From the system, since an allocator may give memory that was used before.
    fresh = mmap.mmap(-1, 1 << 26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    sparse = torch.frombuffer(fresh, dtype=torch.float32)
    with small_pages():
        sparse[:: 1 << 18] = 1.0  # a page of 4 KiB in each MiB
    before = resident_share(sparse)
    for one in (full, sparse, torch.ones(1000), torch.ones(1 << 22, 2).t(), torch.ones(4, device="meta")):
        native.gather_pages(one)
    assert torch.equal(full, torch.arange(float(1 << 23)))
    assert resident_share(full) == 1
    assert resident_share(sparse) == before < 1 / 8
    with pytest.raises(TypeError, match="a tensor"):
        native.gather_pages()


@contextlib.contextmanager
def small_pages():
    """Disable large pages for new memory of this process, also if the system is set to use them always."""
    libc, disable = ctypes.CDLL(None), 41  # PR_SET_THP_DISABLE
    assert libc.prctl(disable, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        assert libc.prctl(disable, 0, 0, 0, 0) == 0


def resident_share(tensor):
    """Return which share of the pages that lie wholly in a tensor is in memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, end = -(-tensor.data_ptr() // page), (tensor.data_ptr() + tensor.nbytes) // page
    with open("/proc/self/pagemap", "rb") as entries:  # 8 bytes per page, of which the highest bit says so
        entries.seek(8 * first)
        flags = entries.read(8 * (end - first))[7::8]
    return sum(flag >> 7 for flag in flags) / (end - first)


@built
def test_gradients_are_gathered_if_all_are_plain():
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)]
    params[0].grad, params[2].grad = torch.ones(2), torch.ones(4)
    assert list(map(id, native.gradients(params))) == [id(params[0].grad), id(params[2].grad)]
    assert native.gradients([]) == []
    assert native.gradients([params[0], params[0]]) is None
    assert native.gradients([*params, None]) is None
    assert native.gradients([*params, torch.nn.Buffer(torch.ones(1))]) is not None
    with pytest.raises(TypeError, match="a list"):
        native.gradients(tuple(params))


@built
def test_state_is_gathered_if_all_of_it_is_there():
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 3, 4)]
    for param in params:
        param.grad = torch.ones_like(param)
    entries = [{"x": torch.ones(1), "y": number} for number in range(3)]
    for order in ((0, 1, 2), (2, 0, 1)):  # a state may be in another order than the parameters
        state = {params[at]: entries[at] for at in order}
        found, grads, (second, first) = native.gathered(params, state, ("y", "x"))
        assert list(map(id, found)) == list(map(id, params))
        assert list(map(id, grads)) == [id(param.grad) for param in params]
        assert second == [0, 1, 2]
        assert list(map(id, first)) == [id(entry["x"]) for entry in entries]
    assert native.gathered(params, {}, ())[0] == params
    params[1].grad = None
    assert native.gathered(params, state, ("y",))[2] == [[0, 2]]
    for changed in ({}, {"x": None, "y": 0}, None, [1]):
        assert native.gathered(params, {**state, params[2]: changed}, ("x", "y")) is None
    assert native.gathered([*params, 3], state, ("x",)) is None
    assert native.gathered(params, state, (3,)) is None
    with pytest.raises(TypeError, match="a list, a dict"):
        native.gathered(params, [], ("x",))


@pytest.mark.parametrize("bulk", [bulk_fill.NATIVE, ONE_BY_ONE])
def test_loads_with_and_without_the_extension(monkeypatch, bulk):
    monkeypatch.setattr(KeyedOptimizerWrapper, "bulk", bulk)
    one, other = (trained(seed) for seed in (0, 1))
    saved = one.state_dict()["state"]
    other.load_state_dict({"state": dict(reversed(saved.items()))})
    for key, entry in other.state_dict()["state"].items():
        assert all(torch.equal(value, saved[key][name]) for name, value in entry.items())
    wrong = {**saved, "p2": {**saved["p2"], "sum": torch.ones(1)}}
    with pytest.raises(ValueError, match=r'"p2", "sum"'):
        trained(2).load_state_dict({"state": wrong})


@built
def test_a_load_compares_values_while_it_copies_them(monkeypatch):
    source, target = trained(0), OptimizerWrapper(trained(1))
    with monkeypatch.context() as patch:
        patch.setattr(bulk_fill.NativeBulk, "match", None)  # a second pass would call it
        target.load_state_dict(source.state_dict())
    saved = source.state_dict()["state"]
    for key, entry in target.state_dict()["state"].items():
        assert all(torch.equal(value, saved[key][name]) for name, value in entry.items())
    wrong = {**trained(2).state_dict()["state"], "p4": {**saved["p4"], "sum": torch.ones(1)}}
    with pytest.raises(ValueError, match=r'"p4", "sum"'):
        target.load_state_dict({"state": wrong})
    assert torch.equal(target.state_dict()["state"]["p0"]["sum"], saved["p0"]["sum"])


@pytest.mark.parametrize(
    "factory", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
)
def test_clipping_in_the_step_is_clipping_before_it(factory):
    results = []
    for fused in (True, False):
        params = {f"p{i}": torch.nn.Parameter(torch.linspace(-1, 1, 70)) for i in range(3)}
        inner = KeyedOptimizerWrapper(
            params, lambda listed, fused=fused: factory(listed, lr=0.1, fused=fused)
        )
        optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, 0.5)
        for step in range(3):
            for number, param in enumerate(params.values()):
                param.grad = torch.linspace(-1, 2, 70) * (number + step) / 4
            optimizer.step()
        results.append([param.detach() for param in params.values()])
        assert not hasattr(inner._optimizer, "grad_scale")
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def trained(seed):
    torch.manual_seed(seed)
    params = {f"p{i}": torch.nn.Parameter(torch.randn(4)) for i in range(5)}
    optimizer = KeyedOptimizerWrapper(params, lambda listed: torch.optim.Adagrad(listed, lr=0.1))
    for param in params.values():
        param.grad = torch.randn(4)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_the_tracked_norm_is_right_if_squares_underflow_or_overflow(size):
    params = {f"p{i}": torch.nn.Parameter(torch.zeros(2)) for i in range(32)}
    for param in params.values():
        param.grad = torch.full((2,), size)
    inner = KeyedOptimizerWrapper(params, lambda listed: torch.optim.SGD(listed, lr=0.1, fused=True))
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, 1.0, track_grad_norm=True)
    optimizer.step()
    assert float(optimizer.last_total_grad_norm) == pytest.approx(8 * size, rel=1e-6, abs=0.0)


def test_a_factor_that_underflows_float32_loses_no_digits_on_the_cpu():
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3e18, 4e18])
    inner = KeyedOptimizerWrapper({"p": param}, lambda listed: torch.optim.SGD(listed, lr=0.1))
    GradientClippingOptimizer(inner, GradientClipping.NORM, 1e-23).clip_grad_norm_()
    ulp = 2.0**-23  # the product is rounded once
    assert param.grad.tolist() == pytest.approx([6e-24, 8e-24], rel=ulp, abs=0.0)


def test_a_replaced_weight_is_seen(monkeypatch):
    modules = {name: torch.nn.Linear(2, 2, bias=False) for name in "ab"}
    weights = [module.weight for module in modules.values()]
    for extension in {native, None}:
        monkeypatch.setattr(bulk, "native", extension)
        assert bulk.held(modules, "weight", weights)
        assert not bulk.held(modules, "weight", weights[:1])
        assert not bulk.held(modules, "weight", [*weights, weights[0]])
        assert not bulk.held(modules, "weight", weights[::-1])
        assert not bulk.held(modules, "other", weights)
        with monkeypatch.context() as change:
            change.setitem(modules["b"]._parameters, "weight", torch.nn.Parameter(torch.zeros(2, 2)))
            assert not bulk.held(modules, "weight", weights)
        assert bulk.held({}, "weight", [])


def test_the_tensors_that_need_a_gradient_are_counted(monkeypatch):
    tensors = [torch.zeros(1, requires_grad=needs) for needs in (True, False, True)]
    for extension in {native, None}:
        monkeypatch.setattr(bulk, "native", extension)
        assert bulk.count_trained(tensors) == 2
        assert bulk.count_trained(tensors[1:2]) == bulk.count_trained([]) == 0
