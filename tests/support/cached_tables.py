"""Collections with all rows on the device, and the same with a cache of rows, for tests that compare both.

In `fused` the bits are the same. In the reference, torch adds gradients of two features of a table in an
order that depends on row numbers, so its tables are float64 here, and compared nearly to the last bit.
"""

import pytest
import torch

from keyedopt import fused, reference

LIBRARIES = pytest.mark.parametrize("library", [reference, fused], ids=["reference", "fused"])
ROWS = {"t0": 60, "t1": 40}

#: Optimizers with all kinds of state: none, full, by row, counts of steps, and counts of rows.
OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9},
    "LarsSGD": {"lr": 0.1},
    "Ftrl": {"lr": 0.1, "l2": 0.1},
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
