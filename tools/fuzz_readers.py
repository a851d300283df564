"""Give every reader of files damaged and forged inputs: each is read, or refused in one line.

``python -m keyedopt.tools.fuzz_readers [COUNT] [SEED]`` makes COUNT inputs (a million by default) in equal
parts for each reader: results, journals and the other files of a report, lists of known failures, comparisons
of precision, asv's history, traces and the metadata of adapters; fewer for signatures and Parquet, which
start a program. It prints the number of inputs that were read and refused, and ends with 1 at the first input
that raises another error, takes more than `SECONDS`, or needs more than `MEMORY`.
"""

import contextlib
import copy
import io
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from keyedopt.benchmarks import traces
from keyedopt.benchmarks.asv import history
from keyedopt.cli.report import clauses
from keyedopt.cli.verify import sign, verify
from keyedopt.conformance import expectations
from keyedopt.conformance.results import model, precision
from keyedopt.conformance.results.errors import KeyedoptError, ResultError
from keyedopt.conformance.results.junit import junit
from keyedopt.conformance.results.markdown import markdown
from keyedopt.conformance.targets.find import GROUP, registered
from keyedopt.reports.diff import CompareError, difference
from keyedopt.reports.load import load
from keyedopt.tools import sample

#: Seconds that one input may take.
SECONDS = 20
#: Bytes of data that all inputs may need at a time.
MEMORY = 4 << 30
#: The files of a report that are read together; the tables of each are made once.
TOGETHER = 50

#: Values that replace others.
NASTY: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e308, -1e308, float("inf"), float("nan"), 10**39, 2**63, -(2**63), 5e-324),
    *("", "x" * 3000, "\x00\x1b[31m", "\ud800", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"),
    *("2026-01-01", "__import__('os').system('id')", "../../../etc/passwd", "9" * 4000, "KEYED-001"),
    *([], {}, [[]], [None], {"": None}, {"python": "nan"}, {"python": "1" * 5000}, ["x"] * 300),
    *([[str(n) for n in range(30)]] * 12, {str(n): n for n in range(300)}),
)
#: Texts that replace a part of a file.
TEXTS = (
    b"1" * 400,
    b"9" * 4000,
    b"[" * 3000,
    b'{"a":' * 3000,
    b"1e999",
    b"NaN",
    b"\xff",
    b"\x00",
    b"]",
    b",",
)


