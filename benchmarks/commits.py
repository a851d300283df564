"""Two commits side by side: each is built in a worktree; both are measured in turn, by today's benchmarks.

What is built of a commit is `keyedopt.fused` and `keyedopt.reference`, native kernels included; torch and
the peers are those of the present environment. Each side is a process of its own, and they run in turn (see
`keyedopt.benchmarks.sides`). Since a process keeps its placement in memory, there are several rounds of fresh
processes, and the interval of a ratio is that of the means of the rounds (Student's t).
"""

import contextlib
import fcntl
import importlib.metadata
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from keyedopt.benchmarks import sides
from keyedopt.benchmarks.gate import student
from keyedopt.benchmarks.sides import Side
from keyedopt.benchmarks.timing import relative_error

#: How the folders of builds begin; where in them the worktree is, and what their process holds.
PREFIX, SOURCE, LOCK = "keyedopt-commit-", "source", "lock"


class CommitError(Exception):
    """Commits that cannot be compared; the message says why and what to do."""


@dataclass(frozen=True)
class Ratio:
    """How many times as long the second commit takes.

    Args:
        workload, task: what was done.
        seconds: of each commit, the median of the rounds.
        value, low, high: the ratio, and what holds it at 95 %; None where a side could not do it.
        error: how far their results are apart, see `timing.relative_error`.
        why: why there is no ratio.
    """

    workload: str
    task: str
    seconds: tuple[float, float] | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    why: str = ""


def git(*arguments: str, at: Path) -> str:
    """Run git and return what it says.

    Raises:
        CommitError: it is not there, or it failed.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(at), *arguments], capture_output=True, text=True, check=False, timeout=120
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise CommitError(f"git is needed, and cannot be run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CommitError(f"git {arguments[0]} failed: {said[0] if said else done.returncode}")
    return done.stdout.strip()


def resolved(names: Sequence[str], at: Path) -> tuple[Path, list[str]]:
    """Return the root of the repository, and the full names of commits.

    Raises:
        CommitError: there is no repository, there is no such commit, or files differ from what is committed.
    """
    try:
        root = Path(git("rev-parse", "--show-toplevel", at=at))
    except CommitError as error:
        raise CommitError(f"{at} is not in a git checkout of keyedopt: run this in one ({error})") from error
    found = []
    for name in names:
        try:
            found.append(git("rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}", at=root))
        except CommitError as error:
            raise CommitError(f"there is no commit {name!r} in {root}") from error
    changed = git("status", "--porcelain", "--untracked-files=no", at=root).splitlines()
    if changed:
        raise CommitError(
            f"{root} has changes that are not committed ({changed[0].strip()}): commit them first"
        )
    return root, found


@contextlib.contextmanager
def built(root: Path, commit: str) -> Iterator[Path]:
    """Build a commit, and give the folder from which its `keyedopt` can be imported; it goes at the end.

    What runs that were killed left behind in this repository goes first.

    Raises:
        CommitError: it cannot be built.
    """
    _sweep(root)
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (scratch / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends, however it ends
            git("worktree", "add", "--detach", str(scratch / SOURCE), commit, at=root)
            yield _install(scratch / SOURCE, scratch)
    finally:
        _remove(scratch, root)


def _remove(scratch: Path, root: Path) -> None:
    """Remove a worktree, what was built of it, and what git knows of it, though it had only begun with it."""
    shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(CommitError):
        git("worktree", "remove", "--force", "--force", str(scratch / SOURCE), at=root)


def _sweep(root: Path) -> None:
    """Remove the worktrees of processes that were killed: those whose lock nobody holds."""
    for line in git("worktree", "list", "--porcelain", at=root).splitlines():
        source = Path(line.removeprefix("worktree "))
        if source.name != SOURCE or not source.parent.name.startswith(PREFIX):
            continue
        try:
            with (source.parent / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(source.parent, root)
        except OSError:
            continue  # somebody works there, or it is not on this machine


def _install(source: Path, scratch: Path) -> Path:
    installed, passing = scratch / "installed", scratch / "tmp"
    passing.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
    if _major("setuptools") >= 77:  # what is there will do, and needs no network
        command.append("--no-build-isolation")
    code, stderr = _whole([*command, str(source)], {**os.environ, "TMPDIR": str(passing)})
    if code or not (installed / "keyedopt").is_dir():
        said = [line for line in stderr.splitlines() if "error" in line.lower()] or ["no keyedopt in it"]
        raise CommitError(f"commit {source} cannot be built: {said[-1].strip()}")
    parts = {part: installed / "keyedopt" / part for part in sides.MEASURED}
    return sides.tree(scratch, {part: folder for part, folder in parts.items() if folder.is_dir()})


def _whole(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a command, with all processes that it starts ended if this one is interrupted."""
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


def _major(distribution: str) -> int:
    try:
        return int(importlib.metadata.version(distribution).partition(".")[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0


def measure(
    trees: tuple[Path, Path],
    target: str,
    pairs: Sequence[tuple[str, str]],
    device: str,
    threads: int,
    number: int,
    progress: Callable[[str, int, int], object] = lambda text, done, total: None,
) -> list[Ratio]:
    """Measure both commits in turn, in some rounds of fresh processes."""
    logs: dict[tuple[str, str], list[tuple[float, float]]] = {pair: [] for pair in pairs}
    errors: dict[tuple[str, str], float] = {}
    why: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="keyedopt-results-") as folder:
        files = [str(Path(folder) / f"{side}.pt") for side in (0, 1)]
        for turn in range(number):
            with contextlib.ExitStack() as stack:
                both = [Side(tree, threads) for tree in trees]
                for side in both:
                    stack.callback(side.close)
                for count, (work, task) in enumerate(pairs):
                    progress(
                        f"round {turn + 1}: {work} {task}", turn * len(pairs) + count, number * len(pairs)
                    )
                    if (work, task) in why:
                        continue
                    said = sides.start(both, [(target, work, task, device, file) for file in files])
                    if any(said):
                        why[work, task] = next(filter(None, said))
                        continue
                    errors[work, task] = _apart(files)
                    first, second = map(sides.kept, sides.in_turn(both))
                    logs[work, task].append((first, second))
    return [_ratio(pair, logs[pair], errors.get(pair), why.get(pair, "")) for pair in pairs]


def _apart(files: Sequence[str]) -> float:
    one, other = (torch.load(file, weights_only=True) for file in files)
    alike = one["before"].keys() == other["before"].keys() and all(
        torch.equal(value, other["before"][name]) for name, value in one["before"].items()
    )
    return relative_error(one["before"], one["after"], other["after"]) if alike else math.inf


def _ratio(
    pair: tuple[str, str], found: Sequence[tuple[float, float]], error: float | None, why: str
) -> Ratio:
    if why or not found:
        return Ratio(*pair, why=why)
    logs = np.log([second / first for first, second in found])
    reach = 0.0
    if len(logs) > 1:
        reach = student(0.975, len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    middle = float(np.mean(logs))
    seconds = tuple(float(np.median([each[side] for each in found])) for side in (0, 1))
    value, low, high = (math.exp(middle + part) for part in (0.0, -reach, reach))
    return Ratio(*pair, (seconds[0], seconds[1]), value, low, high, error)
