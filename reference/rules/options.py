"""The differences between libraries that matter, as explicit arguments of the rules.

Each is an enumeration whose members have strings as values, so that a string serves as well: optimizers
keep the string in their groups, which makes a checkpoint loadable without this package.
"""

import enum


class Decay(enum.Enum):
    """What weight decay does."""

    #: Nothing: a given `weight_decay` is ignored.
    NONE = "none"
    #: It is added to the gradient (g + weight_decay · w), and so enters the state.
    L2 = "l2"
    #: It shrinks the weight by lr · weight_decay · w, beside the step and outside the state.
    DECOUPLED = "decoupled"


class EpsPlacement(enum.Enum):
    """Where eps stands in Adam's denominator."""

    #: √v̂ + eps, after bias correction: Adam's paper, torch's Adam, FBGEMM's.
    INSIDE_DENOMINATOR = "inside_denominator"
    #: √v + eps, before bias correction, so that eps counts for more at first: torch's SparseAdam.
    BEFORE_BIAS_CORRECTION = "before_bias_correction"


class BiasCorrection(enum.Enum):
    """Which steps count in the bias correction of a row."""

    #: All steps of the parameter.
    GLOBAL = "global"
    #: Those in which the row had a gradient, so that a rare row's first steps are corrected as such.
    PER_ROW = "per_row"


class Rows(enum.Enum):
    """Which rows of a parameter a step updates; the others keep weight and state, bit by bit."""

    #: Those in the gradient: all of a dense one, the listed ones of a sparse one.
    GIVEN = "given"
    #: All of them; a row that a sparse gradient does not list has a gradient of zero.
    ALL = "all"
    #: Those whose gradient is not all zero.
    NONZERO = "nonzero"
