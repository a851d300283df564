"""Cases of packed input: a `KeyedJaggedTensor` that no one splits gives the bits of separate lookups."""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton_oracle import STEPS, tables_of

from keyedopt import fused, ptx
from keyedopt.fused.backends.interface import Lookup, Step, Tables
from keyedopt.fused.backends.packed import PackedLayout, PackedLookups

SIZES = [(40, 8), (1, 4), (300, 12)]
#: The table of each lookup, its key and its mean: keys are in another order than lookups.
TABLES, KEYS, MEANS = (0, 2, 1, 0), (2, 0, 3, 1), (False, True, False, False)
LENGTHS = torch.tensor([[0, 3, 1], [5, 6, 70], [0, 0, 0], [2, 2, 1]])


class KeyedJaggedTensor:
    """The methods of torchrec's class that are used."""

    def __init__(self, keys: list[str], values: Tensor, offsets: Tensor) -> None:
        self._given = keys, values, offsets

    def keys(self) -> list[str]:
        return self._given[0]

    def values(self) -> Tensor:
        return self._given[1]

    def offsets(self) -> Tensor:
        return self._given[2]

    def stride(self) -> int:
        return (self._given[2].numel() - 1) // len(self._given[0])

    def variable_stride_per_key(self) -> bool:
        return False

    def inverse_indices_or_none(self) -> None:
        return None

    weights_or_none = inverse_indices_or_none


class KeyedTensor:
    """What is used of torchrec's class."""

    def __init__(self, keys: list[str], lengths: list[int], values: Tensor) -> None:
        self.values = values


def packed(weighted: bool, bags: int = 3) -> tuple[PackedLookups, list[Lookup]]:
    """Return lookups in tables of `SIZES`, packed, and each by itself, with gradients."""
    draw = torch.Generator().manual_seed(int(weighted))
    lengths = LENGTHS[:, :bags].reshape(-1)
    count, edges = int(lengths.sum()), [0, *lengths.cumsum(0).tolist()]
    offsets, ends = torch.tensor(edges), [0]
    for table in TABLES:
        ends.append(ends[-1] + SIZES[table][1])
    columns = tuple(slice(*pair) for pair in pairwise(ends))
    layout = PackedLayout(TABLES, MEANS, KEYS, columns, len(KEYS))
    rows = torch.empty(count, dtype=torch.int64)
    for table, key in zip(TABLES, KEYS, strict=True):
        begin, end = edges[key * bags], edges[(key + 1) * bags]
        rows[begin:end] = torch.randint(0, min(SIZES[table][0], 9), (end - begin,), generator=draw)
    weights = torch.rand(count, generator=draw) if weighted else None
    grad = torch.randn(bags, ends[-1], generator=draw)
    made = PackedLookups(layout, rows, offsets, weights, bags, grad)
    return made, list(made)


def case_packed(backend: Any) -> None:
    """Outputs, sums and updates are those of separate lookups, bit for bit."""
    for weighted, name, prepared in ((False, "rowwise", True), (True, "adam", False)):
        options = STEPS[name]
        one, other = (Tables(tables_of(SIZES, options, torch.float32)) for _ in range(2))
        lookups, separate = packed(weighted)
        found = backend.look_up_packed(one, lookups, prepared)
        assert (lookups.prepared is not None) is prepared
        assert torch.equal(found, torch.cat(backend.look_up(other, separate), 1))
        for mine, expected in zip(
            backend.coalesce(one, lookups), backend.coalesce(other, separate), strict=True
        ):
            assert mine.table == expected.table
            assert torch.equal(mine.rows, expected.rows)
            assert torch.equal(mine.grads, expected.grads)
        room = sum(min(len(lookups.values), rows) for rows, _ in SIZES)
        assert sum(len(sums.rows) for sums in backend.coalesce_padded(one, lookups)) == room
        step = Step(lr=0.1, **options)
        backend.update(one, lookups, step)
        backend.update(other, separate, step)
        for mine, expected in zip(one, other, strict=True):
            for a, b in zip((mine.weight, *mine.states), (expected.weight, *expected.states), strict=True):
                assert torch.equal(a, b)


def idle_launches(backend: Any) -> list[str]:
    """Return the launches of a second step of other sizes, which compiles nothing."""
    options = STEPS["rowwise"]
    tables, step = Tables(tables_of(SIZES, options, torch.float32)), Step(lr=0.1, **options)
    refuse = patch.object(JITFunction, "_do_compile", side_effect=AssertionError("a kernel is compiled"))
    with ptx.idle() as launched:
        for bags, compiles in ((3, nullcontext()), (2, refuse)):
            launched.clear()
            lookups, _ = packed(weighted=False, bags=bags)
            with compiles:
                backend.look_up_packed(tables, lookups, True)
                backend.update(tables, lookups, step)
    return launched


def case_packed_module(backend: Any) -> None:
    """A module does not split the input, and takes the same step as with separate features."""
    configs = [
        fused.EmbeddingBagConfig(rows, width, f"t{table}", feature_names=[f"f{table}"])
        for table, (rows, width) in enumerate(SIZES)
    ]
    bags = {"f2": ([9] * 40, [0, 2, 40, 40]), "f0": ([0, 5, 39], [0, 1, 3, 3]), "f1": ([0], [0, 0, 1, 1])}
    separate = {key: (torch.tensor(rows), torch.tensor(offsets)) for key, (rows, offsets) in bags.items()}
    keys, values = list(bags), torch.cat([rows for rows, _ in separate.values()])
    offsets = torch.tensor([0, 2, 40, 40, 41, 43, 43, 43, 44, 44])
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(
            fused.EmbeddingBagCollection(configs, fused.RowWiseAdagrad, {"lr": 0.1}, backend="triton")
        )
    for _ in range(2):
        with patch.object(PackedLookups, "_split", side_effect=AssertionError("the input is split")):
            output = modules[0](KeyedJaggedTensor(keys, values, offsets)).values
            output.square().sum().backward()
        joined = torch.cat(list(modules[1](separate).values()), 1)
        joined.square().sum().backward()
        assert torch.equal(output, joined)
    pairs = list(zip(modules[0].parameters(), modules[1].parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    for place, wrong in ((slice(6, 7), 39), (slice(3, 4), 45), (slice(8, None), 43)):
        changed = offsets.clone()
        changed[place] = wrong
        with pytest.raises(ValueError, match="offsets"):
            modules[0](KeyedJaggedTensor(keys, values, changed))
    with pytest.raises(ValueError, match="row numbers"):
        modules[0](KeyedJaggedTensor(keys, values * 0 + 400, offsets))
    assert all(torch.equal(one, other) for one, other in pairs)
