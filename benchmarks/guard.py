"""To write a baseline and to hold it against today's implementation: what the command and the trials do."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from keyedopt.benchmarks import baseline as baselines
from keyedopt.benchmarks import builds, gate, rounds
from keyedopt.benchmarks.baseline import Baseline, BaselineError
from keyedopt.benchmarks.gate import LIMITS, Change, Limits
from keyedopt.benchmarks.rounds import Key, Measured, Request
from keyedopt.conformance.results import model as results

#: Rounds of a baseline, and how many rounds measure ratios to peers where those are only shown.
ROUNDS, PEER_ROUNDS = 8, 2

#: Called with what comes next, how much is done, and of how much.
Progress = Callable[[str, int, int], object]


def nobody(text: str, done: int, total: int) -> None:
    """Tell nobody."""


def write(
    path: Path,
    request: Request,
    pairs: Sequence[tuple[str, str]],
    count: int = ROUNDS,
    progress: Progress = nobody,
) -> tuple[Baseline, dict[Key, str]]:
    """Measure some rounds, and write a baseline, with the build beside it if the implementation is ours.

    Args:
        path: the file.
        request: what is measured.
        pairs: workloads and tasks.
        count: rounds.
        progress: told before each round.

    Returns:
        the baseline, and what could not be measured, with the reason.

    Raises:
        BaselineError: nothing could be measured.
    """
    ours = builds.is_ours(request.implementation)
    archive = builds.packed(builds.of_today()) if ours else None
    against_peers, total = (PEER_ROUNDS, PEER_ROUNDS + count) if ours else (count, count)
    with rounds.trees(archive) as at:
        progress("against peers", 0, total)
        first = rounds.against_peers(request, [(*pair, "") for pair in pairs], at)
        keys = {one.key if one.slowdown is not None else (*one.key[:2], ""): one for one in first}
        shown = [key for key in keys if key[2]]
        found = list(first)
        for number in range(1, against_peers):
            progress("against peers", number, total)
            found += rounds.against_peers(request, shown, at) if shown else []
        logs, ratios = (
            _logs(found),
            {key: [math.exp(-log) for log in logs] for key, logs in _logs(found).items()},
        )
        if ours:
            found = []
            for number in range(count):
                progress("against itself", against_peers + number, total)
                found += rounds.against_build(request, list(keys), at, request.implementation)
            logs = _logs(found)
    whole = {key: values for key, values in logs.items() if len(values) == count}
    left_out = {one.key: one.why for one in found if one.why}
    if not whole:
        raise BaselineError(
            f"nothing could be measured: {next(iter(left_out.values()), 'nothing was asked for')}"
        )
    build, beside = None, None
    if archive is not None:
        digest = builds.digest(archive)
        beside = builds.beside(path, digest)
        build = {"file": beside.name, "sha256": digest}
    made = baselines.made_of(whole, ratios, request.implementation, request.device, request.threads, build)
    before = _build_of(path)
    if archive is not None and beside is not None:
        results.write_atomically(beside, archive)
    results.write_atomically(path, made.to_text())
    if before is not None and before != beside:  # nothing names it any more
        before.unlink(missing_ok=True)
    return made, left_out


def _build_of(path: Path) -> Path | None:
    """Return where the build of a baseline lies that is to be replaced, if there is one."""
    try:
        build = baselines.read(path).build
    except BaselineError:
        return None
    return path.parent / build["file"] if build and build["file"].endswith(builds.SUFFIX) else None


def _logs(found: Sequence[Measured]) -> dict[Key, list[float]]:
    """Return the slowdowns of each comparison, in order."""
    logs: dict[Key, list[float]] = {}
    for one in found:
        if one.slowdown is not None:
            logs.setdefault(one.key, []).append(one.slowdown)
    return logs


def hold(
    baseline: Baseline,
    folder: Path,
    request: Request,
    limits: Limits = LIMITS,
    progress: Progress = nobody,
    ratios: bool = True,
) -> tuple[dict[Key, Change], dict[Key, float]]:
    """Compare today's implementation with a baseline; return what became of it, and ratios to peers today.

    Args:
        baseline: what is compared with.
        folder: where its build lies.
        request: what is measured; peers are those of the baseline.
        limits: what is looked for.
        progress: told before each round.
        ratios: whether ratios to peers are measured where they decide nothing.

    Raises:
        BuildError: the build of the baseline cannot be used.
    """
    archive = None
    if baseline.build is not None:
        archive = builds.read(folder / baseline.build["file"], baseline.build["sha256"])
    total = len(baseline.rows)
    found: list[Measured] = []
    with rounds.trees(archive) as at:

        def measure(wanted: Sequence[Key]) -> Sequence[Measured]:
            if archive is not None:
                return rounds.against_build(request, wanted, at, baseline.implementation)
            found.extend(measured := rounds.against_peers(request, wanted, at))
            return measured

        progress("first round", 0, total)
        changes = gate.judge(
            baseline,
            measure,
            limits,
            lambda done, left: progress(f"rounds: {done}, undecided: {left}", total - left, total),
        )
        with_peers = [key for key in baseline.ratios() if changes[key].rounds]
        if archive is not None and ratios and with_peers:
            progress("ratios to peers", total, total)
            found = rounds.against_peers(request, with_peers, at)
    means = {key: math.exp(-sum(logs) / len(logs)) for key, logs in _logs(found).items()}
    return changes, means
