"""Workloads: named, frozen, the same on every machine, with the bytes that they must move.

A count of bytes is a lower bound: each tensor that is needed is read once, each that changes is written once.
An implementation may move more.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

#: Bytes of a float32, and of an int64 row number.
FLOAT, INDEX = 4, 8
#: State per row of D columns, in numbers: (a factor of D, a constant).
STATE = {
    "sgd": (0, 0),
    "rowwise_adagrad": (0, 1),
    "adagrad": (1, 0),
    "adam": (2, 0),
    "partial_rowwise_adam": (1, 1),
    "lamb": (2, 0),
    "partial_rowwise_lamb": (1, 1),
    "lars_sgd": (1, 0),
}
#: Distributions of row numbers: Zipf, uniform, a single row, no row twice within a table.
DISTRIBUTIONS = ("zipf", "uniform", "same", "distinct")


@dataclass(frozen=True)
class Lookups:
    """Pooled lookups: B bags of L rows in each of T tables with R rows and D columns.

    Args:
        name: the name for ``keyedopt bench run --workload``.
        about: the case that the workload represents.
        tables, rows, dim, batch, pooling: T, R, D, B and L; R and L are one number, or one per table.
        indices: one of `DISTRIBUTIONS`.
        exponent: s of Zipf's law: the frequency of the k-th most frequent row is proportional to k ** -s.
    """

    kind: ClassVar[str] = "lookups"
    name: str
    about: str
    tables: int
    rows: int | tuple[int, ...]
    dim: int
    batch: int
    pooling: int | tuple[int, ...]
    indices: str = "zipf"
    exponent: float = 1.05

    def __post_init__(self) -> None:
        """Raise ValueError if the numbers do not fit together."""
        if self.indices not in DISTRIBUTIONS:
            raise ValueError(f"indices must be one of {DISTRIBUTIONS}, not {self.indices!r}")
        if len(self.heights) != self.tables or len(self.lengths) != self.tables:
            raise ValueError("rows and pooling must be one number, or one for each table")
        pairs = zip(self.heights, self.lengths, strict=True)
        if self.indices == "distinct" and any(self.batch * length > height for height, length in pairs):
            raise ValueError("distinct indices need at least as many rows as lookups in a table")

    @property
    def heights(self) -> tuple[int, ...]:
        """R of each table."""
        return (self.rows,) * self.tables if isinstance(self.rows, int) else self.rows

    @property
    def lengths(self) -> tuple[int, ...]:
        """L of each table."""
        return (self.pooling,) * self.tables if isinstance(self.pooling, int) else self.pooling

    def values(self) -> list[Tensor]:
        """Return the row numbers of each table, shape (B · L,), int64."""
        return list(_values(self))

    def offsets(self, table: int = 0) -> Tensor:
        """Return the offsets of the bags of a table, shape (B + 1,)."""
        length = self.lengths[table]
        return torch.arange(0, self.batch * length + 1, length)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each table's pooled output, shape (B, D)."""
        generator = torch.Generator().manual_seed(len(self.name))
        return [torch.randn(self.batch, self.dim, generator=generator) for _ in range(self.tables)]

    def unique(self) -> list[Tensor]:
        """Return the unique row numbers of each table, sorted."""
        return list(_unique(self))

    def forward_bytes(self) -> int:
        """Return the bytes of a forward pass: read row numbers and rows once, write pooled rows once."""
        return self._index_bytes() + FLOAT * self.dim * (self._rows_touched() + self._bags())

    def backward_bytes(self, optimizer: str) -> int:
        """Return the bytes of a backward pass.

        It reads row numbers and output gradients once, and reads and writes rows and their state once.
        """
        factor, constant = STATE[optimizer]
        numbers = self._rows_touched() * (self.dim * (1 + factor) + constant)
        return self._index_bytes() + FLOAT * (self._bags() * self.dim + 2 * numbers)

    def table_bytes(self) -> int:
        """Return the bytes of the tables."""
        return FLOAT * self.dim * sum(self.heights)

    def _index_bytes(self) -> int:
        return INDEX * sum(len(values) for values in self.values())

    def _bags(self) -> int:
        return self.tables * self.batch

    def _rows_touched(self) -> int:
        return sum(len(rows) for rows in self.unique())


