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
from keyedopt.conformance.targets.proposal import propose

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


GUESSED = """
import torch
from torch.optim import Optimizer
required = object()
class LowBitAdamW(torch.optim.AdamW):
    def __init__(self, params, lr=required, eps=1e-7):
        super().__init__(params, lr=lr, eps=eps)
class AdagradW(Optimizer):
    def __init__(self, params, lr=0.01, weight_decay=0.5, epsilon=1e-10, **others):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "epsilon": epsilon, **others})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                total = self.state[weight].setdefault("sum", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                total.addcmul_(weight.grad, weight.grad)
                weight.addcdiv_(weight.grad, total.sqrt() + group["epsilon"], value=-group["lr"])
class NAdam(torch.optim.NAdam): ...
class SGDW(Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            weight.sub_(weight.grad.sign(), alpha=self.param_groups[0]["lr"])
class AdamP(Optimizer):  # all but Adam
    def __init__(self, params, lr=1e-3):
        self.inner = torch.optim.Adam(params, lr=lr)
        super().__init__(self.inner.param_groups[0]["params"], {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for weight in self.param_groups[0]["params"]:
            weight.mul_(0.9995)
class SparseAdamW(Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
    def step(self, closure=None):
        raise RuntimeError("dense gradients are not supported")
class Lion(torch.optim.SGD): ...
class Sign(torch.optim.SGD):  # another formula, for its constructor
    step = SGDW.step
class Lamb(Optimizer):
    def __init__(self, params, model, lr=1e-3): ...
"""


def test_the_first_steps_are_tried_with_decay_too(tmp_path, monkeypatch):
    source = "import torch\nclass Adam(torch.optim.AdamW):\n"
    source += "    def __init__(self, params, lr=0.1, weight_decay=0.0):\n"
    source += "        super().__init__(params, lr, weight_decay=weight_decay)\n"
    (tmp_path / "decayed.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (note, *_) = propose("decayed", by_words=True).notes
    assert "decayed:Adam takes the steps of a variant of Adam: claim 'decoupled' in `variants`" in note


def test_what_a_name_says_is_a_guess_that_the_first_steps_confirm(run_line, tmp_path, monkeypatch):
    """Classes of another meaning are not described, and the command says how to claim them."""
    (tmp_path / "Guessed.py").write_text(GUESSED, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = run_line("init-adapter", "--from", "Guessed")
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.syspath_prepend(tmp_path / "guessed-keyedopt")
    about = load("guessed_keyedopt:IMPLEMENTATION")
    assert about.names == {
        "SGD": "Guessed:SGDW",
        "AdamW": "Guessed:LowBitAdamW",
        "Adagrad": "Guessed:AdagradW",
        "OtherOptimizer": "Guessed:Lion",
    }
    assert about.fixed_options == {"AdamW.lr": 1e-3}
    assert about.defaults == {"AdamW.eps": 1e-7, "Adagrad.weight_decay": 0.5}
    assert (about.option_names, about.variants) == (
        {"Adagrad.eps": "epsilon"},
        {"Adagrad": "decoupled", "SGD": "decoupled"},
    )
    for note in (
        "Guessed:SGDW is judged as SGD: that is its name, but its first steps are not those of the",
        "Guessed:AdagradW is judged as Adagrad: its name says Adagrad, and its first steps are right",
        "Guessed:AdagradW takes **kwargs, of which no signature shows the names: lr_decay, ",
        "Guessed:NAdam is not described: its name says Adam, but its first steps are not those of",
        "Guessed:AdamP is not described: its name says Adam, but its first steps are not those of the",
        "Guessed:SparseAdamW is not described: Guessed:LowBitAdamW is the AdamW here; alone, with --from",
        "Guessed:Lamb is not described: as LAMB, it has the arguments (params, model, lr=0.001): missing",
        "Guessed:Lion is judged as OtherOptimizer: its formula is not known, and is not judged",
    ):
        assert f"note: {note}" in done.stdout
    assert "# Note: Guessed:AdagradW is judged" in (
        tmp_path / "guessed-keyedopt" / "guessed_keyedopt" / "__init__.py"
    ).read_text(encoding="utf-8")
    asked = run_line("init-adapter", "asked", "--from", "Guessed:SparseAdamW")
    assert asked.returncode == 2
    assert "a step with it raises RuntimeError: dense gradients are not supported; if its" in asked.stderr
    assert "otherwise --from OtherOptimizer=Guessed:SparseAdamW" in asked.stderr
    assert "if it needs more arguments, use --from OtherOptimizer=MODULE:FUNCTION" in asked.stderr
    claimed = ("--from", "AdamW=Guessed:SparseAdamW", "--from", "Guessed:Lion")
    assert run_line("init-adapter", "claimed", *claimed).returncode == 0
    monkeypatch.syspath_prepend(tmp_path / "claimed-keyedopt")
    about = load("claimed_keyedopt:IMPLEMENTATION")
    assert about.names == {"AdamW": "Guessed:SparseAdamW", "SGD": "Guessed:Lion"}
    assert about.root == "Guessed:SparseAdamW"
    assert run_line("init-adapter", "x", "--from", "Lion=Guessed:Lion").returncode == 2
    sign = run_line("init-adapter", "sign", "--from", "Guessed:Sign")
    assert "Guessed:Sign is not described: it extends SGD, but its first steps are not those" in sign.stdout
    assert "Guessed:Sign is judged as OtherOptimizer" in sign.stdout
    assert propose("Guessed:Sign").names == {"OtherOptimizer": "Guessed:Sign"}  # as `keyedopt check` does


def test_a_base_without_a_step_that_is_named_like_an_algorithm(tmp_path, monkeypatch):
    (tmp_path / "stepless.py").write_text(
        "import torch\nclass Adam: ...\nclass Fast(Adam, torch.optim.SGD): ...\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert propose("stepless:Fast").names == {"OtherOptimizer": "stepless:Fast"}


def test_a_proposal_shows_what_a_constructor_passes_on(tmp_path, monkeypatch):
    (tmp_path / "passing.py").write_text(
        "import torch\n"
        "class Adam(torch.optim.Adam):\n    def __init__(self, params, lr=1e-3, **kwargs): ...\n"
        "class SparseAdam(torch.optim.SparseAdam): ...\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    proposal = propose("passing")
    assert proposal.areas == ("algorithms", "sparse")
    assert proposal.names == {"Adam": "passing:Adam", "SparseAdam": "passing:SparseAdam"}
    assert not [one for one in proposal.absent if one.startswith(("Adam.", "SparseAdam"))]
    assert (proposal.defaults, proposal.notes) == ({}, ())


def test_the_readme_of_a_proposal_names_files_that_are_there(run_line, tmp_path, monkeypatch):
    (tmp_path / "shelf.py").write_text("import torch\nclass SGD(torch.optim.SGD): ...\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for arguments in (("shelf", "--from", "shelf"), ("other",)):
        assert run_line("init-adapter", *arguments).returncode == 0
        folder = tmp_path / f"{arguments[0]}-keyedopt"
        text = (folder / "README.md").read_text(encoding="utf-8")
        named = re.findall(r"`([\w./]+\.(?:py|toml|yml))`", text)
        assert len(named) >= 2
        assert [name for name in named if not (folder / name).exists()] == []


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
