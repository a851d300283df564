"""Recorded lookups as a workload, read from a Parquet or a ``.pt`` file.

A ``.pt`` file, written by `torch.save`, contains a dictionary with ``indices`` and ``offsets`` or
``lengths``, one-dimensional tensors of integers; or a dictionary of such dictionaries by feature. A Parquet
file has the columns ``indices`` and ``offsets`` or ``lengths``, lists of integers, with one row per feature,
and optionally a column ``feature`` with names. In both:

- ``indices``: the row numbers of all bags of a feature, concatenated; not negative;
- ``offsets``: the start of each bag, from 0, not decreasing, with or without the end (the last offset is the
  end if it equals the number of indices);
- ``lengths``: the number of indices of each bag; a file may have both if they agree;
- ``rows``, optional, one number: the rows of the feature's table; by default the largest index plus one.

Every feature has its own table, and all features have the same number of bags: the batch.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from keyedopt.benchmarks.workloads import Lookups
from keyedopt.conformance.results.errors import KeyedoptError, ResultError
from keyedopt.conformance.results.files import open_regular
from keyedopt.conformance.results.untrusted import error_text, one_line

#: The columns of a file.
NAMES = ("indices", "offsets", "lengths", "rows")
#: The largest file, also unpacked, in bytes, and the largest number of integers in a file.
SIZE, INTEGERS = 1 << 30, 1 << 27


class TraceError(KeyedoptError):
    """A file cannot be replayed; the message says what is wrong with it."""


@dataclass(frozen=True)
class Trace(Lookups):
    """Recorded lookups; `pooling` is the mean over the bags of a table.

    Args:
        recorded: the indices and the offsets, with the end, of each table.
    """

    recorded: tuple[tuple[Tensor, Tensor], ...] = field(default=(), compare=False, repr=False)

    def values(self) -> list[Tensor]:
        """Return the row numbers of each table."""
        return [indices for indices, _ in self.recorded]

    def offsets(self, table: int = 0) -> Tensor:
        """Return the offsets of the bags of a table, shape (B + 1,)."""
        return self.recorded[table][1]

    def unique(self) -> list[Tensor]:
        """Return the unique row numbers of each table, sorted."""
        return [torch.unique(indices) for indices in self.values()]


def read(path: Path, dim: int) -> Trace:
    """Read a file as a workload of tables with `dim` columns.

    Raises:
        TraceError: the file cannot be read, or its lookups are malformed.
    """
    recorded, rows = [], []
    for name, columns in _features(path):
        indices, offsets, least = _checked(f"{path}: feature {name!r}", columns)
        recorded.append((indices, offsets))
        rows.append(least)
        _check_number(str(path), sum(len(part) for pair in recorded for part in pair))
    batches = {len(offsets) - 1 for _, offsets in recorded}
    if len(batches) > 1:
        raise TraceError(f"{path}: all features must have the same number of bags, not {sorted(batches)}")
    digest = hashlib.sha256()
    for pair in recorded:
        for tensor in pair:
            digest.update(tensor.numpy().tobytes())
    (batch,) = batches
    return Trace(
        name="trace",
        about=f"recorded in {path.name}, {digest.hexdigest()[:12]}",
        tables=len(recorded),
        rows=tuple(rows),
        dim=dim,
        batch=batch,
        pooling=tuple(round(len(indices) / batch) for indices, _ in recorded),
        recorded=tuple(recorded),
    )


def _features(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the columns of each feature.

    Raises:
        TraceError: there is none.
    """
    if path.suffix == ".pt":
        found = list(_from_pt(path))
    elif path.suffix in (".parquet", ".pq"):
        found = list(_from_parquet(path))
    else:
        raise TraceError(f"{path} must be a .parquet or a .pt file")
    if not found:
        raise TraceError(f"{path} is empty: it has no feature")
    names = Counter(name for name, _ in found)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise _twice(path, twice)
    yield from found


def _twice(path: Path, name: str) -> TraceError:
    what = f"feature {one_line(repr(name), 80)} occurs twice"
    return TraceError(f"{path}: {what}: put all lookups of a feature into one row")


def _open(path: Path) -> BinaryIO:
    """Open a regular file within the bounds.

    Raises:
        TraceError: it is none.
    """
    try:
        file = os.fdopen(open_regular(path), "rb")
    except ResultError as error:
        raise TraceError(f"{path}: {error}") from error
    unpacked = os.fstat(file.fileno()).st_size
    with contextlib.suppress(zipfile.BadZipFile, OSError, ValueError):
        unpacked = max(unpacked, sum(part.file_size for part in zipfile.ZipFile(file).infolist()))
    file.seek(0)
    if unpacked > SIZE:
        file.close()
        raise TraceError(f"{path} is larger than {SIZE >> 20} MB")
    return file


