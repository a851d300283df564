"""Build commits of the repository in worktrees, to measure them with the running benchmarks.

The repository is keyedopt's own or that of another implementation. Of keyedopt a commit gives
`keyedopt.fused` and `keyedopt.reference`, with their compiled modules; benchmarks, torch and peers are those
of the present environment. Of another repository a commit gives everything that it installs.
"""

import contextlib
import fcntl
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from keyedopt.conformance.results.errors import KeyedoptError

#: The packages of keyedopt that come from a build, and those that always come from the running keyedopt.
MEASURED, RUNNING = ("fused", "reference"), ("benchmarks", "conformance", "cli", "tools")
#: The folder of the running keyedopt.
HERE = Path(__file__).resolve().parents[1]
#: The names of a build's folder (prefix), of the worktree in it, and of the file that its process locks.
PREFIX, SOURCE, LOCK = "keyedopt-commit-", "source", "lock"

#: Called with a description of the next step, the number of finished steps, and their total.
Progress = Callable[[str, int, int], object]


def no_progress(text: str, done: int, total: int) -> None:
    """Report no progress."""


class BuildError(KeyedoptError):
    """A commit cannot be found or built; the message says why and what to do."""


def git(*arguments: str, at: Path) -> str:
    """Run git and return its stdout.

    Raises:
        BuildError: git is missing, or the command failed.
    """
    names = ("-c", "user.name=keyedopt", "-c", "user.email=keyedopt@localhost")
    try:
        done = subprocess.run(
            ["git", "-C", str(at), *names, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"git is needed and cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise BuildError(f"git {arguments[0]} failed: {lines[0] if lines else done.returncode}")
    return done.stdout.strip()


def repository_root(at: Path) -> Path:
    """Return the root of the git checkout that contains a folder.

    Raises:
        BuildError: the folder is not in a checkout.
    """
    try:
        return Path(git("rev-parse", "--show-toplevel", at=at))
    except BuildError as error:
        raise BuildError(f"{at} is not in a git checkout: run this in one ({error})") from error


def resolve(ref: str, root: Path) -> str:
    """Return the full hash of the commit that a git ref names.

    Raises:
        BuildError: there is no such commit.
    """
    try:
        return git("rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}", at=root)
    except BuildError as error:
        raise BuildError(f"no commit {ref!r} in {root}: give a branch, a tag or a commit") from error


def commit_of_checkout(root: Path) -> str:
    """Return a commit of the checkout as it is now: HEAD, or HEAD with the changes to tracked files.

    `git stash create` makes a commit of the changes; it changes neither files nor branches.
    """
    return git("stash", "create", at=root) or resolve("HEAD", root)


def refuse_changes(root: Path) -> None:
    """Raise BuildError if tracked files have changes that are in no commit."""
    changed = git("status", "--porcelain", "--untracked-files=no", at=root).splitlines()
    if changed:
        raise BuildError(f"{root} has uncommitted changes ({changed[0].strip()}): commit them first")


@contextlib.contextmanager
def built_commits(
    root: Path, commits: Sequence[str], progress: Progress = no_progress
) -> Iterator[dict[str, Path]]:
    """Build commits, and yield for each the folder to import it from; all folders are removed at the end.

    Raises:
        BuildError: a commit cannot be built.
    """
    with contextlib.ExitStack() as stack:
        trees: dict[str, Path] = {}
        different = list(dict.fromkeys(commits))
        for done, commit in enumerate(different):
            progress(f"building {commit[:10]}", done, len(different))
            trees[commit] = stack.enter_context(built(root, commit))
        yield trees


@contextlib.contextmanager
def built(root: Path, commit: str) -> Iterator[Path]:
    """Build a commit, and yield the folder to import it from; the folder is removed at the end.

    Removes first the worktrees that killed runs have left in the repository.

    Raises:
        BuildError: the commit cannot be built.
    """
    _remove_abandoned(root)
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (scratch / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when this process ends, even if it is killed
            git("worktree", "add", "--detach", str(scratch / SOURCE), commit, at=root)
            yield _install(scratch / SOURCE, scratch)
    finally:
        _remove(scratch, root)


def _remove(scratch: Path, root: Path) -> None:
    """Remove a worktree, its build, and git's record of it, even if git had not finished making it."""
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(BuildError):
        git("worktree", "remove", "--force", "--force", str(scratch / SOURCE), at=root)


def _remove_abandoned(root: Path) -> None:
    """Remove the worktrees of killed processes: those whose lock is free."""
    for line in git("worktree", "list", "--porcelain", at=root).splitlines():
        source = Path(line.removeprefix("worktree "))
        if source.name != SOURCE or not source.parent.name.startswith(PREFIX):
            continue
        try:
            with (source.parent / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(source.parent, root)
        except OSError:
            continue  # in use, or on another machine


def _install(source: Path, scratch: Path) -> Path:
    """Install a worktree into a folder without touching the environment; return the folder to import from."""
    installed, temporary = scratch / "installed", scratch / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
    if _can_build_here(source):
        command.append("--no-build-isolation")  # which needs no network
    code, stderr = _run_in_session([*command, str(source)], {**os.environ, "TMPDIR": str(temporary)})
    packages = [path for path in installed.glob("*") if path.suffix != ".dist-info"]
    if code or not packages:
        lines = [line for line in stderr.splitlines() if "error" in line.lower()] or [
            "it installs no package"
        ]
        raise BuildError(f"commit {source} cannot be built: {lines[-1].strip()}")
    parts = [installed / "keyedopt" / part for part in MEASURED]
    if not any(part.is_dir() for part in parts):
        return installed
    tree = scratch / "tree"
    (tree / "keyedopt").mkdir(parents=True)
    for folder in (*filter(Path.is_dir, parts), *(HERE / name for name in RUNNING)):
        (tree / "keyedopt" / folder.name).symlink_to(folder)
    return tree


def measured_packages(tree: Path) -> dict[str, Path]:
    """Return the packages and modules that must be imported from a tree, with their resolved places."""
    if (tree / "keyedopt").is_dir():
        return {f"keyedopt.{part}": (tree / "keyedopt" / part).resolve() for part in MEASURED}
    return {path.stem: path.resolve() for path in tree.glob("*") if path.stem.isidentifier()}


def _can_build_here(source: Path) -> bool:
    """Return whether the build requirements of a project are installed in this environment."""
    try:
        project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
        wanted = project.get("build-system", {}).get("requires", ["setuptools"])
        return all(
            one.specifier.contains(importlib.metadata.version(one.name), prereleases=True)
            for one in map(Requirement, wanted)
            if one.marker is None or one.marker.evaluate()
        )
    except (OSError, tomllib.TOMLDecodeError, InvalidRequirement, importlib.metadata.PackageNotFoundError):
        return False


def _run_in_session(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command in a session of its own, and kill all its processes if this one is interrupted."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            _, stderr = process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, stderr
