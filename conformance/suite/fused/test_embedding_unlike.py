"""Tables of one module that were updated unequally often, rows that count as zero, and version counters."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.algorithms import need_dtype
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_bits,
    expect_raises,
    snapshot,
)
from keyedopt.conformance.suite.support.described import unwrapped
from keyedopt.conformance.suite.support.device import on_host, ones, tensor, the_device
from keyedopt.conformance.suite.support.embedding import (
    FUSED_OPTIMIZERS,
    ONE_TABLE,
    collection,
    jagged,
    tables_of,
)
from keyedopt.conformance.suite.support.inputs import parameter

#: Three tables of unlike sizes, one with two features, and one feature of two tables.
THREE = (("t", 6, 4, ("f", "g")), ("u", 5, 8, ("h",)), ("v", 3, 1, ("h",)))
#: The features that each step's loss depends on: no two tables are updated equally often.
STEPS = (("f",), ("f", "h@u"), ("g", "h@u", "h@v"), ("h@v", "f", "g"))
BATCHES = (
    {"f": [[0, 1, 1], [2]], "g": [[], [1, 5]], "h": [[2, 2], [0]]},
    {"f": [[5], []], "g": [[1], [0]], "h": [[], [2]]},
)
#: Options with which the size of a step depends on the step count, or on the place in a window.
COUNTED: dict[str, dict[str, Any]] = {
    "Adagrad": {"lr_decay": 0.5},
    "RowWiseAdagrad": {"lr_decay": 0.5},
    "AccumulateSGD": {"use_accumulate": True, "accumulate_step": 2},
}


def loss_of(modules: list[Any], step: int, factor: float = 1.0) -> torch.Tensor:
    """Return a loss that depends on some of the outputs."""
    loss = torch.zeros((), dtype=torch.float64)
    found = {}
    for (table, *_), module in zip(THREE, modules, strict=False):
        for name, output in module(jagged(BATCHES[step % 2])).items():
            found[f"h@{table}" if name == "h" else name] = output
    for name, output in sorted(found.items()):
        if name in STEPS[step]:
            grads = torch.arange(output.numel()).reshape(output.shape) * (step + 2) % 7 - 3.0
            loss = loss + (output * grads.to(output.device) * factor).sum().double().cpu()
    return loss


def apart(impl: Any, optimizer: str, whole: Any, options: Any) -> list[Any]:
    """Make a module for each table, with the values of the tables of another module."""
    parts = [collection(impl, optimizer, options, tables=[table]) for table in THREE]
    for part in parts:
        for name, table in tables_of(part).items():
            table.detach().copy_(tables_of(whole)[name].detach())
    return parts


def expect_same_tables(whole: Any, parts: list[Any]) -> None:
    """Expect the tables of a module to equal those of modules with one table each."""
    for part in parts:
        for name, table in tables_of(part).items():
            expect_near(tables_of(whole)[name], table, f"table {name}")


@pytest.mark.clause("FUSED-085")
@pytest.mark.needs("{optimizer}", "EmbeddingBagCollection.shared_features")
@pytest.mark.parametrize("optimizer", [*FUSED_OPTIMIZERS, "AccumulateSGD"])
def test_tables_with_unlike_step_counts(impl: Any, optimizer: str) -> None:
    """Tables that were updated unequally often train like tables in modules of their own."""
    options = COUNTED.get(optimizer, {})
    whole = collection(impl, optimizer, options, tables=THREE)
    parts = apart(impl, optimizer, whole, options)
    for step in range(len(STEPS)):
        for modules in ([whole], parts):
            loss_of(modules, step).backward()
        expect_same_tables(whole, parts)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("GradientClippingOptimizer", "Adam", "EmbeddingBagCollection.shared_features")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_clipping_of_tables_with_unlike_step_counts(impl: Any, kind: str) -> None:
    """The bound covers the gradients of all tables of a module, also if they were updated unequally often."""
    options = {"eps": 0.1}
    whole = collection(impl, "Adam", options, tables=THREE)
    parts = apart(impl, "Adam", whole, options)
    try:
        wrapper = impl.GradientClippingOptimizer(
            whole.fused_optimizer, impl.GradientClipping[kind], 1.0 if kind == "NORM" else 100.0
        )
    except ValueError:
        return  # around a fused optimizer, clipping may be refused
    for step in range(len(STEPS)):
        dense = collection(impl, None, tables=THREE)
        loss_of([dense], step).backward()
        grads = [one.grad for one in dense.parameters() if one.grad is not None]
        norm = float(torch.cat([exactly(grad.to_dense()).flatten() for grad in grads]).norm())
        loss_of([whole], step).backward()
        wrapper.step()
        loss_of(parts, step, min(1.0, 1.0 / (norm + 1e-6)) if kind == "NORM" else 1.0).backward()
        expect_same_tables(whole, parts)


@pytest.mark.clause("FUSED-094")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_versions(impl: Any, optimizer: str) -> None:
    """A graph that saved a table or its state before an update raises in its backward pass."""
    module = collection(impl, optimizer)
    tables = {f"table {name}": table for name, table in tables_of(module).items()}
    for key, entry in module.fused_optimizer.state_dict()["state"].items():
        floats = {name: value for name, value in entry.items() if isinstance(value, torch.Tensor)}
        tables |= {f"{name} of {key}": value for name, value in floats.items() if value.is_floating_point()}
    graphs = {what: (ones(1, requires_grad=True) * table.detach()).sum() for what, table in tables.items()}
    sum(one.sum() for one in module(jagged({**BATCHES[0], "h": [[3], [0]]})).values()).backward()
    for what, graph in graphs.items():
        expect_raises(
            graph.backward, RuntimeError, expected=f"RuntimeError: {what} was modified after it was saved"
        )


@pytest.mark.clause("FUSED-094")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
@pytest.mark.parametrize("trained", ["t", "u"])
def test_versions_of_one_table(impl: Any, trained: str, optimizer: str) -> None:
    """The same holds if a step updates one of several tables, also after steps that update all of them."""
    module = collection(impl, optimizer)
    features = jagged({**BATCHES[0], "h": [[3], [0]]})
    for part in ("all", "one", "one"):
        outputs = module(features)
        chosen = outputs.values() if part == "all" else [outputs["f" if trained == "t" else "h"]]
        loss = sum(one.sum() for one in chosen)
        entry = module.fused_optimizer.state_dict()["state"][f"{trained}.weight"]
        saved = {"the table": tables_of(module)[trained].detach()} | {
            name: value
            for name, value in entry.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        graphs = {what: (ones(1, requires_grad=True) * one).sum() for what, one in saved.items()}
        loss.backward()
        for what, graph in graphs.items():
            expect_raises(graph.backward, RuntimeError, expected=f"RuntimeError: {what} was modified")


#: Updates that first look at all gradients, or wait for more of them: the class, its options, and clipping.
GUARDED: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped": ("Adagrad", {}),
    "error_if_nonfinite": ("Adagrad", {"error_if_nonfinite": True}),
    "window": ("AccumulateAdagrad", {"use_accumulate": True, "accumulate_step": 2}),
}


@pytest.mark.clause("FUSED-094")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "{optimizer}", "{optimizer}.{how}")
@pytest.mark.parametrize(("how", "optimizer"), [(how, optimizer) for how, (optimizer, _) in GUARDED.items()])
def test_versions_of_guarded_updates(impl: Any, how: str, optimizer: str) -> None:
    """The same holds if gradients are clipped or expected to be finite, and at the end of a window."""
    module = collection(impl, optimizer, GUARDED[how][1])
    wrapper = module.fused_optimizer
    if how == "clipped":
        try:
            wrapper = impl.GradientClippingOptimizer(wrapper, impl.GradientClipping.NORM, 0.5)
        except ValueError:
            return  # around a fused optimizer, clipping may be refused
    for _ in range(2):
        graphs = {
            name: (ones(1, requires_grad=True) * table.detach()).sum()
            for name, table in tables_of(module).items()
        }
        sum(one.sum() for one in module(jagged({**BATCHES[0], "h": [[3], [0]]})).values()).backward()
        wrapper.step()
    for name, graph in graphs.items():
        expect_raises(graph.backward, RuntimeError, expected=f"RuntimeError: table {name} was modified")


def train_nonzero(impl: Any, optimizer: str, rows: str, grads: torch.Tensor) -> tuple[Any, Any]:
    """Train two steps with an option `rows`; return the table and its state before and after."""
    options = {"rows": rows, "weight_decay": 0.125}
    module = collection(impl, optimizer, options, tables=ONE_TABLE)
    for step in range(2):
        before = snapshot(tables_of(module))["t"]
        output = module(jagged({"f": [[row] for row in range(len(grads))]}))["f"]
        (output * (grads if step else ones(*grads.shape))).sum().backward()
    return before, tables_of(module)["t"].detach()


@pytest.mark.clause("FUSED-083")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}", "{optimizer}.rows")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam"])
def test_rows_that_count_as_zero(impl: Any, optimizer: str) -> None:
    """With rows='nonzero' a row is left only if its whole gradient is 0; tiny numbers and NaN are not 0."""
    grads = tensor([[0.0, 0.0, 0.0, 1.0], [0.0, float("nan"), 0.0, 0.0], [0.0] * 4, [0.0, 1e-30, 0.0, 0.0]])
    before, after = train_nonzero(impl, optimizer, "nonzero", grads)
    _, given = train_nonzero(impl, optimizer, "given", grads)
    expect_bits(after[2], before[2], "the row whose gradient is zero")
    for row in (0, 3):
        expect_bits(after[row], given[row], f"row {row} as with rows='given'")
    changed = not torch.equal(on_host(after[1]), on_host(before[1]))
    expect(changed, "a change of the row whose gradient is NaN, and 0 elsewhere", after[1])


#: Bags of two features, with a weight for each value; both have the same number of values.
UNLIKE = {"f": [[0, 1, 1], [], [2]], "g": [[3, 0], [0], [1]]}
WEIGHTS = {"f": [[0.5, 2.0, -1.0], [], [3.0]], "g": [[1.0, -2.0], [0.25], [1.5]]}


@pytest.mark.clause("FUSED-022", "FUSED-088")
@pytest.mark.needs("EmbeddingBagCollection", "SGD", "EmbeddingBagCollection.initial_values")
@pytest.mark.parametrize("poolings", [("SUM", "MEAN"), ("MEAN", "SUM")])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("trained", ["fused", "plain", "fused in float64"])
def test_unlike_poolings(impl: Any, trained: str, weighted: bool, poolings: tuple[str, str]) -> None:
    """Tables of one module each pool in their own way, with their own weights, forward and backward."""
    dtype = "float64" if trained == "fused in float64" else "float32"
    need_dtype(impl, "EmbeddingBagCollection", dtype)
    configs = [
        impl.EmbeddingBagConfig(
            num_embeddings=4,
            embedding_dim=2,
            name=name,
            feature_names=[feature],
            data_type=getattr(torch, dtype),
            pooling=impl.PoolingType[pooling],
            init_fn=lambda weight, seed=seed: weight.data.copy_(parameter(4, 2, seed=seed).data),
        )
        for seed, (name, feature, pooling) in enumerate(zip("tu", "fg", poolings, strict=True))
    ]
    optimizer = unwrapped(impl.SGD, {"lr": 1.0}) if trained != "plain" else (None, None)
    module = impl.EmbeddingBagCollection(configs, *optimizer, is_weighted=weighted, device=the_device())
    exact = [on_host(parameter(4, 2, seed=seed)).double().requires_grad_() for seed in range(2)]
    outputs = module(jagged(UNLIKE, WEIGHTS if weighted else None))
    loss = torch.zeros((), dtype=torch.float64)
    for table, feature, pooling in zip(exact, "fg", poolings, strict=True):
        wanted = []
        for bag, factors in zip(UNLIKE[feature], WEIGHTS[feature], strict=True):
            rows = [table[row] * (one if weighted else 1.0) for row, one in zip(bag, factors, strict=True)]
            total = sum(rows, torch.zeros(2, dtype=torch.float64))
            wanted.append(total / max(1, len(bag)) if pooling == "MEAN" else total)
        expect_near(outputs[feature], torch.stack(wanted), f"output of feature {feature}")
        loss = loss + (torch.stack(wanted) * torch.arange(6).reshape(3, 2)).sum()
    loss.backward()
    grads = tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    sum((output * grads).sum() for output in outputs.values()).backward()
    for name, seed, table in zip("tu", range(2), exact, strict=True):
        weight = module.embedding_bags[name].weight
        found = weight.grad.to_dense() if trained == "plain" else parameter(4, 2, seed=seed) - weight
        given: Any = table.grad
        expect_near(found, given, f"the gradient of table {name}")
