# mypy: ignore-errors
"""The place of each of `LOOKUP_FIELDS` in the buffer of lookups, as constants of kernels."""

import triton.language as tl

from keyedopt.fused.backends.triton.layout import LOOKUP_FIELDS

PROGRAM = tl.constexpr(LOOKUP_FIELDS.index("program"))
POOL_PROGRAM = tl.constexpr(LOOKUP_FIELDS.index("pool_program"))
START = tl.constexpr(LOOKUP_FIELDS.index("start"))
COUNT = tl.constexpr(LOOKUP_FIELDS.index("count"))
BAGS = tl.constexpr(LOOKUP_FIELDS.index("bags"))
VALUES = tl.constexpr(LOOKUP_FIELDS.index("values"))
OFFSETS = tl.constexpr(LOOKUP_FIELDS.index("offsets"))
WEIGHTS = tl.constexpr(LOOKUP_FIELDS.index("weights"))
BASE = tl.constexpr(LOOKUP_FIELDS.index("base"))
MEAN = tl.constexpr(LOOKUP_FIELDS.index("mean"))
ROWS_AT = tl.constexpr(LOOKUP_FIELDS.index("rows"))
ORIGIN = tl.constexpr(LOOKUP_FIELDS.index("origin"))
