"""The optimizers that accumulate gradients, with windows of bounded memory and kernels for the steps."""

from keyedopt.fused import optimizers, rowwise_adagrad
from keyedopt.fused.sparse.window import Window
from keyedopt.reference import accumulate

__all__ = [
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateAdamW",
    "AccumulateRowWiseAdagrad",
    "AccumulateSGD",
]


class AccumulateSGD(optimizers.SGD, accumulate.AccumulateSGD):
    """`SGD` over windows of backward passes; see `keyedopt.reference.AccumulateSGD`."""

    window_type = Window


class AccumulateAdagrad(optimizers.Adagrad, accumulate.AccumulateAdagrad):
    """`Adagrad` over windows of backward passes; see `keyedopt.reference.AccumulateAdagrad`."""

    window_type = Window


class AccumulateAdam(optimizers.Adam, accumulate.AccumulateAdam):
    """`Adam` over windows of backward passes; see `keyedopt.reference.AccumulateAdam`."""

    window_type = Window


class AccumulateRowWiseAdagrad(rowwise_adagrad.RowWiseAdagrad, accumulate.AccumulateRowWiseAdagrad):
    """`RowWiseAdagrad` over windows of backward passes; see `keyedopt.reference.AccumulateRowWiseAdagrad`."""

    window_type = Window


class AccumulateAdamW(optimizers.AdamW, accumulate.AccumulateAdamW):
    """`AdamW` over windows of backward passes; see `keyedopt.reference.AccumulateAdamW`."""

    window_type = Window
