"""A backend that is not keyedopt's: one class and one entry of the registry."""

import sys
from types import ModuleType

import pytest
import torch

from keyedopt import fused, reference
from keyedopt.fused import backends
from keyedopt.fused.backends.interface import Backend, RowGradients

BAGS = {"f": (torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 2, 4]))}


class LoopBackend(Backend):
    """SGD without momentum and row-wise Adagrad in plain loops; everything else is a default."""

    name = "loop"
    calls: list[str] = []  # noqa: RUF012

    def missing(self):
        return ""

    def refuses(self, tables, step):
        if step.algorithm not in ("sgd", "rowwise_adagrad") or step.momentum or step.weight_decay:
            return f"no {step.algorithm} with these options"
        return ""

    def look_up(self, tables, lookups):
        self.calls.append("look_up")
        return [self._pooled(tables[lookup.table].weight.detach(), lookup) for lookup in lookups]

    def _pooled(self, weight, lookup):
        rows = weight[lookup.values]
        if lookup.offsets is None:
            return rows
        bags = zip(lookup.offsets[:-1], lookup.offsets[1:], strict=True)
        sums = [rows[begin:end].sum(0) / (max(1, end - begin) if lookup.mean else 1) for begin, end in bags]
        return torch.stack(sums)

    def coalesce(self, tables, lookups):
        sums = {lookup.table: {} for lookup in lookups}
        for lookup in lookups:
            for place, row in enumerate(lookup.values.tolist()):
                bag = place if lookup.offsets is None else int((lookup.offsets[1:] <= place).sum())
                length = int(lookup.offsets[bag + 1] - lookup.offsets[bag]) if lookup.mean else 1
                grad = lookup.grad[bag] / length
                sums[lookup.table][row] = sums[lookup.table].get(row, 0) + grad
        return [
            RowGradients(table, torch.tensor(sorted(rows)), torch.stack([rows[row] for row in sorted(rows)]))
            for table, rows in sums.items()
            if rows
        ]

    def update(self, tables, lookups, step):
        self.update_rows(tables, self.coalesce(tables, lookups), step)

    def update_rows(self, tables, gradients, step):
        self.calls.append("update")
        for one in gradients:
            table = tables[one.table]
            for row, grad in zip(one.rows.tolist(), one.grads, strict=True):
                if step.algorithm == "rowwise_adagrad":
                    table.states[0][row] += grad.square().mean()
                    grad = grad / (table.states[0][row].sqrt() + step.eps)
                table.weight.data[row] -= step.lr * grad


@pytest.fixture
def registered(monkeypatch):
    """Register the backend with one line."""
    module = ModuleType("loop_backend")
    module.LoopBackend = LoopBackend
    monkeypatch.setitem(sys.modules, "loop_backend", module)
    monkeypatch.setitem(backends.BACKENDS, "loop", backends.Registered("loop_backend", "LoopBackend"))
    LoopBackend.calls.clear()
    yield
    backends._load.cache_clear()


def train(library, kind, pooling="SUM", **more):
    config = library.EmbeddingBagConfig(
        5, 4, "t", feature_names=["f"], init_fn=torch.nn.init.ones_, pooling=library.PoolingType[pooling]
    )
    module = library.EmbeddingBagCollection([config], getattr(library, kind), {"lr": 0.5}, **more)
    outputs = []
    for factor in (1.0, 0.5, 2.0):
        output = module(BAGS)["f"]
        outputs.append(output.detach())
        (factor * output.square().sum()).backward()
    return torch.cat([*outputs, module.embedding_bags["t"].weight.detach()])


@pytest.mark.parametrize("kind", ["SGD", "RowWiseAdagrad"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_new_backend_trains_a_table_like_the_reference(registered, monkeypatch, kind, pooling, by):
    more = {"backend": "loop"} if by == "argument" else {}
    if by == "environment":
        monkeypatch.setenv(backends.PREFERRED, "loop")
    found, expected = train(fused, kind, pooling, **more), train(reference, kind, pooling)
    assert LoopBackend.calls == ["look_up", "update"] * 3
    assert torch.allclose(found, expected, rtol=1e-5)


def test_a_new_backend_checks_no_inputs_and_is_never_given_wrong_ones(registered):
    config = fused.EmbeddingBagConfig(5, 4, "t", feature_names=["f"])
    module = fused.EmbeddingBagCollection([config], fused.SGD, {"lr": 0.5}, backend="loop")
    with pytest.raises(ValueError, match="row numbers"):
        module({"f": (torch.tensor([5]), torch.tensor([0, 1]))})
    assert LoopBackend.calls == []


def test_options_that_a_new_backend_refuses(registered, monkeypatch):
    config = fused.EmbeddingBagConfig(5, 4, "t", feature_names=["f"])
    with pytest.raises(ValueError, match="'loop' cannot do this: no adam"):
        fused.EmbeddingBagCollection([config], fused.Adam, {"lr": 0.5}, backend="loop")
    monkeypatch.setenv(backends.PREFERRED, "loop")
    module = fused.EmbeddingBagCollection([config], fused.Adam, {"lr": 0.5})
    module(BAGS)["f"].sum().backward()
    assert LoopBackend.calls == []


def test_deferred_gradients_reach_a_new_backend(registered):
    """Sums before an update, as a norm over several modules needs, use the defaults of the interface."""
    config = fused.EmbeddingBagConfig(5, 4, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    module = fused.EmbeddingBagCollection([config], fused.SGD, {"lr": 0.5}, backend="loop")
    clip = type("Clip", (), {"apply": lambda self, grads: None})()
    module.fused_optimizer.defer_updates(clip, inside=())
    for _ in range(2):
        module(BAGS)["f"].sum().backward()
    module.fused_optimizer.step()
    assert module.embedding_bags["t"].weight[:, 0].tolist() == [0.0, -1.0, 1.0, 0.0, 1.0]
    assert LoopBackend.calls == ["look_up", "look_up", "update"]
