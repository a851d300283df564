"""The differences between libraries, as explicit options of the rules.

Each option is an enumeration whose values are strings. Optimizers accept the member or the string, and store
the string in their groups. A state dict has the index of the member, so the order of members never changes.
"""

import enum


class Decay(enum.Enum):
    """What weight decay does."""

    #: Nothing: `weight_decay` is ignored.
    NONE = "none"
    #: Add it to the gradient (g + weight_decay · w), so that it enters the state.
    L2 = "l2"
    #: Subtract lr · weight_decay · w from the weight, without effect on the state.
    DECOUPLED = "decoupled"


class EpsPlacement(enum.Enum):
    """Where eps is added in the denominator of Adam."""

    #: √v̂ + eps, after bias correction: Adam's paper, torch's Adam, FBGEMM's.
    INSIDE_DENOMINATOR = "inside_denominator"
    #: √v + eps, before bias correction, so that eps has more effect in the first steps: torch's SparseAdam.
    BEFORE_BIAS_CORRECTION = "before_bias_correction"


class BiasCorrection(enum.Enum):
    """Which steps count in the bias correction of a row."""

    #: All steps of the parameter.
    GLOBAL = "global"
    #: Steps in which the row had a gradient, so that the first steps of a rare row are corrected, too.
    PER_ROW = "per_row"


class Rows(enum.Enum):
    """Which rows of a parameter a step updates; other rows keep the bits of weight and state."""

    #: The rows in the gradient: all rows of a dense gradient, the listed rows of a sparse gradient.
    GIVEN = "given"
    #: All rows; a row that a sparse gradient does not list has a gradient of zero.
    ALL = "all"
    #: The rows with a nonzero element in their gradient.
    NONZERO = "nonzero"