def forged(plain: Any, dice: random.Random) -> Any:
    """Return JSON data with up to three values replaced, dropped, repeated or moved; the rest is shared."""
    plain = copy.copy(plain)
    for _ in range(dice.choice((1, 1, 1, 3))):
        place = plain
        while isinstance(place, dict | list) and place:
            key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
            below = place[key] = copy.copy(place[key])
            if not isinstance(below, dict | list) or not below or dice.random() < 0.2:
                what = dice.random()
                if what < 0.7:
                    place[key] = dice.choice(NASTY)
                elif what < 0.85:
                    del place[key]
                elif isinstance(place, list):
                    place.append(below)
                else:
                    place[f"{key}{dice.choice(('', 'x'))}"] = dice.choice(NASTY)
                break
            place = below
    return plain


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Return bytes with a part cut out, replaced, repeated or changed."""
    start = dice.randrange(len(data) + 1)
    end = min(len(data), start + dice.choice((0, 1, 2, 10, 1000)))
    return dice.choice(
        (
            lambda: data[:start],
            lambda: data[:start] + data[end:],
            lambda: data[:start] + dice.choice(TEXTS) + data[end:],
            lambda: data[:end] + data[start:],
            lambda: data[:start] + dice.randbytes(3) + data[end:],
        )
    )()


def mutated(plain: Any, dice: random.Random) -> bytes:
    """Return the bytes of forged data, some of them damaged."""
    data = json.dumps(forged(plain, dice)).encode()
    return damaged(data, dice) if dice.random() < 0.15 else data


def _report_seeds() -> list[Any]:
    check = sample.check(0, 3, 3)
    check["cases"] = [*check["cases"][:5], *check["cases"][-3:]]
    for case in check["cases"]:
        if "errors" in (case.get("observed") or {}):
            case["observed"] = {"errors": case["observed"]["errors"][:3]}
    check["cases"][0] |= {
        "outcome": "known",
        "known": {"reason": "r", "link": "l"},
        "expected": "a",
        "seen": "b",
    }
    check["cases"][0] |= {"observed": {"with": [1, {"a": "b"}]}, "dtype": "float32", "inputs": {"a": [1]}}
    curve = {"stages": [{"policy": "LINEAR"}], "points": [[0, "0.1", 0.1], [1, "0.2", 0.2]]}
    check["cases"][1] |= {"observed": {"rates": [[0, 0.1], [1, 0.2]]}, "inputs": {"curve": curve}}
    check["options"] |= {"suite": "0.1", "areas": ["keyed"]}
    asv = {
        "version": 2,
        "commit_hash": "c" * 40,
        "date": 1.7e12,
        "params": {"machine": "m", "cpu": "c"},
        "python": "3.11",
        "result_columns": ["result", "params", "stats_ci_99_a", "stats_ci_99_b"],
        "results": {"time_a": [[0.1, None], [["'a'", "'b'"]], [0.1, None], [0.2, None]]},
    }
    stats = {"median": 1.0, "q1": 0.9, "q3": 1.1}
    pytest = {
        "version": "5.1.0",
        "machine_info": {"node": "n", "cpu": {"brand_raw": "b"}, "python_version": "3.11"},
        "commit_info": {"id": "i"},
        "datetime": "2026-01-01T00:00:00+00:00",
        "benchmarks": [{"fullname": "f[1]", "params": {"a": 1}, "stats": stats}],
    }
    return [check, sample.bench(0), asv, pytest]


def reports(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Load files of reports, many together, compare two of them, and write a result in its formats."""
    seeds, known = _report_seeds(), clauses()
    good = folder / "good.json"
    good.write_text(json.dumps(seeds[0]))
    before = load([good], known)
    for _ in range(0, count, TOGETHER):
        paths = [folder / f"{number}.json" for number in range(TOGETHER)]
        for path in paths:
            path.write_bytes(mutated(dice.choice(seeds), dice))
        tables = load([good, *paths], known)
        assert not tables.runs.empty, "a bad file spoils a good one"
        with contextlib.suppress(CompareError):
            one = load(paths[:1], known)
            if not one.runs.empty:
                said = difference(before, one)
                said.text(), said.markdown()
        refused = len(tables.problems)
        yield from (number >= refused for number in range(TOGETHER))


