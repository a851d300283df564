"""Tables as the views see them."""

from typing import Any

#: A table whose columns `keyedopt.reports.tables.COLUMNS` documents. For pandas' stubs a cell is a union of
#: all that a cell of any table may be, which says less than that documentation.
Frame = Any
