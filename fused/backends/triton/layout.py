"""The layout of argument buffers of kernels: int64 rows, a column for each table or lookup.

A kernel gets one buffer of tables and one of lookups, so one launch does any number of them. The number of
columns is a power of two; columns without a table or lookup hold `NEVER`.
"""

#: The begin of an unused column: after every row and every position.
NEVER = 2**62

#: Rows of a buffer of tables: first linear row, width in units, addresses of weight, states and counter.
TABLE_FIELDS = ("base", "units", "weight", "first", "second", "counter")

#: Rows of a buffer of lookups: first program, first position, number of values, number of bags, addresses of
#: values, offsets (0 without pooling) and weights (0 for none), first linear row of the table, mean or not,
#: number of rows of the table, the first offset, at which the values and weights of the lookup begin, and the
#: first program of `forward.pool`.
LOOKUP_FIELDS = (
    *("program", "start", "count", "bags", "values", "offsets", "weights", "base", "mean", "rows"),
    *("origin", "pool_program"),
)

#: Rows of a buffer of packed lookups, which never changes: key, and three that are also `LOOKUP_FIELDS`.
PACKED_FIELDS = ("key", "base", "mean", "rows")

#: Rows of a buffer of gradients or outputs: address, and stride of a row in units.
GRAD_FIELDS = ("address", "stride")

#: Rows of a buffer of dense parameters: first program, number of elements, addresses of weight, gradient,
#: states and step count.
DENSE_FIELDS = ("program", "size", "weight", "grad", "first", "second", "count")

#: Rows of the buffer of a step: the bits of float64 numbers; the seed is an integer.
STEP_FIELDS = (
    "lr",
    "count",
    "eps",
    "beta1",
    "beta2",
    "rest1",  # 1 − β₁, rounded once
    "rest2",
    "log1",  # ln β₁
    "log2",
    "weight_decay",
    "momentum",
    "undamped",  # 1 − dampening
    "eta",
    "lr_decay",
    "max_norm",
    "first",
    "nesterov",
    "seed",
)
