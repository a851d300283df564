"""Kernels in Triton, for CUDA.

===============  ========================================================================================
file             contents
===============  ========================================================================================
`backend`        the methods of the interface, over groups of tables
`groups`         which tables go into one launch
`prepare`        keys, sort and runs, which need no gradients; `lookup_batch`, `sort_passes`: their launches
`launch`         arguments, grids and constants of the kernels; `grads`: of gradients
`layout`         the layout of argument buffers; `device_buffers` copies them to the device
`runs_check`     compares the sort with torch's, for the self-check
`shapes`         how much a program does at a time
`sort`           kernels: keys of lookups; runs of sorted keys
`radix`          kernel: a pass of the sort
`error_flag`     device functions: the error flag; `device_flags`: its host side
`forward`        kernel: pooling
`reduce`         device functions: sums of short runs, side by side
`chunks`         kernels: sums of long runs
`collect`        kernel: writes these sums
`rules`          device functions: the algorithms
`update`         kernel: sum, rule, write
`dense`          kernel: updates dense parameters; `dense_launch`: its launch
===============  ========================================================================================
"""

from keyedopt.fused.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
