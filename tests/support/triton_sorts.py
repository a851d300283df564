"""Cases of the sort of the Triton backend, against a stable sort of torch."""

from typing import Any

import torch

from keyedopt.fused.backends.interface import Lookup, Table

SORTS = {
    "nothing_else": {"count": 0, "rows": 3, "least": 0, "tile": 64, "digit": 8},
    "one": {"count": 1, "rows": 200, "least": 0, "tile": 64, "digit": 8},
    "one_digit": {"count": 301, "rows": 200, "least": 0, "tile": 64, "digit": 8},
    "small_digits": {"count": 300, "rows": 600, "least": 0, "tile": 128, "digit": 3},
    "two_digits": {"count": 500, "rows": 60000, "least": 59000, "tile": 256, "digit": 8},
    "three_digits": {"count": 505, "rows": 2**23, "least": 0, "tile": 512, "digit": 8},
    "packed": {"count": 300, "rows": 2**25 - 6, "least": 2**24, "tile": 128, "digit": 8},
    "wide_digits": {"count": 257, "rows": 2**29, "least": 2**28, "tile": 128, "digit": 8},
    "all_the_same": {"count": 400, "rows": 70000, "least": 69999, "tile": 128, "digit": 8},
    "by_torch": {"count": 100, "rows": 2**31, "least": 2**30, "tile": 64, "digit": 8},
    "by_torch_wide": {"count": 100, "rows": 2**31 + 9, "least": 2**30, "tile": 64, "digit": 8},
}


def case_sort(backend: Any, count: int, rows: int, least: int, tile: int, digit: int) -> None:
    """Keys and places as a stable sort of torch brings them, in one pass or several, one tile or many."""
    from keyedopt.fused.backends.triton.groups import Group
    from keyedopt.fused.backends.triton.prepare import make_runs
    from keyedopt.fused.backends.triton.shapes import Tuning

    generator = torch.Generator().manual_seed(count)
    tables = [Table(torch.empty(size, 1, dtype=torch.float16)) for size in (rows, 5)]
    values = torch.randint(least, rows, (count,), generator=generator)
    others = torch.randint(0, 5, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    lookups = [
        Lookup(0, values),
        Lookup(1, others, torch.tensor([0, 3, 3, 7]), weights, mean=True),
        Lookup(0, values[:0], torch.tensor([0, 0])),
    ]
    group = Group(tuple(tables), (0, 1))
    tuning = Tuning(block=16, values=64, probes=4, tile=tile, digit=digit)
    for _ in range(2):  # the second time with the memory of the first
        runs = make_runs(group, lookups, tuning)
        keys, order = torch.sort(torch.cat([values, others + rows]), stable=True)
        places = torch.cat([torch.arange(count), torch.tensor([0, 0, 0, 2, 2, 2, 2]) + (1 << runs.shift)])
        scales = torch.cat([torch.ones(count), weights / torch.tensor([3.0, 3, 3, 4, 4, 4, 4])])
        assert torch.equal(runs.keys.long(), keys)
        assert torch.equal(runs.places.long(), places[order])
        torch.testing.assert_close(runs.scales, scales[order])
