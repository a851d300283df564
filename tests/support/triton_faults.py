"""Faults to plant in kernels and in their PTX, so that the executor is tested itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: says what is wrong.
        where: "module.function" of the source, or the name of the kernel for PTX.
        old: the text that is replaced, or the expression in PTX.
        new: what it is replaced by.
        cases: of the interpreter tests that reach it.
        which: of the places where `old` is, from 0.
        ptx: whether PTX is changed.
        hidden: why nothing shows, or "".
    """

    name: str
    where: str
    old: str
    new: str
    cases: tuple[str, ...] = ("step-rowwise-float32",)
    which: int = 0
    ptx: bool = False
    hidden: str = ""


SORT = ("sort-two_digits",)
TILES = ("sort-all_the_same",)
COUNTED = ("width-1000-counted",)
WIDE = ("width-1000",)  # a program has several warps
BARRIER = r"^\s*bar\.sync.*$"

FAULTS = (
    # --- the sort
    Fault(
        "no barrier before the scratch is reused",
        "radix.put_in_order",
        "tl.debug_barrier()",
        "pass",
        SORT,
        hidden="`ranks` exchanges sums in shared memory, so another barrier follows in the compiled kernel",
    ),
    Fault(
        "no barrier before the sorted tile is read",
        "radix.put_in_order",
        "tl.debug_barrier()",
        "pass",
        SORT,
        1,
    ),
    Fault("no barrier before places are read", "radix.radix_pass", "tl.debug_barrier()", "pass", SORT),
    Fault(
        "no barrier before the next tile",
        "radix.radix_pass",
        "        tl.debug_barrier()\n        tile =",
        "        tile =",
        SORT,
        hidden="the ticket is handed out in shared memory, so another barrier follows in the compiled kernel",
    ),
    Fault(
        "the count of a tile is published by a store",
        "radix.radix_pass",
        'tl.atomic_xchg(mine, (counts << 3) | (alone + (tile == 0).to(tl.int32)), mask=real, sem="relaxed")',
        "tl.store(mine, (counts << 3) | (alone + (tile == 0).to(tl.int32)), mask=real)",
        SORT,
    ),
    Fault(
        "the sum of the tiles is published by a store",
        "radix.radix_pass",
        'tl.atomic_xchg(mine, ((earlier + counts) << 3) | (alone + 1), mask=real, sem="relaxed")',
        "tl.store(mine, ((earlier + counts) << 3) | (alone + 1), mask=real)",
        TILES,
    ),
    Fault("the statuses of two passes are the same", "radix.look_back", "known >= alone", "known >= 1", SORT),
    Fault("the look-back reads without volatile", "radix.look_back", ", volatile=True", "", SORT),
    Fault(
        "tiles are taken in the order of programs",
        "radix.radix_pass",
        'tl.atomic_add(ticket, 1, sem="relaxed")',
        "tl.program_id(0)",
        SORT,
    ),
    Fault(
        "the look-back begins with its own tile",
        "radix.look_back",
        "total + (tile - 1)",
        "total + tile",
        SORT,
    ),
    Fault("keys are read without a mask", "radix.radix_pass", "mask=live, other=0", "", SORT),
    Fault(
        "one element too many at the end of a tile",
        "radix.radix_pass",
        "live = element < count",
        "live = element <= count",
        SORT,
    ),
    Fault(
        "padding is counted", "radix.radix_pass", "mask=live & (digit != after)", "mask=digit != after", SORT
    ),
    Fault(
        "padding is not the last digit",
        "radix.radix_pass",
        "tl.where(live, (key >> low) & (bins_ - 1), bins_ - 1)",
        "(key >> low) & (bins_ - 1)",
        SORT,
    ),
    Fault(
        "ranks begin with 1",
        "radix.ranks",
        "before = tl.cumsum(ones, 0) - ones",
        "before = tl.cumsum(ones, 0)",
        SORT,
    ),
    Fault(
        "digits of the last tile remain",
        "radix.radix_pass",
        "tl.store(firsts + bins, bins * 0, mask=real)",
        "pass",
        SORT,
    ),
    Fault(
        "ends of the last tile remain",
        "radix.radix_pass",
        "tl.store(ends + bins, bins * 0, mask=real)",
        "pass",
        SORT,
    ),
    Fault(
        "a race on the histogram",
        "sort.write_keys",
        'tl.atomic_add(totals + one * bins + tl.arange(0, bins), counts, mask=counts > 0, sem="relaxed")',
        "tl.store(totals + one * bins + tl.arange(0, bins), counts + "
        "tl.load(totals + one * bins + tl.arange(0, bins)), mask=counts > 0)",
        SORT,
    ),
    Fault("the status is not cleared", "sort.write_keys", "mask=word < clear", "mask=word < 0", TILES),
    Fault(
        "values are read without a mask",
        "sort.write_keys",
        "tl.load(values + index, mask=live, other=0)",
        "tl.load(values + index)",
        SORT,
    ),
    # --- runs
    Fault("the last block ends too late", "sort.find_runs", "tl.minimum(begin + BLOCK, n)", "begin + BLOCK"),
    Fault("every position begins a run", "sort.find_runs", "live & (key != before)", "live & (key >= 0)"),
    Fault("begins of runs collide", "sort.find_runs", "begin + rank,", "begin + rank // 2,"),
    # --- pooling
    Fault(
        "columns are read without a mask",
        "forward.pool",
        "mask=more[:, None] & inside, other=0.0",
        "mask=more[:, None], other=0.0",
        ("every_row",),
    ),
    Fault(
        "outputs have the stride of the tile",
        "forward.pool",
        "(top * stride + tl.arange(0, ROWS) * stride)[:, None]",
        "(top * WIDTH + tl.arange(0, ROWS) * WIDTH)[:, None]",
        ("pooling-sum",),
    ),
    Fault(
        "bags after the last are written",
        "forward.pool",
        "mask=live[:, None] & inside",
        "mask=inside",
        ("pooling-sum",),
    ),
    Fault("invalid rows are read", "forward.pool", "more &= bad == 0", "more &= bad < 2", ("invalid",)),
    # --- sums and update
    Fault("one position too many in a run", "reduce.sum_in_block", "one < number,", "one <= number,"),
    Fault(
        "one position too many after a block",
        "reduce.sum_positions",
        "at < length",
        "at <= length",
        ("runs-chunks",),
    ),
    Fault(
        "the ends of a long run are dropped",
        "reduce.sum_runs",
        "tl.where(mine, (",
        "tl.where(mine & (number == 0), (",
        ("runs-chunks",),
    ),
    Fault(
        "a run that begins with a chunk counts the chunk twice",
        "reduce.runs_in_block",
        "& ~(whole & (start == 0))",
        "",
        ("runs-chunks",),
    ),
    Fault(
        "every run of a tile gets the rest of the last",
        "reduce.sum_runs",
        "index == runs - 1",
        "index >= 0",
        ("runs-hot_between",),
    ),
    Fault(
        "the end of a long run is read before its chunks",
        "reduce.sum_positions",
        "tl.where(at < head, 0, gap - head)",
        "0",
        ("runs-chunks",),
    ),
    Fault(
        "sums of chunks overlap", "chunks.store_sums", "row * (2 * WIDTH)", "row * 2", ("runs-hot_between",)
    ),
    Fault(
        "folds end after their run",
        "chunks.fold_chunks",
        "chunk + FOLD",
        "chunk",
        ("runs-hot_between",),
        hidden="a fold that does not lie in one run is not read",
    ),
    Fault(
        "a fold is read one chunk too early",
        "reduce.add_chunks",
        "beyond >= 0) & (beyond",
        "beyond >= -1) & (beyond",
        ("runs-hot_between",),
    ),
    Fault("runs of the next block are summed", "reduce.runs_in_block", "run + 1 < runs", "run < runs"),
    Fault(
        "columns are written without a mask",
        "update.update",
        "tl.store(weight, round_to_nearest(w, WEIGHT), mask=inside)",
        "tl.store(weight, round_to_nearest(w, WEIGHT), mask=width[:, None] > 0)",
    ),
    Fault("rows are written without a mask", "update.update", "live = key >= 0", "live = run >= 0"),
    Fault(
        "states of a tile get into the next one",
        "update.store_state",
        "(behind < rows)",
        "(behind <= rows)",
    ),
    Fault(
        "the counter is written before all read it",
        "update.update",
        "tl.debug_barrier()",
        "tl.zeros((1,), tl.int32)",
        COUNTED,
    ),
    Fault("a table begins one row later", "arithmetic.column_of", "position >= begins", "position > begins"),
    Fault(
        "an invalid row sets no flag",
        "error_flag.set_flag",
        'tl.atomic_or(flag, BIT, sem="relaxed")',
        "pass",
        ("invalid",),
    ),
    Fault(
        "the flag is read by each warp",
        "error_flag.no_error",
        "tl.max(tl.load(flag + tl.zeros((SIZE,), tl.int32)), 0) == 0",
        "tl.load(flag) == 0",
        hidden="another stream must set the flag meanwhile; the executor runs one launch at a time. "
        "tests/fused/test_triton_compiled.py looks at the instructions instead",
    ),
    # --- PTX
    *(
        Fault(f"barrier {which} of {kernel} is removed", kernel, BARRIER, "", SORT, which, ptx=True)
        for kernel, which in (("radix_pass", 6), ("radix_pass", 30), ("radix_pass", -1), ("write_keys", -1))
    ),
    Fault("the first barrier of the update is removed", "update", BARRIER, "", ptx=True),
    Fault("a barrier of the sums of chunks is removed", "sum_chunks", BARRIER, "", WIDE, ptx=True),
    Fault(
        "a barrier is met by one warp only",
        "radix_pass",
        r"(mov\.u32\s+(%r\d+), %tid\.x;[\s\S]*?)^\s*bar\.sync.*$",
        r"\1setp.lt.u32 %p1, \2, 32;\n@%p1 bar.sync 0;",
        SORT,
        ptx=True,
    ),
    Fault(
        "an atomic exchange becomes a store",
        "radix_pass",
        r"atom\.global\.gpu\.relaxed\.exch\.b32 (%r\d+), \[ (%rd\d+) \+ 0 \], (%r\d+);",
        r"st.global.b32 [ \2 + 0 ], \3;",
        SORT,
        ptx=True,
    ),
    Fault(
        "an atomic addition becomes a load and a store",
        "write_keys",
        r"(@%p\d+) atom\.global\.gpu\.relaxed\.add\.u32 (%r\d+), \[ (%rd\d+) \+ 0 \], (%r\d+);",
        r"\1 ld.global.b32 \2, [ \3 + 0 ];\n\1 add.s32 \2, \2, \4;\n\1 st.global.b32 [ \3 + 0 ], \2;",
        SORT,
        ptx=True,
    ),
    Fault(
        "the ticket becomes a load and a store",
        "radix_pass",
        r"(@%p\d+) atom\.global\.gpu\.relaxed\.add\.u32 (%r\d+), \[ (%rd\d+) \+ 0 \], (%r\d+);",
        r"\1 ld.global.b32 \2, [ \3 + 0 ];\n\1 st.global.b32 [ \3 + 0 ], \4;",
        SORT,
        ptx=True,
    ),
    Fault(
        "an atomic in shared memory becomes a store",
        "write_keys",
        r"atom\.shared\.add\.u32\s+(%r\d+), \[(%r\d+)\], (%r\d+);",
        r"st.shared.b32 [\2], \3;",
        SORT,
        ptx=True,
    ),
    Fault(
        "a volatile load becomes plain", "radix_pass", r"ld\.volatile\.global", "ld.global", SORT, ptx=True
    ),
    Fault(
        "a store is executed by every replica of a thread",
        "radix_pass",
        r"@%p\d+ (st\.shared\.b32.*)",
        r"\1",
        SORT,
        1,
        ptx=True,
    ),
    Fault("a mask of a load is dropped", "radix_pass", r"@%p\d+ (ld\.global\.b32)", r"\1", SORT, ptx=True),
    Fault(
        "a shuffle is of half a warp",
        "radix_pass",
        r"(shfl\.sync\.up\.b32.*), -1;",
        r"\1, 65535;",
        SORT,
        ptx=True,
    ),
    Fault(
        "a shuffle reads another lane",
        "update",
        r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 1,",
        r"\1, 2,",
        which=2,
        ptx=True,
    ),
    Fault(
        "a vector is loaded 4 bytes further",
        "update",
        r"(ld\.global\.v4\.b32[^\[]*\[ %rd\d+ \+ )0",
        r"\g<1>4",
        ("width-8",),
        ptx=True,
    ),
    Fault(
        "shared memory is read beyond its end",
        "radix_pass",
        r"ld\.shared\.b32\s+(%r\d+), \[global_smem\]",
        r"ld.shared.b32 \1, [global_smem+65536]",
        SORT,
        ptx=True,
    ),
    Fault(
        "a warp leaves before the barrier",
        "radix_pass",
        BARRIER,
        r"@%p1 ret;\nbar.sync 0;",
        SORT,
        4,
        ptx=True,
    ),
    Fault(
        "the look-back never ends",
        "radix_pass",
        r"(@%p\d+ )?ld\.volatile\.global\.b32 \{ (%r\d+) \}.*",
        r"mov.b32 \2, 0;",
        SORT,
        ptx=True,
    ),
    Fault(
        "a key of a packed input begins one value early",
        "unpack.unpack",
        "tl.store(at + ORIGIN * LOOKUPS, begin)",
        "tl.store(at + ORIGIN * LOOKUPS, begin - 1)",
        ("packed",),
    ),
    Fault(
        "keys of a packed input are taken in the order of the outputs",
        "unpack.unpack",
        "key = tl.load(fixed + column)",
        "key = column.to(tl.int64)",
        ("packed",),
    ),
    Fault(
        "the end of a packed input is not checked",
        "unpack.unpack",
        "(key == used - 1) & (end != n)",
        "(key == used) & (end != n)",
        ("packed_module",),
    ),
)
