"""Read a Parquet file from standard input and write its table as a stream of Arrow to standard output.

``python -m keyedopt.benchmarks.parquet INTEGERS`` ends with 1 and a line on standard error if the file cannot
be read, has texts other than names of features, or more integers than INTEGERS. pyarrow ends the process for
some damaged files, so `traces` runs this in a process of its own.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow
from pyarrow import parquet

from keyedopt.conformance.results.untrusted import error_text, one_line

#: The largest number of bytes of all names of features.
NAME_BYTES = 16 << 20


def main() -> int:
    """Run the command line of the module docstring."""
    try:
        _copy(int(sys.argv[1]))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        print(one_line(error_text(error), 200), file=sys.stderr)
        return 1
    return 0


def _copy(most: int) -> None:
    with open(0, "rb") as file:
        found = parquet.ParquetFile(file)
        groups = [found.metadata.row_group(number) for number in range(found.num_row_groups)]
        parts = [group.column(at) for group in groups for at in range(group.num_columns)]
        count = sum(part.num_values for part in parts)  # a file can say that one is repeated
        if count > most:
            raise ValueError(f"it has {count:,} integers; at most {most:,} are read")
        _check_types(parts)
        named = [name for name in found.schema_arrow.names if name == "feature"]
        # Each name once. A thread that still held the file when Python ended would abort the process.
        table = parquet.ParquetFile(file, read_dictionary=named).read(use_threads=False)
    with pyarrow.ipc.new_stream(sys.stdout.buffer, table.schema) as stream:
        stream.write_table(table)


def _check_types(parts: Sequence[Any]) -> None:
    """Raise ValueError if a column has values of any length, other than short names of features."""
    for part in parts:
        if part.physical_type.endswith("BYTE_ARRAY") and part.path_in_schema != "feature":
            raise ValueError(f"{one_line(part.path_in_schema, 80)} must be a list of integers")
    if sum(part.total_uncompressed_size for part in parts if part.path_in_schema == "feature") > NAME_BYTES:
        raise ValueError(f"the names of its features have more than {NAME_BYTES >> 20} MB")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of pyarrow that still runs when Python ends would abort the process
