"""``keyedopt bench grid``: many shapes of tables, so that no shape is tuned at the cost of another."""

from collections.abc import Iterator, Sequence
from statistics import median

from keyedopt.benchmarks.compare import Comparison
from keyedopt.benchmarks.tasks import TASKS, Task
from keyedopt.benchmarks.workloads import Lookups

TRAIN = "train_joined-rowwise_adagrad"


def shape(tables: int, rows: int, dim: int, batch: int, pooling: int, indices: str = "zipf") -> Lookups:
    """Return a workload whose name has all of its numbers.

    >>> shape(4, 50_000, 64, 1024, 10).name
    '4x50000x64, 1024x10 zipf'
    """
    name = f"{tables}x{rows}x{dim}, {batch}x{pooling} {indices}"
    return Lookups(name, "a shape of the grid", tables, rows, dim, batch, pooling, indices)


#: Widths, poolings, batches, numbers of tables, small steps, and distributions around a common shape.
SHAPES = (
    *(shape(4, 50_000, dim, 1024, 10) for dim in (4, 8, 12, 16, 32, 64, 100, 128, 256, 512)),
    *(shape(4, 50_000, 64, 512, pooling) for pooling in (1, 100)),
    *(shape(4, 50_000, 32, batch, 4) for batch in (16, 256, 4096)),
    shape(4, 50_000, 32, 65_536, 1),
    *(shape(tables, 2000, 16, 128, 2) for tables in (1, 8, 26, 100, 500)),
    *(shape(tables, 1000, 16, batch, 1) for tables in (1, 26) for batch in (1, 16)),
    *(
        shape(4, 100_000, dim, batch, 10, indices)
        for indices in ("uniform", "same")
        for dim, batch in ((64, 1024), (128, 2048))
    ),
    *(shape(8, 200_000, 64, 2048, 20, indices) for indices in ("zipf", "uniform")),
)
#: Shapes that other tasks are measured with, too.
FEW = (
    shape(4, 50_000, 4, 1024, 10),
    shape(4, 50_000, 64, 1024, 10),
    shape(4, 50_000, 64, 512, 1),
    shape(100, 2000, 16, 128, 2),
    shape(26, 1000, 16, 16, 1),
    shape(4, 100_000, 64, 1024, 10, "uniform"),
)
OTHERS = ("forward_joined", "train_joined-sgd", "train_joined-adagrad", "train_joined-adam")


def pairs() -> list[tuple[Lookups, Task]]:
    """Return the workloads and tasks of the grid."""
    return [
        *((work, TASKS[TRAIN]) for work in SHAPES),
        *((work, TASKS[name]) for name in OTHERS for work in FEW),
    ]


def worst_first(rows: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons, the lowest ratio first; a ratio whose interval says nothing comes last."""
    return sorted(rows, key=lambda row: (row.withheld, row.ratio))


def summary(rows: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line for each peer: the worst ratio, the median and the best, and how many are below 1."""
    for peer in dict.fromkeys(row.peer for row in rows):
        ratios = sorted(row.ratio for row in rows if row.peer == peer and row.matches and not row.withheld)
        if ratios:
            below = sum(ratio < 1 for ratio in ratios)
            yield (
                f"against {peer}: worst {ratios[0]:.2f}, median {median(ratios):.2f}, best {ratios[-1]:.2f}; "
                f"{below} of {len(ratios)} shapes are slower than {peer}"
            )
