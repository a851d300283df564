"""The algorithms: one pure function each, in the order of its equations.

The arguments of a rule are the weight, its gradient (each row once, duplicates summed) and its state. The
result is new tensors. The dense, sparse and in-backward optimizers and the embedding modules call these
rules.
"""

from keyedopt.reference.rules.adagrad import adagrad
from keyedopt.reference.rules.adam import adam
from keyedopt.reference.rules.ftrl import ftrl
from keyedopt.reference.rules.lamb import lamb
from keyedopt.reference.rules.lars_sgd import lars_sgd
from keyedopt.reference.rules.options import BiasCorrection, Decay, EpsPlacement, Rows
from keyedopt.reference.rules.partial_rowwise_adam import partial_rowwise_adam
from keyedopt.reference.rules.partial_rowwise_lamb import partial_rowwise_lamb
from keyedopt.reference.rules.rows import check_rows, coalesce, update_rows
from keyedopt.reference.rules.rowwise_adagrad import rowwise_adagrad
from keyedopt.reference.rules.sgd import sgd
from keyedopt.reference.rules.sparse_adam import sparse_adam

__all__ = [
    "BiasCorrection",
    "Decay",
    "EpsPlacement",
    "Rows",
    "adagrad",
    "adam",
    "check_rows",
    "coalesce",
    "ftrl",
    "lamb",
    "lars_sgd",
    "partial_rowwise_adam",
    "partial_rowwise_lamb",
    "rowwise_adagrad",
    "sgd",
    "sparse_adam",
    "update_rows",
]
