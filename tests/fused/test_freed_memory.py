"""Freed storage, and tensors of another size, raise in every path that hands addresses to kernels."""

import pytest
import torch
from torch import nn, optim

from keyedopt import fused, reference
from keyedopt.fused.bulk import native
from keyedopt.fused.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "Adam": {},
    "AdamW": {},
    "RowWiseAdagrad": {},
    "LAMB": {},
    "Ftrl": {},
    "PartialRowWiseAdam": {"max_norm": 0.5},
}
LIBRARIES = pytest.mark.parametrize("library", [fused, reference], ids=["fused", "reference"])
INDICES, OFFSETS = [0, 3, 3], [0, 1, 3]


def free(tensor):
    """Free the memory of a tensor, as FSDP does."""
    tensor.untyped_storage().resize_(0)


def trained(kind, dtype=torch.float32, sparse=False, library=fused):
    """Return two parameters and their optimizer after a step, with gradients for the next one."""
    params = [nn.Parameter(torch.ones(8, 4, dtype=dtype)) for _ in range(2)]
    optimizer = getattr(library, kind)(params, lr=0.1, **OPTIMIZERS[kind])
    for param in params:
        grad = torch.ones_like(param)
        param.grad = grad.to_sparse(1) if sparse else grad
    optimizer.step()
    return params, optimizer


def snapshot(params, optimizer):
    """Return copies of the first parameter and its state."""
    return [
        params[0].detach().clone(),
        *(torch.as_tensor(v).clone() for v in optimizer.state[params[0]].values()),
    ]


def expect_untouched(params, optimizer, before):
    """Expect the first parameter and its state to have the values of a snapshot."""
    assert all(map(torch.equal, snapshot(params, optimizer), before))


