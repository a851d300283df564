"""How the host tells the kernels where everything is: rows of int64 words, a column for each table or lookup.

A kernel gets one tensor of tables and one of lookups, whatever their number, so one launch does for all of
them. A column is a table or a lookup; there are a power of two of columns, those too many hold `NEVER`.
"""

#: Where a column that is none begins: after every row and every position.
NEVER = 2**62

#: Rows of the words of tables: first linear row, width in units, addresses of weight, states and counter.
TABLE_WORDS = ("base", "units", "weight", "first", "second", "counter")

#: Rows of the words of lookups: first program, first position, number of values, number of bags, addresses of
#: values, offsets (0 without pooling) and weights (0 for none), first linear row of the table, mean or not,
#: number of rows of the table.
LOOKUP_WORDS = ("program", "start", "count", "bags", "values", "offsets", "weights", "base", "mean", "rows")

#: Rows of the words of gradients, or outputs, of lookups: address, and stride of a row in units.
GRAD_WORDS = ("address", "stride")

#: Rows of the words of a step: numbers as float64, but for the seed.
STEP_WORDS = (
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
