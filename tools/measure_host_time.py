"""Measure the host time of a training step of tables on CUDA without a GPU, beside FBGEMM's.

``python -m keyedopt.tools.measure_host_time`` prints microseconds of CPU time of a forward and backward pass
in Python and in the dispatcher, and the ratio to FBGEMM's module of all tables, measured in turn in one
process. keyedopt's kernels are compiled for H100 and launched by a driver that runs nothing. FBGEMM's
operators for CPUs get bags without values, so that they compute next to nothing. Left out on both sides: the
allocator of CUDA, streams, events and the launches themselves; of FBGEMM also what its operators for CUDA do
on the host; of keyedopt the copy of the error flag, for which CUDA needs an event.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from unittest.mock import patch

import torch

from keyedopt import fused, ptx
from keyedopt.fused.backends.triton import backend, device_flags

ROWS, WIDTH, BAGS, RATE = 1000, 16, 16, 0.1
#: Values of a bag in two inputs that alternate: sizes vary in training.
LENGTHS = (1, 2)

#: Steps between two readings of the clock, which take as long as a part of a step.
STEPS = 20

Forward = Callable[[int], torch.Tensor]


def seconds(forward: Forward, steps: int = STEPS) -> tuple[float, float]:
    """Return the CPU time of a forward pass, and of a forward and a backward pass."""
    grads = [torch.ones_like(forward(0))]
    begin = time.thread_time()
    for number in range(steps):
        forward(number)
    middle = time.thread_time()
    for number in range(steps):
        torch.autograd.backward([forward(number)], grads)
    return (middle - begin) / steps, (time.thread_time() - middle) / steps


def of_keyedopt(tables: int) -> Forward:
    """Return the forward pass of a module of this many tables, with inputs of several sizes."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    keys = [f"feature{number}" for number in range(tables)]
    configs = [
        fused.EmbeddingBagConfig(ROWS, WIDTH, f"table{number}", feature_names=[key])
        for number, key in enumerate(keys)
    ]
    module = fused.EmbeddingBagCollection(configs, fused.RowWiseAdagrad, {"lr": RATE}, backend="triton")
    inputs = []
    for length in LENGTHS:
        offsets = torch.arange(tables * BAGS + 1) * length
        values = torch.zeros(tables * BAGS * length, dtype=torch.int64)
        inputs.append(KeyedJaggedTensor(keys, values, offsets=offsets, stride=BAGS))
    return lambda number: module(inputs[number % len(inputs)]).values()


def of_fbgemm(tables: int) -> Forward:
    """Return the forward pass of FBGEMM's module of this many tables."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * tables,
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=RATE,
    )
    values, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(tables * BAGS + 1, dtype=torch.int64)
    return lambda number: module(values, offsets)


def measure(tables: int, rounds: int) -> tuple[list[float], list[float], float, int]:
    """Return microseconds of a forward pass and of a step, of both; their ratio; and launches of keyedopt.

    The ratio is the median over rounds, because the speed of a machine changes between rounds.
    """
    with (
        patch.object(backend, "interpreted", lambda: True),
        patch.object(device_flags, "send_flag", lambda _: None),
        ptx.idle() as launched,
    ):
        both = [of_keyedopt(tables), of_fbgemm(tables)]
        for forward in both:
            seconds(forward)
        launched.clear()
        torch.autograd.backward([one := both[0](0)], [torch.ones_like(one)])
        launches = len(launched)
        times = [[seconds(forward) for forward in both] for _ in range(rounds)]
    mine, other = (
        [1e6 * statistics.median(one[part] for one in each) for part in (0, 1)]
        for each in zip(*times, strict=True)
    )
    ratio = statistics.median(one[1] / two[1] for one, two in times)
    return mine, other, ratio, launches


def main() -> None:
    """Print a line for each number of tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=int, nargs="*", default=[8, 26, 500])
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("tables  keyedopt: forward  step  launches   FBGEMM: forward  step   ratio of steps")
    for tables in given.tables:
        mine, other, ratio, launches = measure(tables, given.rounds)
        print(
            f"{tables:6} {mine[0]:18.0f} {mine[1]:5.0f} {launches:9} {other[0]:17.0f} {other[1]:5.0f} "
            f"{ratio:16.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
