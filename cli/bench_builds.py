"""The options and checks that `keyedopt bench gate` and `keyedopt bench commits` share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyedopt.benchmarks import commit_builds
from keyedopt.benchmarks.ab_round import Key, Request
from keyedopt.benchmarks.compare import chosen
from keyedopt.cli.bench_run import check_device, check_threads
from keyedopt.cli.progress import progress
from keyedopt.conformance.results import model as results
from keyedopt.conformance.targets.find import find


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; the options of `keyedopt.cli.bench` say what each means."""

    workloads: tuple[str, ...]
    tasks: tuple[str, ...]
    imports: tuple[str, ...]
    implementation: str
    device: str
    threads: int
    rounds: int
    output: Path | None

    def keys(self) -> list[Key]:
        """Check the options, and return the comparisons to measure.

        Raises:
            RequestError, TargetError, ResultError: an option is wrong.
        """
        keys = [(work.name, task.name) for work, task in chosen(self.workloads, self.tasks)]
        find(self.implementation, self.imports)
        check_device(self.device)
        check_threads(self.threads)
        if self.output is not None:
            results.refuse_unwritable(self.output)
        return keys


@contextmanager
def built_pair(
    root: Path, commits: Sequence[str], asked: Asked
) -> Iterator[tuple[Request, Callable[[str, int, int], Any]]]:
    """Build two commits under a progress bar; yield what a round measures, and the bar's function.

    Raises:
        BuildError: a commit cannot be built.
    """
    with progress("starting") as step, commit_builds.built_commits(root, commits, step) as trees:
        first, second = (trees[commit] for commit in commits)
        targets = (asked.implementation, asked.implementation)
        yield Request((first, second), targets, asked.device, asked.threads, asked.imports), step