def results(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Read results and journals, judge them, write them in other formats, and compare precision."""
    seed = _report_seeds()[0]
    path, journal = folder / "x.json", folder / "x.json.journal"
    for number in range(count):
        if number % 4:
            path.write_bytes(mutated(seed, dice))
        else:
            head = {**seed, "cases": []}
            lines = [json.dumps(forged(one, dice)) for one in (head, *seed["cases"])]
            journal.write_bytes(damaged("\n".join(lines).encode("utf-8", "replace"), dice))
        with _refusal() as outcome:
            found = model.read(path if number % 4 else journal, partial=True)
            junit(found), markdown(found)
            precision.median_errors(found)
            expectations.apply(found, (), folder / "known.toml")
        yield outcome[0]


def known_failures(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Read lists of known failures."""
    entry = b'[[known]]\nclause = "KEYED-001"\ncases = ["test_a::test_b[1]"]\nreason = "r"\nlink = "l"\n'
    entry += b'expires = 2027-05-31\nwhen = {torch = ">=2.11", device = "cpu"}\n'
    path = folder / "known.toml"
    for _ in range(count):
        path.write_bytes(damaged(damaged(entry * 2, dice), dice))
        with _refusal() as outcome:
            expectations.read(path)
        yield outcome[0]


def asv_history(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Read asv's results, as its own tool does."""
    seed = _report_seeds()[2]
    (folder / "machine").mkdir()
    about = {"version": 2, "time_a": {"param_names": ["a"], "unit": "seconds"}}
    for _ in range(count):
        (folder / "benchmarks.json").write_bytes(
            json.dumps(forged(about, dice) if dice.random() < 0.2 else about).encode()
        )
        (folder / "machine" / "x.json").write_bytes(mutated(seed, dice))
        with _refusal() as outcome:
            history.read(folder)
        yield outcome[0]


def recorded(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Read traces of torch.save."""
    import torch

    path = folder / "x.pt"
    torch.save({"indices": torch.tensor([0, 1, 2]), "lengths": torch.tensor([1, 2])}, path)
    yield from _damaged_traces(count, dice, path)


def recorded_as_parquet(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Read traces of Parquet, each in a process of its own."""
    import pyarrow
    from pyarrow import parquet

    path = folder / "x.parquet"
    parquet.write_table(pyarrow.table({"indices": [[0, 1]], "offsets": [[0, 1]]}), path)
    yield from _damaged_traces(count, dice, path)


def _damaged_traces(count: int, dice: random.Random, path: Path) -> Iterator[bool]:
    good = path.read_bytes()
    for _ in range(count):
        path.write_bytes(damaged(good, dice))
        with _refusal() as outcome:
            traces.read(path, 4)
        yield outcome[0]


def signed(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Verify results with a signature; results and signatures are damaged."""
    path, signature, key = folder / "x.json", folder / "x.json.sig", folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    path.write_text(json.dumps(_report_seeds()[0]))
    good = sign(path, key).read_bytes()
    for _ in range(count):
        path.write_bytes(mutated(_report_seeds()[0], dice) if dice.random() < 0.2 else path.read_bytes())
        signature.write_bytes(damaged(good, dice))
        with _refusal() as outcome, contextlib.redirect_stdout(io.StringIO()):
            verify(path, None, None)
        yield outcome[0]


def adapters(count: int, dice: random.Random, folder: Path) -> Iterator[bool]:
    """Read the entry points that name adapters in the metadata of installed packages."""
    about = folder / "acme-1.0.dist-info"
    about.mkdir()
    good = f"[{GROUP}]\nacme = acme_keyedopt:implementation\nother = a.b\n\n[console_scripts]\nx = y:z\n"
    before = sys.path
    for number in range(count):
        # a new folder, because importlib.metadata keeps what it has read
        about = about.rename(folder / f"acme-{number}.dist-info")
        (about / "METADATA").write_bytes(damaged(b"Metadata-Version: 2.1\nName: acme\nVersion: 1\n", dice))
        (about / "entry_points.txt").write_bytes(damaged(good.encode(), dice))
        sys.path = [str(folder)]
        try:
            with _refusal() as outcome:
                for point in registered().values():
                    f"{point.module}:{point.attr}"
        finally:
            sys.path = before
        yield outcome[0]


@contextlib.contextmanager
def _refusal() -> Iterator[list[bool]]:
    """Yield a list whose only item says at the end whether an input was read, or refused in short."""
    outcome = [True]
    try:
        yield outcome
    except KeyedoptError as error:
        outcome[0] = False
        if len(str(error)) > 20_000:
            raise ValueError("a refusal is one short line") from error


READERS: dict[str, Callable[[int, random.Random, Path], Iterator[bool]]] = {
    "reports": reports,
    "results": results,
    "known failures": known_failures,
    "asv": asv_history,
    "traces": recorded,
    "traces of Parquet": recorded_as_parquet,
    "signatures": signed,
    "adapters": adapters,
}
#: The part of an equal share that a reader gets which starts a program for each input.
SHARES = {"signatures": 0.01, "traces of Parquet": 0.01}


def fuzz(name: str, count: int, seed: int) -> tuple[int, int]:
    """Give a reader so many inputs; return how many of them it read, and how many it refused."""
    dice, counts = random.Random(f"{name} {seed}"), [0, 0]
    with tempfile.TemporaryDirectory(prefix="keyedopt-fuzz-") as scratch:
        outside = Path(scratch, "outside")
        folder = outside / "folder"
        folder.mkdir(parents=True)
        for read in READERS[name](count, dice, folder):
            signal.alarm(SECONDS)
            counts[not read] += 1
            if sum(counts) >= count:
                break
        signal.alarm(0)
        assert [path.name for path in outside.iterdir()] == ["folder"], "a reader wrote a file"
    return counts[0], counts[1]


def main() -> int:
    """Fuzz every reader; see the module's docstring."""
    numbers = [int(word) for word in sys.argv[1:]]
    count, seed = [*numbers, *(1_000_000, 0)[len(numbers) :]][:2]
    limit = min(MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1] & (2**63 - 1))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    share = -(-count / (sum(SHARES.get(name, 1) for name in READERS)) // 1)
    for name in READERS:
        try:
            read, refused = fuzz(name, round(share * SHARES.get(name, 1)), seed)
        except ResultError as error:
            print(f"{name}: a refusal escaped: {error}")
            return 1
        print(f"{name}: {read} read, {refused} refused", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
