"""`keyedopt init-adapter`: what it writes can be installed and checked as it is."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from keyedopt.conformance import expectations
from keyedopt.conformance.results import model
from keyedopt.conformance.targets.implementation import load

ROOT = Path(__file__).parents[2]


def test_a_generated_adapter_is_installed_and_gets_a_verdict(run_line, tmp_path):
    done = run_line("init-adapter", "acme_fast", "--output", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "acme-fast-keyedopt"
    assert done.stdout.startswith(f"written: {folder}; next: pip install")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    place = tmp_path / "site"
    subprocess.run([*pip, "--no-index", "--target", place, folder], check=True)
    here = os.environ.get("PYTHONPATH", "")
    output = tmp_path / "x.json"
    checked = subprocess.run(
        [sys.executable, "-m", "keyedopt.cli.main", "check", "acme_fast", "--output", output],
        env={**os.environ, "PYTHONPATH": f"{place}:{here}".rstrip(":")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode in (0, 1), checked.stderr
    found = model.read(output)
    assert found.implementation["name"] == "acme_fast"
    assert found.implementation["version"] == "0.1.0"
    assert found.implementation["areas"] == ["algorithms", "sharded", "devices"]
    outcomes = [case.outcome for case in found.cases]
    assert outcomes.count("pass") > 50
    assert "error" not in outcomes
    assert "acme_fast 0.1.0 (torch" in checked.stdout


def test_its_files_are_what_they_say(run_line, tmp_path):
    run_line("init-adapter", "acme", "--output", tmp_path / "new")
    folder = tmp_path / "new" / "acme-keyedopt"
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    points = project["project"]["entry-points"]["keyedopt.implementations"]
    assert points == {"acme": "acme_keyedopt:IMPLEMENTATION"}
    assert expectations.read(folder / "expectations.toml") == ()
    workflow = (folder / ".github" / "workflows" / "conformance.yml").read_text(encoding="utf-8")
    assert "keyedopt check acme --expectations expectations.toml" in workflow
    for path in folder.rglob("*"):
        assert path.is_dir() or not re.search("@[A-Z]+@", path.read_text(encoding="utf-8")), path
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["acme-keyedopt"]


def test_a_proposal_for_a_class_in_this_folder_is_a_description_of_it(run_line, tmp_path, monkeypatch):
    source = "import torch\nclass Mine(torch.optim.Adam):\n    def __init__(self, params, lr=0.1): ...\n"
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = run_line("init-adapter", "near", "--from", "mine:Mine")
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.syspath_prepend(tmp_path / "near-keyedopt")
    about = load("near_keyedopt:IMPLEMENTATION")
    assert (about.names, about.defaults) == ({"Adam": "mine:Mine"}, {"Adam.lr": 0.1})
    refused = run_line("init-adapter", "none", "--from", "os")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert run_line("init-adapter", "--from", "mine:Mine").returncode == 0
    monkeypatch.syspath_prepend(tmp_path / "mine-keyedopt")
    assert load("mine_keyedopt:IMPLEMENTATION").name == "mine"
    assert "give a NAME, or --from MODULE" in run_line("init-adapter").stderr


def test_one_class_is_recognized_by_the_end_of_its_name(run_line, tmp_path, monkeypatch):
    """Not in a module with others: a name may end so for another algorithm. Sentinels are no defaults."""
    source = (
        "from torch.optim import Optimizer\nrequired = object()\n"
        "class LowBitAdamW(Optimizer):\n    def __init__(self, params, lr=required, eps=1e-7): ...\n"
        "class NAdam(Optimizer): ...\n"
    )
    (tmp_path / "low_bits.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    refused = run_line("init-adapter", "low", "--from", "low_bits")
    assert refused.returncode == 2
    assert "name one class, such as --from low_bits:LowBitAdamW, or write" in refused.stderr
    assert run_line("init-adapter", "low", "--from", "low_bits:NAdam").returncode == 2
    assert run_line("init-adapter", "low", "--from", "low_bits:LowBitAdamW").returncode == 0
    monkeypatch.syspath_prepend(tmp_path / "low-keyedopt")
    about = load("low_keyedopt:IMPLEMENTATION")
    assert about.names == {"AdamW": "low_bits:LowBitAdamW"}
    assert (about.fixed_options, about.defaults) == ({"AdamW.lr": 1e-3}, {"AdamW.eps": 1e-7})


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a b", "1st", "Acme", "é", "class", "x;rm", "a" * 41, "torchrec", "keyedopt", "json", "x_"],
)
def test_a_bad_name_is_refused_and_nothing_is_written(run_line, tmp_path, name):
    done = run_line("init-adapter", name, "--output", tmp_path / "new")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_folder_that_exists_is_left_alone(run_line, tmp_path):
    (tmp_path / "acme-keyedopt").mkdir()
    done = run_line("init-adapter", "acme", "--output", tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        f"keyedopt: {tmp_path / 'acme-keyedopt'} exists already: choose another name, or another --output\n"
    )
    assert list((tmp_path / "acme-keyedopt").iterdir()) == []
    (tmp_path / "file").touch()
    assert run_line("init-adapter", "other", "--output", tmp_path / "file").returncode == 2