@dataclass(frozen=True)
class Dense:
    """Dense parameters with dense gradients: `repeat` blocks of parameters with the given shapes."""

    kind: ClassVar[str] = "dense"
    name: str
    about: str
    shapes: tuple[tuple[int, ...], ...]
    repeat: int = 1

    def parameters(self, seed: int = 0) -> list[Tensor]:
        """Return a random tensor for each parameter; another seed gives the gradients."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in self.shapes * self.repeat]

    def numbers(self) -> int:
        """Return the total size of the parameters, in numbers."""
        return self.repeat * sum(torch.Size(shape).numel() for shape in self.shapes)

    def clip_adam_bytes(self) -> int:
        """Return 36 bytes per number: read g for the norm; then read and write g, w, m and v."""
        return FLOAT * (1 + 2 * 4) * self.numbers()

    def state_bytes(self) -> int:
        """Return the bytes to read and write Adagrad's state: a sum per number and a step per tensor."""
        return 2 * FLOAT * (self.numbers() + self.repeat * len(self.shapes))


@dataclass(frozen=True)
class SparseGradients:
    """Tables with uncoalesced sparse gradients, like those of ``nn.Embedding(sparse=True)``."""

    kind: ClassVar[str] = "sparse"
    name: str
    about: str
    tables: int
    rows: int
    dim: int
    lookups: int
    indices: str = "zipf"
    exponent: float = 1.05

    def values(self) -> list[Tensor]:
        """Return the row numbers of each gradient, with duplicates, shape (N,)."""
        return list(_values(self._as_lookups()))

    def gradients(self) -> list[Tensor]:
        """Return the rows of each gradient, shape (N, D)."""
        return self._as_lookups().gradients()

    def unique(self) -> list[Tensor]:
        """Return the unique row numbers of each gradient."""
        return list(_unique(self._as_lookups()))

    def sparse_adam_bytes(self) -> int:
        """Return the bytes: read row numbers and gradient once, read and write rows and both moments once."""
        return self._as_lookups().backward_bytes("adam")

    def _as_lookups(self) -> Lookups:
        shape = (self.tables, self.rows, self.dim, self.lookups, 1)
        return Lookups(self.name, self.about, *shape, self.indices, self.exponent)


Workload = Lookups | Dense | SparseGradients


@functools.lru_cache(maxsize=2)
def _values(work: Lookups) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(max(work.heights) + work.tables)
    drawn = []
    for rows, length in zip(work.heights, work.lengths, strict=True):
        count = work.batch * length
        if work.indices == "same":
            values = torch.full((count,), rows // 2)
        elif work.indices == "uniform":
            values = torch.randint(rows, (count,), generator=generator)
        else:  # a row number does not depend on the frequency of the row
            order = torch.randperm(rows, generator=generator)
            if work.indices == "zipf":
                shares = _shares(rows, work.exponent)
                points = torch.rand(count, dtype=torch.float64, generator=generator) * shares[-1]
                order = order[torch.searchsorted(shares, points).clamp_(max=rows - 1)]
            values = order[:count]
        drawn.append(values)
    return tuple(drawn)


@functools.lru_cache(maxsize=1)
def _shares(rows: int, exponent: float) -> Tensor:
    """Return the cumulative weights of Zipf's law."""
    return torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)


@functools.lru_cache(maxsize=2)
def _unique(work: Lookups) -> tuple[Tensor, ...]:
    return tuple(torch.unique(values) for values in _values(work))


