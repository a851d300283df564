"""Measure the Triton kernels of a training step without a GPU, for `keyedopt.benchmarks.gpu.model`.

``python -m keyedopt.tools.measure_kernels`` compiles the kernels for H100 with the arguments of the launcher,
runs them in `keyedopt.ptx` on small batches of the model's workloads, and writes
`benchmarks/gpu/kernels.json`.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch
import triton

from keyedopt import ptx
from keyedopt.benchmarks.gpu import model
from keyedopt.benchmarks.workloads import Lookups
from keyedopt.fused.backends.interface import Lookup, Step, Table
from keyedopt.fused.backends.triton import TritonBackend, backend, sort_passes
from keyedopt.fused.backends.triton.shapes import shape_for
from keyedopt.tools.compile_ahead import compiled

ARCHITECTURE = 90
#: Lookups of a small batch, at most, unless a bag of each table has more.
LOOKUPS = 8192


@dataclass(frozen=True)
class Measured:
    """The work and the resources of one launch.

    Args:
        kernel: its name.
        programs, warps, registers: of the launch, of a program, of a thread.
        instructions: of all warps, in PTX.
        read, written, atomics: see `keyedopt.ptx.Report`.
    """

    kernel: str
    programs: int
    warps: int
    registers: int
    instructions: int
    read: int
    written: int
    atomics: int


def small(work: Lookups) -> Lookups:
    """Return the workload with fewer bags, and with as many lookups of a row."""
    per_bag = sum(work.lengths)
    batch = max(1, min(work.batch, LOOKUPS // per_bag))
    heights = tuple(max(8, height * batch // work.batch) for height in work.heights)
    return replace(work, batch=batch, rows=heights)


def measure(work: Lookups) -> list[Measured]:
    """Return the launches of the backward pass of a small batch: sort, sums and update."""
    work = small(work)
    tables = [Table(torch.zeros(rows, work.dim), (torch.zeros(rows),)) for rows in work.heights]
    lookups = [
        Lookup(number, values, work.offsets(number), grad=grad)
        for number, (values, grad) in enumerate(zip(work.values(), work.gradients(), strict=True))
    ]
    step, triton_backend = Step(model.ALGORITHM, 0.1, eps=1e-8), TritonBackend()
    with patch.object(sort_passes, "_multiprocessors", lambda device: model.MULTIPROCESSORS):
        with compiled((ARCHITECTURE,)) as kernels:
            triton_backend.update(tables, lookups, step)
        with patch.object(backend, "interpreted", lambda: True), ptx.executing(ARCHITECTURE) as run:
            triton_backend.update(tables, lookups, step)
    return [
        Measured(
            *(made.kernel, report.grid[0], made.warps, made.registers),
            *(report.instructions, report.read, report.written, report.atomics),
        )
        for made, report in zip(kernels, run.reports, strict=True)
    ]


def main() -> None:
    """Write the measurements."""
    torch.set_num_threads(1)
    found = {}
    for work in model.workloads():
        shape = shape_for(work.dim)
        found[work.name] = {
            "lookups": small(work).batch * sum(work.lengths),
            "rows": shape.rows,
            "unroll": shape.unroll,
            "launches": [asdict(one) for one in measure(work)],
        }
        print(work.name, flush=True)
    text = json.dumps(
        {"triton": triton.__version__, "architecture": ARCHITECTURE, "workloads": found}, indent=1
    )
    Path(model.KERNELS).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
