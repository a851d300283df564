"""`keyedopt verify`: a result against what is installed here, and its signature."""

import json
import shutil
import subprocess

import pytest
from making import CLAUSE, refused, result

from keyedopt.conformance.results import model
from keyedopt.conformance.run import runner


@pytest.fixture
def signed(run_line, tmp_path, monkeypatch):
    """Check a target, sign its result, and allow the key."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is missing")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], cwd=tmp_path, check=True)
    public = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    (tmp_path / "signers").write_text(f"me@example.com {public}\n")
    found = runner.run("reference", runner.Options(clauses=(CLAUSE,)))
    monkeypatch.setattr(runner, "run", lambda *_, **__: found)
    done = run_line("check", "reference", "--output", "x.json", "--sign", "key")
    assert done.stdout.splitlines()[-3] == "signed: x.json.sig"
    return tmp_path


WHO = ("--allowed-signers", "signers", "--identity", "me@example.com")


def test_a_result_of_what_is_installed_is_verified_with_its_signature(run_line, signed):
    done = run_line("verify", "x.json", *WHO)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    words = {line.split()[0] for line in done.stdout.splitlines()[:-1]}
    assert words == {"same"}
    assert "same signature: by me@example.com" in done.stdout
    assert "by a key that is not checked" in run_line("verify", "x.json").stdout


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"suite": {"version": "0.1", "hash": "0"}}, "suite and clauses"),
        ({"seconds": 5.0}, "signature"),
    ],
)
def test_a_result_that_was_changed_is_not_verified(run_line, signed, changes, part):
    plain = json.loads((signed / "x.json").read_text())
    (signed / "x.json").write_text(json.dumps({**plain, **changes}))
    done = run_line("verify", "x.json", *WHO)
    assert done.returncode == 1
    assert any(line.startswith(f"differs {part}: ") for line in done.stdout.splitlines())


def test_another_identity_is_not_verified(run_line, signed):
    done = run_line("verify", "x.json", "--allowed-signers", "signers", "--identity", "you@example.com")
    assert done.returncode == 1


def test_a_result_cannot_choose_what_verify_imports(run_line, tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit(9)")
    made = result({})
    made.implementation["target"] = "evil"
    model.write(made, tmp_path / "x.json")
    done = run_line("verify", "x.json")
    assert "not checked implementation files" in done.stdout


def test_bad_input_is_refused(run_line, tmp_path):
    model.write(result({}), tmp_path / "x.json")
    assert "together" in refused(run_line("verify", "x.json", "--identity", "me"))
    assert "--sign signs" in refused(run_line("check", "reference", "--sign", "key"))
