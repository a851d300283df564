"""The examples run, and the migration is as small as the documentation says."""

import difflib
import runpy
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _seed():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, request, capsys):
    for library in ("torchrec", "torchft"):
        if library in path.read_text(encoding="utf-8"):
            request.getfixturevalue(library)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.count("\n") == 1


def test_the_migration_changes_ten_lines_and_no_result(torchrec):
    names = [FOLDER / "migrate_before.py", FOLDER / "migrate_after.py"]
    before, after = (name.read_text(encoding="utf-8").splitlines()[1:] for name in names)
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")]
    assert len(changed) <= 10
    want, got = (runpy.run_path(str(name))["train"]() for name in names)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-7)
