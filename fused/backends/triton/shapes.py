"""The amount of work of a program, by the width of the rows."""

from dataclasses import dataclass, replace

#: The widest supported row: a program has a row, its state and its gradient in registers.
WIDEST = 4096


@dataclass(frozen=True)
class Shape:
    """The shape of the tile of a program.

    Args:
        width: of the tile, a power of two not below the width of the rows.
        rows: of the tile.
        warps: that share it.
        unroll: how many loads of a row are in flight where many rows are summed: in bags and in chunks.
        registers: the most registers of a thread; tests check that nothing is spilled. With 4 elements a
            thread, 64 registers allow 32 warps on a multiprocessor with 65536 registers, so 32 · 32 · 16
            bytes · `unroll` of gradients are in flight. With 8 elements, 128 registers allow 16 warps, each
            with twice as many bytes in flight.
    """

    width: int
    rows: int
    warps: int
    unroll: int
    registers: int


@dataclass(frozen=True)
class Tuning:
    """Sizes that are the same for all widths; tests use smaller ones.

    Args:
        block: most positions whose runs one program of the update does, at most 256.
        tiles: most tiles of rows that one program of the update does: wide rows have smaller blocks.
        chunk: positions that a group of threads sums at a time, a power of two; runs of twice as many, or
            more, are divided among groups.
        fold: the sums of 2 ** fold chunks are added before the update.
        values: lookups for which one program writes keys.
        probes: positions that are compared at once in the search for the end of a run.
        tile: keys that a program sorts at a time, a power of two from 32 to 1024.
        digit: most bits of a pass of the sort, unless more than three passes would be needed.
    """

    block: int = 32
    tiles: int = 16
    chunk: int = 32
    fold: int = 5
    values: int = 1024
    probes: int = 32
    tile: int = 1024
    digit: int = 8

    def __post_init__(self) -> None:
        if self.block > 256:  # where a run begins in its block is one byte
            raise ValueError(f"block must be at most 256, and is {self.block}")
        if not 32 <= self.tile <= 1024:  # a program of `radix` has counts of 11 bits
            raise ValueError(f"tile must be from 32 to 1024, and is {self.tile}")

    def for_shape(self, shape: Shape) -> "Tuning":
        """Return the sizes for a tile: at most `tiles` of them in a block, and blocks that divide chunks.

        >>> Tuning().for_shape(shape_for(512)).block
        16
        """
        block = max(shape.rows, min(self.block, self.tiles * shape.rows))
        return replace(self, block=block, chunk=max(self.chunk, block))

    def chunk_for(self, count: int, width: int) -> int:
        """Return the length of a chunk: longer if the sums of all chunks would take more than 32 MiB.

        >>> Tuning().chunk_for(327_680, 64), Tuning().chunk_for(5_242_880, 64)
        (32, 128)
        """
        chunk = self.chunk
        while count // chunk * width > 1 << 22:
            chunk *= 2
        return chunk


def shape_for(width: int, size: int = 4, aligned: bool = True) -> Shape:
    """Return the tile for rows of this width: 16 bytes of the weight a thread.

    A program has one warp unless a row needs more: all rows of a tile wait for the longest of their runs.

    Args:
        width: of the widest row.
        size: of an element of the weight, in bytes.
        aligned: whether rows can be read 16 bytes at a time; if not, each element needs its own address.

    >>> shape_for(64)
    Shape(width=64, rows=2, warps=1, unroll=4, registers=64)
    >>> shape_for(1000, 2)
    Shape(width=1024, rows=1, warps=4, unroll=4, registers=128)
    """
    padded = max(4, 1 << (width - 1).bit_length())
    each = 16 // size
    rows = min(max(1, 32 * each // padded), 64)
    warps = max(1, min(16, rows * padded // (32 * each)))
    registers = 64 if rows * padded <= 128 * warps else 128
    if not aligned:
        registers = min(2 * registers, 248, 65536 // (32 * warps))
    return Shape(padded, rows, warps, 4 if rows * padded <= 2048 else 2, registers)
