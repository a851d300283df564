"""Without the C++ extensions everything works, one warning says what is slower, and the doctor what to do."""

import importlib.metadata
import json
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from keyedopt import fused
from keyedopt.cli import doctor
from keyedopt.fused import extensions

EXTENSIONS = tuple(extensions.SLOWER)
slow = pytest.mark.complete(loop=__name__, sample=2, spread=True)
built = pytest.mark.skipif(bool(extensions.missing()), reason="the extensions are not built")

USE = """
import sys, warnings
import torch
from keyedopt import fused
print("imported", file=sys.stderr)
for _ in range(2):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = fused.SGD([param], lr=0.5)
    param.grad = torch.ones(2)
    optimizer.step()
    table = fused.EmbeddingBagConfig(3, 1, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    bags = fused.EmbeddingBagCollection([table], fused.SGD, {"lr": 0.5})
    bags({"f": (torch.tensor([1]), torch.tensor([0, 1]))})["f"].sum().backward()
print(param.tolist(), bags.embedding_bags["t"].weight.tolist())
"""
DOCTOR = "from keyedopt.cli.main import app; app(['doctor'])"
#: As an option of Python or a variable of its environment: the begin of a message.
SILENT = "ignore:keyedopt's C++ extensions"


def without(code, *options, **environment):
    """Run code in a process in which the import of the extensions fails."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({EXTENSIONS!r}))\n"
    return subprocess.run(
        [sys.executable, *options, "-c", hide + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@slow
def test_a_process_warns_once_at_the_first_step_and_not_at_import():
    done = without(USE, "-W", "always::RuntimeWarning")
    assert (done.returncode, done.stdout) == (0, "[0.5, 0.5] [[1.0], [0.5], [1.0]]\n"), done.stderr
    before, _, after = done.stderr.partition("imported\n")
    assert "extensions" not in before
    assert after.count("RuntimeWarning: keyedopt's C++ extensions are missing") == 1
    for slower in extensions.SLOWER.values():
        assert slower in after


@slow
@pytest.mark.parametrize("way", ["option", "variable"])
def test_the_filter_of_warnings_silences_it(way):
    done = without(USE, "-W", SILENT) if way == "option" else without(USE, PYTHONWARNINGS=SILENT)
    assert (done.returncode, "extensions" in done.stderr) == (0, False), done.stderr


@slow
def test_the_doctor_of_such_a_process_says_what_is_slower():
    done = without(DOCTOR)
    assert done.returncode == 0, done.stderr
    for name, slower in extensions.SLOWER.items():
        assert f"C++ extension {name}: missing: PyTorch does {slower} instead" in done.stdout


@built
def test_it_is_silent_where_nothing_is_missing(monkeypatch):
    monkeypatch.setattr(extensions, "_warned", False)
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused.SGD([param], lr=0.5).step()
        extensions.warn_if_missing()


@pytest.mark.parametrize("name", EXTENSIONS)
def test_the_doctor_shows_the_command_that_builds(name, monkeypatch, capsys):
    monkeypatch.setattr(extensions, "missing", lambda: {name: extensions.SLOWER[name]})
    doctor._show_extensions()
    first, command = capsys.readouterr().out.splitlines()
    assert name in first
    assert command.endswith(f" -m pip install --force-reinstall --no-deps -e {Path(__file__).parents[2]}")
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    doctor._show_extensions()
    assert "  to build: install a C++17 compiler" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["index", "wheel", "folder"])
def test_the_command_of_an_install_builds_from_its_sources(tmp_path, monkeypatch, kind):
    source = tmp_path / "a folder"
    source.mkdir()
    (source / "pyproject.toml").touch()
    url = source.as_uri()
    about = {
        "index": None,
        "wheel": {"url": f"{url}/x.whl", "archive_info": {}},
        "folder": {"url": url, "dir_info": {}},
    }
    texts = {"direct_url.json": about[kind] and json.dumps(about[kind])}
    found = [types.SimpleNamespace(read_text=read) for read in ({}.get, texts.get)]
    monkeypatch.setattr(extensions, "_ROOT", tmp_path)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: found)
    ending = f" --no-deps '{source}'" if kind == "folder" else " --no-deps --no-binary keyedopt keyedopt"
    assert extensions.build_command().endswith(ending)


@built
def test_the_doctor_says_that_all_are_built(capsys):
    doctor._show_extensions()
    assert capsys.readouterr().out == "C++ extensions: built\n"
