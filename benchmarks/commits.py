"""Two commits side by side: each is built in a worktree; both are measured in turn, by today's benchmarks.

What is built of a commit is `keyedopt.fused` and `keyedopt.reference`, native kernels included; torch and
the peers are those of the present environment. Each side is a process of its own; a run of one follows a
run of the other. Since a process keeps its placement in memory, there are several rounds of fresh
processes, and the interval of a ratio is that of the means of the rounds (Student's t).
"""

import contextlib
import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyedopt.benchmarks import rounds
from keyedopt.benchmarks.gate import student
from keyedopt.benchmarks.timing import relative_error

#: What is a commit's; the rest is of today.
MEASURED = ("fused", "reference")
OF_TODAY = ("benchmarks", "conformance", "cli")
#: Runs of each side in a round, at least and at most, and seconds of the clock that they take.
LEAST, MOST, SECONDS = 9, 300, 0.8


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

    Raises:
        CommitError: it cannot be built.
    """
    scratch = Path(tempfile.mkdtemp(prefix="keyedopt-commit-"))
    source = scratch / "source"
    try:
        git("worktree", "add", "--detach", str(source), commit, at=root)
        yield _install(source, scratch)
    finally:
        with contextlib.suppress(CommitError):
            git("worktree", "remove", "--force", str(source), at=root)
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(CommitError):
            git("worktree", "prune", at=root)


def _install(source: Path, scratch: Path) -> Path:
    installed, tree = scratch / "installed", scratch / "tree"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
    if _major("setuptools") >= 77:  # what is there will do, and needs no network
        command.append("--no-build-isolation")
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if done.returncode or not (installed / "keyedopt").is_dir():
        said = [line for line in done.stderr.splitlines() if "error" in line.lower()] or ["no keyedopt in it"]
        raise CommitError(f"commit {source} cannot be built: {said[-1].strip()}")
    (tree / "keyedopt").mkdir(parents=True)
    today = Path(__file__).resolve().parents[1]
    for part in MEASURED:
        if (installed / "keyedopt" / part).is_dir():
            (tree / "keyedopt" / part).symlink_to(installed / "keyedopt" / part)
    for part in OF_TODAY:
        (tree / "keyedopt" / part).symlink_to(today / part)
    return tree


def _major(distribution: str) -> int:
    try:
        return int(importlib.metadata.version(distribution).partition(".")[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0


class Side:
    """The process of one commit."""

    def __init__(self, tree: Path, threads: int) -> None:
        environment = {**os.environ, **rounds.HUGE_PAGES, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keyedopt.benchmarks.worker", str(threads), str(tree.parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=tree,
        )

    def ask(self, *command: Any) -> Any:
        """Give a command and return the answer.

        Raises:
            CommitError: the process ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        try:
            stdin.write(json.dumps(command) + "\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise CommitError(f"a process that measures ended with {self._process.wait()} at {command[:4]}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()


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
                sides = [Side(tree, threads) for tree in trees]
                for side in sides:
                    stack.callback(side.close)
                for count, (work, task) in enumerate(pairs):
                    progress(
                        f"round {turn + 1}: {work} {task}", turn * len(pairs) + count, number * len(pairs)
                    )
                    if (work, task) in why:
                        continue
                    said = [
                        side.ask("start", target, work, task, device, file)
                        for side, file in zip(sides, files, strict=True)
                    ]
                    if any(said):
                        why[work, task] = next(filter(None, said))
                        continue
                    errors[work, task] = _apart(files)
                    logs[work, task].append(_in_turn(sides))
    return [_ratio(pair, logs[pair], errors.get(pair), why.get(pair, "")) for pair in pairs]


def _in_turn(sides: Sequence[Side]) -> tuple[float, float]:
    """Return the lower quartile of the seconds of each side."""
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < LEAST or (len(times[0]) < MOST and sum(map(sum, times)) < SECONDS):
        for index in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
            answer = sides[index].ask("time")
            if isinstance(answer, str):
                raise CommitError(answer)
            times[index].append(answer)
    first, second = (float(np.quantile(each, rounds.QUARTILE)) for each in times)
    return first, second


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