#: The row counts and multi-hot sizes of DLRM-DCNv2 in MLPerf training: mlcommons/training,
#: recommendation_v2/torchrec_dlrm/README.MD, the arguments num_embeddings_per_feature and multi_hot_sizes.
#: The distribution is uniform, like there (multi_hot_distribution_type); dim is 128.
DLRM_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
DLRM_LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
#: Tables with at most this many rows are not scaled.
SMALL = 1000


def dlrm(name: str, fraction: float, batch: int) -> Lookups:
    """Return MLPerf's tables with a fraction of their rows; larger tables keep at least 1000 rows.

    A sample looks up 214 rows. A step moves at least 8 · 214 bytes of row numbers per sample in each pass,
    the pooled rows and their gradients (26 · 128 numbers per sample each), and touched rows with their state.
    """
    rows = tuple(max(min(full, SMALL), round(full * fraction)) for full in DLRM_ROWS)
    about = f"MLPerf DLRM-DCNv2, {fraction:g} of its rows" if fraction < 1 else "MLPerf DLRM-DCNv2 in full"
    return Lookups(name, about, len(rows), rows, 128, batch, DLRM_LENGTHS, "uniform")


#: The dense part of DLRM-DCNv2 (same source): a bottom network 13-512-256-128, three cross layers of rank 512
#: over 27 · 128 numbers, a top network 1024-1024-512-256-1.
DLRM_TOWER = (
    *((512, 13), (512,), (256, 512), (256,), (128, 256), (128,)),
    *((512, 3456), (3456, 512), (3456,)) * 3,
    *((1024, 3456), (1024,), (1024, 1024), (1024,), (512, 1024), (512,), (256, 512), (256,), (1, 256), (1,)),
)

_LISTED: tuple[Workload, ...] = (
    Lookups("8x200k-zipf", "a model of medium size, skewed traffic", 8, 200_000, 64, 2048, 20),
    Lookups("8x200k-uniform", "the same, even traffic: few duplicates", 8, 200_000, 64, 2048, 20, "uniform"),
    Lookups("small-step", "26 small tables, batch 16: the overhead of a step", 26, 1000, 16, 16, 1),
    Lookups("26-tables", "26 tables, batch 128: mostly the overhead of a step", 26, 100_000, 16, 128, 2),
    Lookups("100-tables", "100 tables of 2000 rows, batch 128", 100, 2000, 16, 128, 2),
    Lookups("one-huge-table", "one table of 1 GiB", 1, 4_194_304, 64, 4096, 20),
    Lookups("500-tiny-tables", "500 tables of 100 rows", 500, 100, 16, 128, 1),
    Lookups("wide-rows", "rows of 512 numbers", 4, 50_000, 512, 1024, 8),
    Lookups(
        "all-the-same-row", "adversarial: one row takes every gradient", 4, 100_000, 64, 2048, 20, "same"
    ),
    Lookups("all-distinct", "adversarial: no row twice", 4, 100_000, 64, 2048, 20, "distinct"),
    dlrm("dlrm-dcnv2", 1, 8192),
    dlrm("dlrm-dcnv2-100th", 1 / 100, 2048),
    dlrm("dlrm-dcnv2-1000th", 1 / 1000, 512),
    Dense("dlrm-tower", "the dense part of MLPerf DLRM-DCNv2", DLRM_TOWER),
    Dense("tower-24m", "a cross and deep network of 24 M parameters", ((1024, 1024), (1024,)), 23),
    Dense("10k-parameters", "10,000 small parameters", ((8,),), 10_000),
    Dense("1k-parameters", "1,000 small parameters", ((8,),), 1000),
    SparseGradients("sparse-zipf", "uncoalesced gradients, skewed", 4, 200_000, 64, 40_960),
    SparseGradients("sparse-uniform", "uncoalesced gradients, even", 4, 200_000, 64, 40_960, "uniform"),
)

#: The workloads by name.
WORKLOADS: dict[str, Workload] = {work.name: work for work in _LISTED}
