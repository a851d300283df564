"""The reference, and torch's own optimizers, where torch has no fused Adagrad, as torch 2.11 on CUDA."""

import sys

import torch

from keyedopt.conformance.targets.implementation import Implementation


def _refuse(param: torch.Tensor) -> None:
    raise RuntimeError(f"`fused=True` requires supported devices, but {param.device.type}")


sys.modules["torch.optim.adagrad"]._device_dtype_check_for_fused = _refuse

REFERENCE = Implementation(name="without-kernels", root="keyedopt.reference", areas=("keyed", "clipping"))
TORCH = Implementation(
    name="torch-without-kernels",
    root="torch.optim",
    areas=("algorithms",),
    absent=("RowWiseAdagrad", "PartialRowWise*", "LAMB", "LarsSGD", "Ftrl", "*.decay", "*.rows", "*.sparse"),
)
