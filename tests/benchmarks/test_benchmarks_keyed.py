"""The joined form of tables: what a `KeyedJaggedTensor` must offer, and who does not take one."""

import sys

import pytest
import torch

from keyedopt.benchmarks.tasks import TASKS, NotOffered, keyed, make
from keyedopt.benchmarks.workloads import Lookups
from keyedopt.conformance.targets.find import find

WORK = Lookups("tiny", "for tests", tables=3, rows=50, dim=4, batch=6, pooling=2)
TASK = TASKS["train_joined-rowwise_adagrad"]


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_without_torchrec_the_results_are_the_same(monkeypatch, name):
    with_it = make(find(name).surface(), TASK, WORK, "cpu")
    with_it.run()
    monkeypatch.setitem(sys.modules, "torchrec.sparse.jagged_tensor", None)
    without = make(find(name).surface(), TASK, WORK, "cpu")
    without.run()
    assert all(torch.equal(value, with_it.results()[key]) for key, value in without.results().items())


def test_the_joined_form_does_what_the_split_form_does():
    jobs = [
        make(find("fused").surface(), TASKS[name], WORK, "cpu")
        for name in (TASK.name, "train-rowwise_adagrad")
    ]
    for job in jobs:
        job.run()
    joined, split = (job.results() for job in jobs)
    for key, value in joined.items():
        torch.testing.assert_close(value, split[key])


class Separate:
    """An implementation whose tables return outputs by feature for any input."""

    class EmbeddingBagConfig:
        """A configuration that keeps nothing."""

        def __init__(self, *_, **__):
            self.given = True

    class EmbeddingBagCollection(torch.nn.Module):
        """Tables that take mappings only."""

        def __init__(self, *_, **__):
            super().__init__()
            self.fused_optimizer = type("Optimizer", (), {"params": {"t0": torch.zeros(50, 4)}})()

        def forward(self, features):
            return {name: torch.zeros(1) for name in features}

    RowWiseAdagrad = torch.optim.Adagrad

    def has(self, name):
        """Return whether the name is there."""
        return hasattr(self, name)


def test_tables_that_do_not_take_a_keyed_jagged_tensor_are_not_offered():
    with pytest.raises(NotOffered, match="KeyedJaggedTensor"):
        make(Separate(), TASK, WORK, "cpu")


def test_offsets_and_methods_are_those_of_torchrec(torchrec):
    lookups = [
        (5, torch.tensor([1, 2]), torch.tensor([0, 0, 2])),
        (5, torch.tensor([3]), torch.tensor([0, 1, 1])),
    ]
    theirs = keyed.keyed_jagged_tensor(lookups)
    assert type(theirs).__module__.startswith("torchrec")
    ours = keyed.KeyedJaggedTensor(theirs.keys(), theirs.values(), theirs.offsets())
    assert theirs.offsets().tolist() == [0, 0, 2, 3, 3]
    assert (ours.stride(), ours.variable_stride_per_key()) == (
        theirs.stride(),
        theirs.variable_stride_per_key(),
    )
    assert ours.inverse_indices_or_none() is ours.weights_or_none() is theirs.weights_or_none() is None
