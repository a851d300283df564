"""Own kernels, in Triton, for CUDA.

==============  =========================================================================================
file            what it has
==============  =========================================================================================
`backend`       the methods of the interface, over groups of tables
`groups`        which tables go into one launch
`prepare`       keys, sort and runs, which need no gradients; `calls`, `sorting`: their launches
`launch`        arguments, grids and constants of the kernels; `grads` those of gradients
`layout`        the words by which the host tells kernels where everything is; `words` puts them there
`shapes`        how much a program does at a time
`sort`          kernels: keys of lookups; runs of sorted keys
`radix`         kernel: a pass of the sort
`alarm`         device function: bad lookups are seen; `alarms` tells the host
`forward`       kernel: pooling
`reduce`        device functions: sums of short runs, side by side
`chunks`        kernels: sums of long runs
`collect`       kernel: these sums, written down
`rules`         device functions: the algorithms
`update`        kernel: sum, rule, write
`compile_ahead` compiles every kernel without a GPU, and what its registers and accesses may be
==============  =========================================================================================
"""

from keyedopt.fused.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
