"""A copy of the packages under another name works, also beside the original, with its compiled modules."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keyedopt import fused, reference
from keyedopt.fused.backends.native import NativeBackend

#: Trains a table by row and a dense parameter with each package; prints the bits.
SCRIPT = """
import importlib, sys
import torch

for name in sys.argv[1:]:
    fused = importlib.import_module(f"{name}.fused")
    config = fused.EmbeddingBagConfig(3, 4, name="t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    bags = fused.EmbeddingBagCollection([config], fused.RowWiseAdagrad, {"lr": 0.1})
    look_up = torch.compile(bags, backend="eager", fullgraph=True)
    look_up({"f": (torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3]))})["f"].sum().backward()
    weight = torch.nn.Parameter(torch.ones(64))
    weight.grad = torch.linspace(-1, 1, 64)
    fused.Adam([weight]).step()
    found = [*bags.state_dict().values(), weight.detach()]
    print(fused.backends.native._kernels.__name__, [tensor.tolist() for tensor in found], sep="|")
"""


@pytest.mark.complete
@pytest.mark.skipif(NativeBackend("").missing() != "", reason=NativeBackend("").missing())
def test_a_renamed_copy_trains_beside_the_original(tmp_path):
    copy = tmp_path / "other_name"
    for package in (fused, reference):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, copy / package.__name__.partition(".")[2])
    for path in copy.rglob("*.py"):  # in a compiled module, a name of another length would move what follows
        path.write_text(path.read_text(encoding="utf-8").replace("keyedopt", copy.name), encoding="utf-8")
    for names in (["other_name"], ["keyedopt", "other_name"], ["other_name", "keyedopt"]):
        command = [sys.executable, "-c", SCRIPT, *names]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        kernels, values = zip(*(line.split("|") for line in done.stdout.splitlines()), strict=True)
        assert list(kernels) == [f"{name}.fused.backends.native._kernels" for name in names]
        assert len(set(values)) == 1
