"""Small git repositories of the tests of benchmarks."""

import shutil
import subprocess

from keyedopt.benchmarks.commit_builds import HERE

#: A project that installs the reference only.
REFERENCE = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "keyedopt"
version = "0.0.1"
[tool.setuptools]
packages = ["keyedopt.reference", "keyedopt.reference.embedding", "keyedopt.reference.keyed",
            "keyedopt.reference.rules"]
[tool.setuptools.package-dir]
"keyedopt.reference" = "reference"
"""


def git(folder, *arguments):
    names = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(
        ["git", "-C", folder, *names, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def worktrees(folder):
    """Return how many worktrees a repository has besides its own."""
    return git(folder, "worktree", "list").count("\n")


def committed(folder, files):
    """Make a repository of one commit with the given files; return its folder."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    return folder


def reference_repository(folder):
    """Make a repository of one commit that has the reference; return its folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(HERE / "reference", folder / "reference", ignore=ignored)
    return committed(folder, {"pyproject.toml": REFERENCE})