@pytest.mark.parametrize("what", ["weight", "grad", "state"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@LIBRARIES
def test_a_step_with_freed_memory_raises(library, kind, dtype, sparse, what):
    """A parameter, gradient or state without memory is an error, and no other parameter is updated."""
    params, optimizer = trained(kind, dtype, sparse, library)
    last = params[1]
    if what == "grad":
        free(last.grad._values() if sparse else last.grad)
    else:
        states = [value for value in optimizer.state[last].values() if torch.is_tensor(value) and value.ndim]
        free(last.data if what == "weight" else states[-1])
    before = snapshot(params, optimizer)
    with pytest.raises(RuntimeError):
        optimizer.step()
    expect_untouched(params, optimizer, before)


@pytest.mark.parametrize("what", ["weight", "state"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@LIBRARIES
def test_a_step_with_another_size_raises(library, kind, dtype, sparse, what):
    """A parameter that has grown, or a smaller state, is an error, and no other parameter is updated."""
    params, optimizer = trained(kind, dtype, sparse, library)
    last = params[1]
    if what == "weight":
        last.data = torch.ones(16, 4, dtype=dtype)
        grad = torch.ones_like(last)
        last.grad = grad.to_sparse(1) if sparse else grad
    else:
        state = optimizer.state[last]
        name = [name for name, value in state.items() if torch.is_tensor(value) and value.ndim][-1]
        state[name] = state[name][:4].clone()
    before = snapshot(params, optimizer)
    with pytest.raises(RuntimeError):
        optimizer.step()
    expect_untouched(params, optimizer, before)


@pytest.mark.parametrize(
    "make",
    [lambda value: None, lambda value: 1.5, lambda value: value.to("meta"), lambda value: value.to_sparse()],
    ids=["none", "number", "meta", "sparse"],
)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@LIBRARIES
def test_a_state_of_another_kind_raises(library, kind, sparse, make):
    """A state that is no strided tensor on the device of its parameter is an error; nothing is updated."""
    params, optimizer = trained(kind, sparse=sparse, library=library)
    state = optimizer.state[params[1]]
    for name, value in list(state.items()):
        state[name] = make(value)
        before = snapshot(params, optimizer)
        with pytest.raises(RuntimeError, match=f"the state '{name}'"):
            optimizer.step()
        expect_untouched(params, optimizer, before)
        state[name] = value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("clipping", ["NORM", "VALUE"])
@LIBRARIES
def test_clipping_a_gradient_without_memory_raises(library, clipping, sparse, dtype):
    """torch's operators of norms and limits read freed memory, which ends the process."""
    params, optimizer = trained("Adam", dtype, sparse, library)
    keyed = library.KeyedOptimizerWrapper({"a": params[0], "b": params[1]}, lambda _: optimizer)
    clipped = library.GradientClippingOptimizer(keyed, library.GradientClipping[clipping], 0.5)
    free(params[1].grad._values() if sparse else params[1].grad)
    before = snapshot(params, optimizer)
    with pytest.raises(RuntimeError, match="has been freed"):
        clipped.step()
    expect_untouched(params, optimizer, before)


@pytest.mark.parametrize("clipping", ["NORM", "VALUE"])
@pytest.mark.parametrize("kind", [optim.Adam, optim.SGD, optim.Adagrad])
def test_clipping_around_a_fused_optimizer_of_torch_checks_sizes(kind, clipping):
    """torch's fused kernels do not compare sizes; the step with clipping does, before it calls them."""
    table = nn.Parameter(torch.ones(8, 4))
    inner = kind([table], lr=0.1, fused=True, **({"momentum": 0.9} if kind is optim.SGD else {}))
    keyed = fused.KeyedOptimizerWrapper({"t": table}, lambda params: inner)
    clipped = fused.GradientClippingOptimizer(keyed, fused.GradientClipping[clipping], 0.5)
    table.grad = torch.ones_like(table)
    clipped.step()
    table.data = torch.ones(4000, 4)
    table.grad = torch.ones_like(table)
    with pytest.raises(RuntimeError):
        clipped.step()
    assert bool((table == 1).all())


def bags(kind=optim.Adam, backend="auto", **options):
    """Return a module of one table of 8 rows."""
    table = EmbeddingBagConfig(8, 4, name="t", feature_names=["f"])
    return EmbeddingBagCollection([table], kind, {"lr": 0.1}, backend=backend, **options)


def features():
    """Return new inputs."""
    return {"f": (torch.tensor(INDICES), torch.tensor(OFFSETS))}


def train(module, steps):
    """Do some steps, after which a backend may remember the memory of the table."""
    for _ in range(steps):
        module(features())["f"].sum().backward()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("what", ["weight", "state"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_table_with_freed_memory_raises(backend, what, steps):
    """A table or a state without memory is an error of lookup and backward pass; nothing is counted."""
    module = bags(backend=backend)
    train(module, steps)
    weight = module.embedding_bags["t"].weight
    state = module.fused_optimizer.state[weight]
    output = module(features())["f"].sum()
    free(weight.data if what == "weight" else state["t.exp_avg_sq"])
    with pytest.raises(RuntimeError):
        output.backward()
    assert int(state["t.iter"]) == steps
    if what == "weight":
        with pytest.raises(RuntimeError):
            module(features())


@pytest.mark.parametrize("backend", ["auto", "torch", "fbgemm"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("which", [0, 1])
def test_inputs_without_memory_raise(which, dtype, backend):
    """Row numbers or offsets that are freed before the lookup or before the backward pass are an error."""
    if backend == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    kind = optim.Adagrad if backend == "fbgemm" else optim.Adam
    module = bags(kind, backend=backend)
    given = {"f": tuple(each.to(dtype) for each in features()["f"])}
    output = module(given)["f"].sum()
    free(given["f"][which])
    if dtype is torch.int64:  # others are copied by the lookup
        with pytest.raises(RuntimeError):
            output.backward()
    with pytest.raises(RuntimeError):
        module(given)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_unpooled_inputs_without_memory_raise(backend):
    """Row numbers that are freed before the lookup are an error."""
    table = EmbeddingConfig(8, 4, name="t", feature_names=["f"])
    module, given = EmbeddingCollection([table], optim.Adam, {"lr": 0.1}, backend=backend), features()
    free(given["f"][0])
    with pytest.raises(RuntimeError):
        module(given)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_table_of_another_size_raises(backend, rows, steps):
    """A table that was replaced through ``.data`` raises, and nothing is written."""
    module = bags(backend=backend)
    train(module, steps)
    weight = module.embedding_bags["t"].weight
    output = module(features())["f"].sum()
    weight.data = torch.ones(rows, 4)
    state = module.fused_optimizer.state[weight]
    before = {key: value.clone() for key, value in state.items()}
    with pytest.raises((ValueError, RuntimeError)):
        output.backward()
    assert bool((weight == 1).all())
    assert all(torch.equal(state[key], value) for key, value in before.items())


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("make", [torch.clone, lambda state: state[:4].clone()], ids=["copy", "smaller"])
def test_a_state_that_is_replaced_between_lookup_and_update_is_used(backend, make):
    """An update does not write into a state that the optimizer has no more."""
    module = bags(backend=backend)
    train(module, 1)
    state = module.fused_optimizer.state[module.embedding_bags["t"].weight]
    output = module(features())["f"].sum()
    old = state["t.exp_avg_sq"]
    state["t.exp_avg_sq"] = make(old)
    before = old.clone()
    if len(state["t.exp_avg_sq"]) == len(old):
        output.backward()
        assert bool((state["t.exp_avg_sq"][INDICES] > before[INDICES]).all())
    else:
        with pytest.raises((ValueError, RuntimeError)):
            output.backward()
    assert torch.equal(old, before)


def test_bulk_functions_leave_freed_memory_alone():
    """Norms, copies and checks of row numbers do not read memory that was freed."""
    if native is None:
        pytest.skip("the C++ extension is not built")
    freed, rows = torch.ones(8), torch.zeros(1, 8, dtype=torch.int64)
    free(freed)
    free(rows)
    assert native.square_sum([freed], 1, "") is None
    assert native.copy([torch.ones(8)], [freed], lambda some: None) is False
    assert native.outside(rows, (4,)) is False
    assert native.places([torch.ones(1), freed]) is None
