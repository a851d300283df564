"""Workflows and commands in documents: they can be read, and the command line knows every option in them."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from keyedopt.cli import adapter
from keyedopt.cli.main import app

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "reports" / "ci").glob("*.yml")}
DOCUMENTS = [
    path
    for path in ROOT.rglob("*.md")
    if not {".git", "site", "node_modules"} & set(path.parts)
    and "keyedopt " in path.read_text(encoding="utf-8")
]


def scripts(workflow):
    """Return the shell lines of a workflow or job, with its variables in their places."""
    plain = yaml.safe_load(workflow)
    if "jobs" in plain:
        values = plain.get("env", {})
        lines = [step["run"] for job in plain["jobs"].values() for step in job["steps"] if "run" in step]
    else:
        (job,) = plain.values()
        values, lines = job["variables"], job["script"]
    for name, value in values.items():
        lines = [line.replace(f"${name}", value) for line in lines]
    return lines


def commands(text):
    """Return the arguments of each ``keyedopt`` command in lines of shell."""
    text = text.replace("\\\n", " ")
    text = re.sub(r"(&&|\|\|)\n\s*", r"\1 ", text)
    for line in text.splitlines():
        words = shlex.split(line, comments=True, posix=True) if line.count("'") % 2 == 0 else []
        for start, word in enumerate(words):
            begins = start == 0 or words[start - 1] in ("&&", "||", "|", ";", "do", "then")
            if word.rpartition("/")[2] == "keyedopt" and begins and start + 1 < len(words):
                rest = words[start + 1 :]
                ends = [i for i, each in enumerate(rest) if each in ("&&", "||", "|", ";", ">", ">>")]
                yield rest[: min(ends, default=len(rest))]


def parse(arguments):
    """Parse a command line; a verb or an option that is not there is an error."""
    command = get_command(app)
    while hasattr(command, "commands"):
        assert arguments, command.name
        assert arguments[0] in command.commands, arguments
        command, (verb, *arguments) = command.commands[arguments[0]], arguments
    command.make_context(verb, list(arguments))


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml"])
def test_a_workflow_that_the_readme_links_gates_on_everything(name):
    text = WORKFLOWS[name]
    assert f"(reports/ci/{name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    found = [arguments for line in scripts(text) for arguments in commands(line)]
    for arguments in found:
        parse(arguments)
    options = [set(arguments) for arguments in found]
    assert any({"check", "--expectations"} <= one for one in options)
    assert any({"bench", "gate"} <= one for one in options)
    assert any({"report", "--output"} <= one for one in options)
    assert (
        "site" in text.partition("artifact")[2].split()[-20:] or "- site" in text.partition("artifacts:")[2]
    )


def test_the_workflow_of_an_adapter_can_be_read():
    text = adapter.files("acme", "acme_keyedopt", "")[".github/workflows/conformance.yml"]
    found = [arguments for line in scripts(text) for arguments in commands(line)]
    assert [arguments[0] for arguments in found] == ["check", "report"]
    for arguments in found:
        parse(arguments)


def documented(path):
    """Return the arguments of each command in the blocks of a document."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)
    return [one for kind, block in blocks if kind in ("", "bash") for one in commands(block)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_a_document_is_one_that_there_is(path):
    for arguments in documented(path):
        parse(arguments)


def test_the_documents_show_every_verb():
    shown = {arguments[0] for path in DOCUMENTS for arguments in documented(path)}
    assert shown | {"list"} == set(get_command(app).commands)


def test_results_that_the_readme_compares_are_made_there_before():
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Report and compare\n")[2]
    made, read = set(), set()
    for verb, *rest in commands(re.search(r"^```bash\n(.*?)^```$", section, re.M | re.S)[1]):
        if verb == "check" and "--output" in rest:
            made.add(rest[rest.index("--output") + 1])
        elif verb == "diff":
            assert set(rest) <= made
            read |= set(rest)
        elif verb == "report":
            assert rest[0] in {str(Path(path).parent) for path in made}
    assert len(read) == 2


def test_what_is_wrong_in_a_document_would_be_found():
    for wrong in (["chek", "torchrec"], ["bench"], ["bench", "gat", "main"]):
        with pytest.raises(AssertionError):
            parse(wrong)
    with pytest.raises(Exception, match="--no-such-option"):
        parse(["check", "torchrec", "--no-such-option"])
    assert list(commands("env/bin/keyedopt check a \\\n  --level must && keyedopt list # x")) == [
        ["check", "a", "--level", "must"],
        ["list"],
    ]
