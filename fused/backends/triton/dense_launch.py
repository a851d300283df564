"""The launch of `dense.update_dense`: one for all parameters of a device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.backends.memory import address
from keyedopt.fused.backends.triton.dense import update_dense
from keyedopt.fused.backends.triton.device_buffers import (
    alignment,
    columns_for,
    known_on_device,
    pack_rows,
    step_buffer,
    to_device,
)
from keyedopt.fused.backends.triton.groups import blocks
from keyedopt.fused.backends.triton.launcher import start
from keyedopt.fused.backends.triton.layout import STEP_FIELDS

#: Elements that a program updates: 8 a thread, so that two loads of 16 bytes of each tensor are in flight.
BLOCK, WARPS = 1024, 4
#: Registers of a thread, for 7 programs on a multiprocessor. Unaligned elements need an address each, so a
#: thread has more.
REGISTERS, MORE_REGISTERS = 72, 128
#: The least number of columns: kernels are compiled for each power of two from here.
LEAST_COLUMNS = 64
LR = STEP_FIELDS.index("lr")
COUNTS = {torch.float32: tl.float32, torch.float64: tl.float64}


class Dense(NamedTuple):
    """Dense parameters of one device.

    Args:
        params, grads: float32, each pair with the same strides and without gaps.
        states: a list of tensors, as the parameters, for each state.
        counts: the step counts after this step, on the device, all of one dtype of `COUNTS`; empty if the
            algorithm has none.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    counts: Sequence[Tensor]


class Launch(NamedTuple):
    """A launch of the kernel.

    Args:
        dense: the parameters; memory of these tensors must not be reused before the launch.
        programs: their number.
        rows: of `DENSE_FIELDS`.
        tensors: the step, its learning rate, and the divisor of gradients or any tensor.
        constants: of the kernel.
        key: determines the compiled code.
    """

    dense: Dense
    programs: int
    rows: tuple[tuple[int, ...], ...]
    tensors: tuple[Tensor, Tensor, Tensor]
    constants: dict[str, Any]
    key: tuple[Any, ...]


def prepare(step: Step, dense: Dense, scale: Tensor | None = None, columns: int = LEAST_COLUMNS) -> Launch:
    """Return the launch that updates parameters. Copies the step to the current stream of the device.

    Args:
        step: the formula; its learning rate is a number, or a tensor on the device.
        dense: the parameters.
        scale: the divisor of all gradients, one float32 on the device; None for 1.
        columns: the least number of columns, a power of two.
    """
    device, count = dense.params[0].device, len(dense.params)
    sizes = [param.numel() for param in dense.params]
    begins = blocks(sizes, BLOCK)
    listed = [[address(one) for one in each] for each in (dense.params, dense.grads, *dense.states)]
    none = [0] * count
    counts = [one.data_ptr() for one in dense.counts] or none
    rows = (begins[:-1], sizes, *listed, *[none] * (2 - len(dense.states)), counts)
    buffer = to_device(step_buffer(step, device), device)
    lr = step.lr.detach() if isinstance(step.lr, Tensor) else buffer[LR:].view(torch.float64)
    divisor = buffer if scale is None else scale
    constants = {
        "COLUMNS": max(columns, columns_for(count)),
        "ALIGN": alignment([at for each in listed for at in each if at], 16),
        "COUNT": COUNTS[dense.counts[0].dtype if dense.counts else torch.float64],
        "SCALED": scale is not None,
        "ALGORITHM": step.algorithm,
        "STATES": len(dense.states),
        "DECAY": step.decay if step.weight_decay else "none",
        "BEFORE": step.eps_placement == "before_bias_correction",
        "MAXIMIZE": step.maximize,
    }
    key = (*constants.values(), lr.dtype, lr.data_ptr() & 15, divisor.data_ptr() & 15)
    return Launch(dense, begins[-1], tuple(map(tuple, rows)), (buffer, lr, divisor), constants, key)


def run(launch: Launch) -> None:
    """Launch the kernel in the current stream; without elements do nothing."""
    if not launch.programs:
        return
    columns = launch.constants["COLUMNS"]
    rows = known_on_device(
        (columns, launch.rows), launch.dense.params[0].device, lambda: pack_rows(launch.rows, least=columns)
    )
    start(
        update_dense,
        launch.programs,
        (rows, *launch.tensors),
        (),
        launch.key,
        lambda: {
            **launch.constants,
            "BLOCK": BLOCK,
            "num_warps": WARPS,
            "maxnreg": REGISTERS if launch.constants["ALIGN"] == 16 else MORE_REGISTERS,
        },
    )
