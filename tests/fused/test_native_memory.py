"""What a backward pass takes besides the tables: at most four times the bytes of the row numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keyedopt.fused.backends.native import NativeBackend

WHY = NativeBackend("").missing()
if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert not WHY, WHY
if not WHY and not Path("/proc/self/clear_refs").exists():
    WHY = "this system does not say how much memory a process took at most since a moment"
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "can be measured")

#: In a process of its own: the most memory that it had during a backward pass, less what it had before.
MEASURE = """
import sys, torch
from keyedopt import fused
optimizer, (tables, bags, length, threads, weighted) = sys.argv[1], map(int, sys.argv[2:])
torch.set_num_threads(threads)
names = [f"f{n}" for n in range(tables)]
configs = [fused.EmbeddingBagConfig(1000, 8, f"t_{name}", feature_names=[name]) for name in names]
options = {"lr": 0.1}, bool(weighted)
module = fused.EmbeddingBagCollection(configs, getattr(fused, optimizer), *options, backend="native")

def look_up(bags):
    features = {}
    for name in names:
        given = torch.randint(1000, (bags * length,)), torch.arange(0, bags * length + 1, length)
        features[name] = (*given, torch.ones(bags * length)) if weighted else given
    outputs = list(module(features).values())
    return outputs, [torch.ones_like(one) for one in outputs]

def size(name):
    found = [line.split() for line in open("/proc/self/status") if line.startswith(name)]
    return int(found[0][1]) * 1024

torch.autograd.backward(*look_up(1))  # what is made once is not the step's
ready = look_up(bags)
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")  # the highest that was is what there is now
before = size("VmRSS")
torch.autograd.backward(*ready)
print(size("VmHWM") - before, 8 * tables * bags * length)
"""


def extra(optimizer, *sizes):
    command = [sys.executable, "-c", MEASURE, optimizer, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return map(int, done.stdout.split())


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize(
    ("optimizer", "tables", "threads", "weighted"),
    [("RowWiseAdagrad", 1, 2, 0), ("RowWiseAdagrad", 8, 2, 0), ("SGD", 1, 1, 0), ("Adam", 2, 2, 1)],
    ids=["one table", "eight tables", "one thread", "weighted"],
)
def test_a_backward_takes_at_most_four_times_its_indices(optimizer, tables, threads, weighted):
    count = 2**21
    most, indices = extra(optimizer, tables, count // tables // 16, 16, threads, weighted)
    assert indices == 8 * count
    assert 0 < most <= 4 * indices
