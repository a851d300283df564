"""The optimizers that accumulate gradients, with windows of bounded memory and kernels for the steps."""

from keyedopt.fused import optimizers
from keyedopt.fused.sparse.window import Window
from keyedopt.reference import accumulate

__all__ = ["AccumulateAdagrad", "AccumulateAdam", "AccumulateSGD"]


class AccumulateSGD(optimizers.SGD, accumulate.AccumulateSGD):
    """`SGD` over windows of backward passes; see `keyedopt.reference.AccumulateSGD`."""

    window_type = Window


class AccumulateAdagrad(optimizers.Adagrad, accumulate.AccumulateAdagrad):
    """`Adagrad` over windows of backward passes; see `keyedopt.reference.AccumulateAdagrad`."""

    window_type = Window


class AccumulateAdam(optimizers.Adam, accumulate.AccumulateAdam):
    """`Adam` over windows of backward passes; see `keyedopt.reference.AccumulateAdam`."""

    window_type = Window
