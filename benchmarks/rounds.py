"""A round: comparisons measured by two fresh processes in turn, today's implementation and another one.

The other one is what the implementation was when a baseline was written, of the build kept beside it, or a
peer. How two implementations of the same profile compare is a matter of their code; how different ones do is
one of the machine's load too: what others do takes more of the memory's time than of the processor's, or the
other way round, and ratios to a peer shift by some percent. So what is judged is the former.
"""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keyedopt.benchmarks import builds, sides
from keyedopt.benchmarks.sides import Side

#: A workload, a task, a peer.
Key = tuple[str, str, str]
#: What ours is compared with: the first of these that is installed and does the task.
PEERS = ("fbgemm", "torch", "torchrec", "reference")


@dataclass(frozen=True)
class Request:
    """What rounds measure.

    Args:
        implementation: the target that is measured.
        device, threads: where, and on how many threads.
        peers: targets that it may be compared with.
    """

    implementation: str
    device: str = "cpu"
    threads: int = 1
    peers: tuple[str, ...] = PEERS


@dataclass(frozen=True)
class Measured:
    """What a round says of one comparison.

    Args:
        key: what was compared.
        other: the target that the second process measured.
        slowdown: log(ours / the other's), of lower quartiles; None where a side could not do it.
        why: why there is none.
    """

    key: Key
    other: str
    slowdown: float | None
    why: str = ""


@dataclass(frozen=True)
class Trees:
    """Where today's package can be imported from, and where the one that a baseline is of."""

    today: Path
    then: Path | None = None


@contextlib.contextmanager
def trees(archive: bytes | None = None) -> Iterator[Trees]:
    """Give trees of today and of an archive, in folders that are alike; they go at the end.

    Raises:
        BuildError: the archive cannot be unpacked.
    """
    with tempfile.TemporaryDirectory(prefix="keyedopt-sides-") as folder:
        for name in ("0", "1"):
            (Path(folder) / name).mkdir()
        today = sides.tree(Path(folder) / "0", builds.of_today())
        then = None
        if archive is not None:
            parts = builds.unpack(archive, Path(folder) / "1" / "build")
            then = sides.tree(Path(folder) / "1", parts)
        yield Trees(today, then)


def against_build(request: Request, wanted: Sequence[Key], at: Trees, implementation: str) -> list[Measured]:
    """Measure against what an implementation was in the build of a baseline."""
    assert at.then
    return list(_round(request, (at.today, at.then), dict.fromkeys(wanted, (implementation,))))


def against_peers(request: Request, wanted: Sequence[Key], at: Trees) -> list[Measured]:
    """Measure against peers; where a key names none, against the first of the request's that has the task."""
    return [
        replace(one, key=(*one.key[:2], one.other))
        for one in _round(
            request, (at.today, at.today), {key: (key[2],) if key[2] else request.peers for key in wanted}
        )
    ]


def _round(
    request: Request, folders: tuple[Path, Path], wanted: Mapping[Key, Sequence[str]]
) -> Iterator[Measured]:
    """Measure by two fresh processes; the second one measures the first of some targets that has the task."""
    with contextlib.ExitStack() as stack:
        both = [Side(folder, request.threads) for folder in folders]
        for side in both:
            stack.callback(side.close)
        for key, others in wanted.items():
            what = (*key[:2], request.device, "")
            said = sides.start(both, [(request.implementation, *what), (others[0], *what)])
            tried = 1
            while said[1] and tried < len(others):
                said[1:] = sides.start(both[1:], [(others[tried], *what)])
                tried += 1
            if any(said):
                yield Measured(key, others[tried - 1], None, next(filter(None, said)))
            else:
                ours, theirs = map(sides.kept, sides.in_turn(both))
                yield Measured(key, others[tried - 1], math.log(ours / theirs))
