"""The tool that checks versions, and the promises that repeat its table."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from keyedopt.tools import versions

ROOT = Path(__file__).parents[2]


def table():
    """Return the rows of the table of checked versions, by their columns."""
    text = (ROOT / "conformance" / "README.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.partition("\n## Versions\n")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| 2.")
    ]
    assert len(rows) >= len(versions.RELEASES)
    return [dict(zip(versions.HEAD, row, strict=True)) for row in rows]


def test_every_torch_is_in_the_table_and_passed():
    assert {row["torch"] for row in table()} == set(versions.RELEASES)
    for row in table():
        assert (row["reference"], row["fused"]) == ("pass", "pass")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"]), row


def test_classifiers_and_documents_promise_the_interpreters_of_the_table():
    checked = sorted({int(row["Python"].split(".")[1]) for row in table()})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classifiers = "\n".join(project["classifiers"])
    classified = re.findall(r"^Programming Language :: Python :: 3\.(\d+)$", classifiers, re.M)
    assert [*map(int, classified)] == checked
    assert project["requires-python"] == f">=3.{checked[0]}"
    promise = f"You need Linux, Python 3.{checked[0]} to 3.{checked[-1]} and pip"
    for document in ("README.md", "docs/started.md"):
        assert promise in (ROOT / document).read_text(encoding="utf-8"), document
    assert checked == [*range(checked[0], checked[-1] + 1)]


def test_an_interpreter_is_found_by_path_command_or_version():
    assert versions.find_python(sys.executable) == sys.executable
    assert versions.find_python("3") == versions.find_python("python3")
    assert versions.find_python("2.999") is None
    assert versions.version_of(sys.executable) == ".".join(map(str, sys.version_info[:3]))


@pytest.fixture
def tried(monkeypatch):
    """Install and check nothing; record what would be."""
    calls = []
    monkeypatch.setattr(versions, "install", lambda torch, python, folder, peers: folder)

    def check(names, commands, output, label):
        calls.append((label, commands.name, names))
        return {name: name != "torchrec" for name in names}

    monkeypatch.setattr(versions, "check", check)
    return calls


def test_each_interpreter_has_its_own_environment_and_row(tried, tmp_path, capsys):
    version = versions.version_of(sys.executable)
    options = ["--python", sys.executable, "--environments", str(tmp_path), "--output", str(tmp_path / "out")]
    assert versions.main(["2.13.0", "lowest", *options]) == 1, "torchrec fails"
    labels = [f"torch-2.13.0-python-{version}", f"torch-2.11.0-python-{version}"]
    assert [call[:2] for call in tried] == [(label, label) for label in labels]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| torch | Python | date | reference | fused | peers |"
    assert lines[2].startswith(f"| 2.13.0 | {version} | 20")
    assert lines[2].endswith("| pass | pass | torch pass, fbgemm 1.8.0 pass, torchrec 1.8.0 FAIL |")
    tried.clear()
    assert versions.main(["2.13.0", "--no-peers", *options]) == 0
    assert tried[0][2] == ["reference", "fused"]
    assert capsys.readouterr().out.splitlines()[2].endswith("| pass | pass | not checked |")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["2.13.0", "--python", "2.999"], "there is no Python '2.999': give the path of an interpreter"),
        (["1.0"], "there is no torch '1.0' here"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_installed(arguments, said, tried, capsys):
    with pytest.raises(SystemExit, match="2"):
        versions.main(arguments)
    assert said in capsys.readouterr().err
    assert tried == []
