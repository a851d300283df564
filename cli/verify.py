"""``keyedopt verify`` and ``check --sign``: whether a result is of what is installed here, and who made it.

Signatures are those of ``ssh-keygen -Y``, detached in ``FILE.sig``, with the namespace ``keyedopt``.
"""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keyedopt.conformance import spec
from keyedopt.conformance.results import model
from keyedopt.conformance.results.digest import digest
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.files import open_regular, read_text
from keyedopt.conformance.results.model import Result
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import judge
from keyedopt.conformance.targets.find import find, registered
from keyedopt.conformance.targets.implementation import TargetError

NAMESPACE = "keyedopt"


class SignatureError(KeyedoptError):
    """A file cannot be signed, or a signature cannot be checked; the message says why."""


@dataclass(frozen=True)
class Part:
    """What a result says of one part, and what is here; `here` is None if it cannot be compared."""

    name: str
    said: str
    here: str | None

    @property
    def differs(self) -> bool:
        """Whether the part of the result is not what is here."""
        return self.here is not None and self.said != self.here

    def __str__(self) -> str:
        if self.here is None:
            return one_line(f"not checked {self.name}: {self.said}")
        word = "differs" if self.differs else "same"
        return one_line(f"{word} {self.name}: {self.said}{f'; here {self.here}' if self.differs else ''}")


def verify(path: Path, signers: Path | None, identity: str | None) -> int:
    """Compare a result with what is installed, and check its signature; return 1 if a part differs.

    Raises:
        ResultError: the file is not a result.
        SignatureError: the signature cannot be checked.
    """
    if (signers is None) != (identity is None):
        raise SignatureError("give --allowed-signers and --identity together: whose signature it must be")
    found = model.read(path)
    parts = [*_parts(found)]
    signature = path.with_name(f"{path.name}.sig")
    if signers is not None or signature.exists():
        parts.append(Part("signature", *_signature(path, signature, signers, identity)))
    for part in parts:
        print(part)
    verdict = judge(found)
    print(one_line(f"{found.implementation['name']}: {verdict.headline}; {verdict.checked}"))
    return 1 if any(part.differs for part in parts) else 0


def _parts(found: Result) -> Iterator[Part]:
    """Yield the suite, the implementation and the environment of a result, with what is here."""
    yield Part("suite version", found.suite["version"], spec.SUITE_VERSION)
    yield Part("suite and clauses", found.suite["hash"], spec.suite_hash())
    about = found.implementation
    known = about["target"] in registered()  # a file cannot choose what is imported
    build = about.get("build") or "none"
    try:
        here = digest(find(about["target"]).root) or "none" if known else None
    except TargetError:
        here = "not installed"
    yield Part("implementation files", build, here)
    for name, version in about["versions"].items():
        yield Part(f"version of {name}", version, _version(name))
    where = found.environment
    yield Part("python", where["python"], platform.python_version())
    for name in ("torch", "keyedopt"):
        yield Part(name, where[name], _version(name))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "not installed"


def _ssh_keygen(*arguments: str, stdin: int | None = None) -> "subprocess.CompletedProcess[str]":
    program = shutil.which("ssh-keygen")
    if program is None:
        raise SignatureError("signatures need ssh-keygen: install OpenSSH")
    return subprocess.run(
        [program, "-Y", *arguments],
        stdin=stdin or subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _signature(path: Path, signature: Path, signers: Path | None, identity: str | None) -> tuple[str, str]:
    """Return what the signature must be, and what it is."""
    read_text(signature)  # raises if it is missing, or is not a regular file
    descriptor = open_regular(path)
    with open(descriptor, "rb") as file:
        if signers is None:
            done = _ssh_keygen("check-novalidate", "-n", NAMESPACE, "-s", str(signature), stdin=file.fileno())
            said = "of this file, by a key that is not checked (see --allowed-signers)"
        else:
            who = ("-I", str(identity), "-f", str(signers))
            done = _ssh_keygen("verify", *who, "-n", NAMESPACE, "-s", str(signature), stdin=file.fileno())
            said = f"by {identity}"
    return said, said if done.returncode == 0 else _last(done)


def sign(path: Path, key: Path) -> Path:
    """Sign a file with a key of ssh, and return the signature's path.

    Raises:
        SignatureError: ssh-keygen cannot sign with this key.
    """
    signature = path.with_name(f"{path.name}.sig")
    signature.unlink(missing_ok=True)  # ssh-keygen asks before it replaces a file
    done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(path))
    if done.returncode or not signature.exists():
        raise SignatureError(f"{path} cannot be signed with {key}: {_last(done)}")
    return signature


def _last(done: "subprocess.CompletedProcess[str]") -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return one_line(lines[-1], 300) if lines else f"exit status {done.returncode}"