def _from_pt(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with _open(path) as file:
            plain = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load calls what a damaged file names, with any arguments
        why = getattr(error, "strerror", None) or one_line(error_text(error), 200)
        raise TraceError(f"{path} cannot be read: it must contain only tensors ({why})") from error
    if not isinstance(plain, dict):
        raise TraceError(f"{path} must contain a dictionary, not a {type(plain).__name__}")
    one = any(name in plain for name in NAMES) and not all(isinstance(each, dict) for each in plain.values())
    for name, columns in {"feature": plain}.items() if one else plain.items():
        if not isinstance(columns, dict):
            raise TraceError(f"{path}: {name!r} must be a dictionary with indices and offsets or lengths")
        yield str(name), columns


def _from_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
    except ImportError as error:
        raise TraceError("Parquet files need pyarrow: pip install 'keyedopt[reports]'") from error

    def plain(scalar: Any) -> Any:
        full = isinstance(scalar, pyarrow.ListScalar) and scalar.is_valid and len(scalar.values)
        return np.array(scalar.values) if full else scalar.as_py()

    with _open(path) as file:  # pyarrow ends the process for some damaged files, so it has one of its own
        command = [sys.executable, "-P", "-m", "keyedopt.benchmarks.parquet", str(INTEGERS)]
        done = subprocess.run(command, stdin=file, capture_output=True, check=False)
    if done.returncode:
        why = done.stderr.decode(errors="replace")
        if done.returncode != 1:
            why = f"pyarrow ended with {done.returncode} {why}"
        raise TraceError(f"{path} cannot be read: {one_line(why, 200)}")
    table = pyarrow.ipc.open_stream(done.stdout).read_all()
    if "feature" in table.column_names:
        for count in table.column("feature").value_counts():
            if count["counts"].as_py() > 1:
                raise _twice(path, str(count["values"].as_py()))
    for number in range(table.num_rows):
        row = {name: plain(table.column(name)[number]) for name in table.column_names}
        columns = {name: value for name, value in row.items() if name != "feature" and value is not None}
        yield str(row.get("feature", number)), columns


def _check_number(where: str, count: int) -> None:
    """Raise TraceError if there are more integers than the bound; a file can say that one is repeated."""
    if count > INTEGERS:
        raise TraceError(f"{where} has {count:,} integers; at most {INTEGERS:,} are read")


def _checked(where: str, columns: Mapping[str, Any]) -> tuple[Tensor, Tensor, int]:
    """Return the indices, the offsets with the end, and the number of rows of the table."""
    unknown = [name for name in columns if name not in NAMES]
    if unknown or "indices" not in columns or not {"offsets", "lengths"} & set(columns):
        names = ", ".join(map(str, columns)) or "none"
        raise TraceError(f"{where} must have indices, and offsets or lengths; its columns are {names}")
    indices = _integers(where, "indices", columns["indices"])
    if not len(indices):
        raise TraceError(f"{where} is empty: it has no indices")
    if int(indices.min()) < 0:
        raise TraceError(f"{where} has negative indices: {int(indices.min())}")
    found = []
    if "lengths" in columns:
        lengths = _integers(where, "lengths", columns["lengths"])
        if len(lengths) and int(lengths.min()) < 0:
            raise TraceError(f"{where} has negative lengths: {int(lengths.min())}")
        if len(lengths) and int(lengths.max()) > len(indices):  # before their sum can overflow
            raise TraceError(
                f"{where}: a bag has {int(lengths.max())} indices, but there are {len(indices)} in all"
            )
        found.append(torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    if "offsets" in columns:
        found.insert(0, _with_end(where, _integers(where, "offsets", columns["offsets"]), len(indices)))
    offsets = found[0]
    if int(offsets[-1]) != len(indices):
        raise TraceError(
            f"{where}: the bags have {int(offsets[-1])} indices in all, but there are {len(indices)}"
        )
    if len(offsets) < 2 or not all(torch.equal(offsets, other) for other in found[1:]):
        raise TraceError(f"{where}: offsets and lengths must agree, and have at least one bag")
    rows = columns.get("rows", int(indices.max()) + 1)
    if isinstance(rows, Tensor) and not rows.is_meta and rows.numel() == 1:
        rows = rows.tolist()
    if isinstance(rows, bool) or not isinstance(rows, int) or rows <= int(indices.max()):
        raise TraceError(f"{where}: rows must be a number above the largest index, {int(indices.max())}")
    return indices, offsets, rows


def _with_end(where: str, offsets: Tensor, end: int) -> Tensor:
    if not len(offsets) or int(offsets[0]) != 0:
        raise TraceError(f"{where}: offsets must begin with 0")
    if (offsets.diff() < 0).any():
        raise TraceError(f"{where}: offsets must not decrease")
    if int(offsets[-1]) > end:
        raise TraceError(f"{where}: offsets go to {int(offsets[-1])}, but there are {end} indices")
    return offsets if int(offsets[-1]) == end else torch.cat([offsets, offsets.new_tensor([end])])


def _integers(where: str, name: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(f"{where}: {name} must be integers") from error
    whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    whole &= not tensor.is_quantized and not tensor.is_meta
    if tensor.dim() != 1 or tensor.layout != torch.strided or not (whole or not tensor.numel()):
        raise TraceError(f"{where}: {name} must be a list of integers")
    _check_number(f"{where}: {name}", tensor.numel())
    return tensor.to(torch.int64)
