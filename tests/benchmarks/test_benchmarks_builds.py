"""The build that a baseline is of, the processes that measure one build each, and rounds of two of them."""

import io
import math
import shutil
import stat
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
from making import module

from keyedopt.benchmarks import builds, rounds, sides
from keyedopt.benchmarks.builds import BuildError
from keyedopt.benchmarks.rounds import Request
from keyedopt.benchmarks.sides import Side, SideError

# --- builds ---------------------------------------------------------------------------------------


def folders(tmp_path):
    """Return the folders of a small build."""
    for name in ("fused/a.py", "fused/deep/b.so", "reference/c.py", "fused/__pycache__/a.pyc"):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return {part: tmp_path / "source" / part for part in ("fused", "reference")}


def archive(*entries, compression=zipfile.ZIP_STORED):
    """Return an archive of names, each with its contents and the mode of the file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as made:
        for name, contents, mode in entries:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            made.writestr(entry, contents, compression)
    return buffer.getvalue()


def test_a_build_comes_back_as_it_was(tmp_path):
    packed = builds.packed(parts := folders(tmp_path))
    found = builds.unpack(packed, tmp_path / "out")
    assert found == {part: tmp_path / "out" / part for part in parts}
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    assert files == {"fused/a.py", "fused/deep/b.so", "reference/c.py"}
    assert all((tmp_path / "out" / file).read_text() == file for file in files)


def test_the_same_files_make_the_same_bytes(tmp_path):
    packed = builds.packed(parts := folders(tmp_path))
    for path in (tmp_path / "source").rglob("*.*"):
        path.touch()
    assert builds.packed(parts) == packed
    (parts["fused"] / "a.py").write_text("changed")
    assert builds.digest(builds.packed(parts)) != builds.digest(packed)


def test_what_is_measured_of_the_package_is_what_is_kept():
    assert all((folder / "README.md").is_file() for folder in builds.of_today().values())
    assert set(builds.of_today()) == {"fused", "reference"}


def test_an_archive_is_read_only_if_it_is_the_one_that_is_named(tmp_path, monkeypatch):
    path = tmp_path / "x.build.zip"
    with pytest.raises(BuildError, match=r"x\.build\.zip, cannot be read .No such file.*--write-baseline"):
        builds.read(path, "0")
    path.write_bytes(packed := builds.packed(folders(tmp_path)))
    assert builds.read(path, builds.digest(packed)) == packed
    with pytest.raises(BuildError, match="its SHA-256 is another one"):
        builds.read(path, builds.digest(packed + b"x"))
    monkeypatch.setattr(builds, "LARGEST", len(packed) - 1)
    with pytest.raises(BuildError, match="is not the build of the baseline"):
        builds.read(path, builds.digest(packed))


FILE, LINK, FOLDER, DEVICE = stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777, stat.S_IFDIR | 0o755, stat.S_IFCHR


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("../fused/a.py", FILE),
        ("fused/../../a.py", FILE),
        ("fused/../conftest.py", FILE),
        ("/fused/a.py", FILE),
        ("/etc/x", FILE),
        ("fused//a.py", FILE),
        ("./fused/a.py", FILE),
        ("fused\\..\\..\\a.py", FILE),
        ("benchmarks/a.py", FILE),
        ("fused", FILE),
        ("fused/", FOLDER),
        ("fused/a.py", LINK),
        ("fused/a.py", DEVICE),
    ],
)
def test_what_is_no_plain_file_of_a_build_is_not_unpacked(tmp_path, name, mode):
    inside = tmp_path / "in" / "here"
    with pytest.raises(BuildError, match="which is no file of a build"):
        builds.unpack(archive(("reference/first.py", "1", FILE), (name, "/etc/passwd", mode)), inside)
    written = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if not path.is_dir()]
    assert written == ["in/here/reference/first.py"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (b"", "cannot be unpacked"),
        (b"no archive", "cannot be unpacked"),
        (archive(("fused/a.py", "x" * 500, FILE)).replace(b"xxxx", b"yyyy", 1), "cannot be unpacked"),
        (archive(("fused/a.py", "x", FILE), ("fused/a.py/b.py", "x", FILE)), "cannot be unpacked"),
        (archive(), "is empty"),
    ],
)
def test_a_broken_archive_is_refused(tmp_path, made, said):
    with pytest.raises(BuildError, match=said):
        builds.unpack(made, tmp_path)


def test_an_archive_that_swells_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "MOST", 1 << 20)
    made = archive(("fused/a", bytes((1 << 20) + 1), FILE), compression=zipfile.ZIP_DEFLATED)
    assert len(made) < 1 << 12
    with pytest.raises(BuildError, match="larger than 1 MB"):
        builds.unpack(made, tmp_path)
    assert not list(tmp_path.iterdir())


def test_trees_have_the_build_and_todays_benchmarks(tmp_path, small_build):
    packed = builds.packed(builds.of_today())
    small_build.write_text("now")
    with rounds.trees(packed) as at:
        assert [(tree / "keyedopt/fused/code.py").read_text() for tree in (at.today, at.then)] == [
            "now",
            "then",
        ]
        for tree in (at.today, at.then):
            assert (tree / "keyedopt/benchmarks").resolve() == Path(sides.__file__).resolve().parent
        made = at.then
    assert not made.exists()
    assert small_build.exists()


# --- sides ----------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path):
    """Start a process whose worker has a source that is given."""
    started = []

    def start(source):
        for package in ("keyedopt", "keyedopt.benchmarks"):
            module(tmp_path, f"{package}.__init__", "")
        module(tmp_path, "keyedopt.benchmarks.worker", source)
        started.append(Side(tmp_path, 1))
        return started[-1]

    yield start
    for side in started:
        side.close()
        assert side._process.poll() is not None


ANSWERING = "import json, sys\nfor line in sys.stdin:\n    print(json.dumps({}), flush=True)\n"


def test_a_process_that_hangs_is_named(process, monkeypatch):
    monkeypatch.setattr(sides, "PATIENCE", 0.05)
    side = process("import time\ntime.sleep(600)")
    side.tell("time", 0.006)
    with pytest.raises(SideError, match=r"did not answer for 0.05 s at \('time', 0.006\)"):
        side.answer()


def test_a_process_that_ends_is_named(process):
    side = process("import sys\nsys.stdin.readline()\nsys.exit(3)")
    said = r"ended with 3 at \('start', 'fused', 'small-step', 'train-sgd'\)"
    with pytest.raises(SideError, match=said):
        sides.start([side], [("fused", "small-step", "train-sgd", "cpu", "")])
    side.tell("time", 1.0)  # into a pipe that nobody reads
    with pytest.raises(SideError, match="ended with 3"):
        side.answer()


def test_a_process_that_says_why_it_cannot_go_on_is_heard(process):
    both = [process(ANSWERING.format("'it broke'")) for _ in range(2)]
    assert sides.start(both, [("a",), ("b",)]) == ["it broke"] * 2
    with pytest.raises(SideError, match="it broke"):
        sides.in_turn(both)


class Fake:
    """A side that takes no time: what it offers, by target, and how long a run of that takes."""

    seconds: ClassVar[dict[str, float]] = {}
    log: ClassVar[list[tuple]] = []
    closed = 0

    def __init__(self, folder, threads):
        self.number = len([one for one in Fake.log if one[0] == "new"])
        Fake.log.append(("new", folder, threads))

    def tell(self, what, target, *others):
        self.said = (what, target)
        if what == "start":
            self.target = target

    def answer(self):
        Fake.log.append((self.number, *self.said))
        if self.said[0] == "start":
            return "" if self.target in Fake.seconds else f"{self.target} has none"
        return [Fake.seconds[self.target]]

    def close(self):
        Fake.closed += 1


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(rounds, "Side", Fake)
    Fake.seconds, Fake.log, Fake.closed = {}, [], 0
    return Fake


def test_sides_run_in_turn_and_change_places(fake):
    three = [fake("folder", 1) for _ in range(3)]
    fake.seconds = {"a": 0.1, "b": 0.2, "c": 5.0}
    sides.start(three, [("a",), ("b",), ("c",)])
    fake.log.clear()
    times = sides.in_turn(three)
    turns = [[one[0] for one in fake.log[at : at + 3]] for at in range(0, len(fake.log), 3)]
    assert turns == [[0, 1, 2], [1, 0, 2]] * 4 + [[0, 1, 2]]
    assert times == [[0.1] * 9, [0.2] * 9, [5.0] * 9]
    fake.seconds = {"a": 0.0, "b": 0.0, "c": 0.0}
    assert len(sides.in_turn(three)[0]) == sides.MOST


# --- rounds ---------------------------------------------------------------------------------------

KEY = ("small-step", "train-sgd", "")


def test_a_round_takes_the_first_peer_that_offers_the_task(fake):
    fake.seconds = {"fused": 0.1, "torch": 0.2}
    at = rounds.Trees(Path("today"))
    (one,) = rounds.against_peers(Request("fused", threads=2, peers=("fbgemm", "torch", "x")), [KEY], at)
    assert (one.key, one.other) == (("small-step", "train-sgd", "torch"), "torch")
    assert one.slowdown == pytest.approx(-math.log(2))
    assert fake.log[:2] == [("new", Path("today"), 2)] * 2
    assert fake.closed == 2
    named = ("small-step", "train-sgd", "fbgemm")
    (one,) = rounds.against_peers(Request("fused"), [named], at)
    assert (one.slowdown, one.why) == (None, "fbgemm has none")
    (one,) = rounds.against_peers(Request("nope"), [KEY], at)
    assert (one.slowdown, one.why) == (None, "nope has none")


def test_a_round_is_of_todays_build_and_of_the_one_then(fake):
    fake.seconds = {"fused": 0.3, "was": 0.2}
    at = rounds.Trees(Path("today"), Path("then"))
    keys = [("small-step", "train-sgd", "fbgemm"), ("small-step", "train-adam", "")]
    found = rounds.against_build(Request("fused"), keys, at, "was")
    assert [one.key for one in found] == keys
    assert [one.slowdown for one in found] == [pytest.approx(math.log(1.5))] * 2
    assert fake.log[:2] == [("new", Path("today"), 1), ("new", Path("then"), 1)]


GONE = """

class SparseAdam:
    def __init__(self, *arguments, **named):
        raise RuntimeError("it was not there then")
"""


def test_processes_measure_the_build_that_they_are_given(tmp_path, monkeypatch):
    """Real ones: then the reference had no SparseAdam, today it has, so the two can be told apart."""
    for name, value in {"SECONDS": 0.0, "LEAST": 2, "TURN": 0.0}.items():
        monkeypatch.setattr(sides, name, value)
    then = tmp_path / "reference"
    shutil.copytree(builds.of_today()["reference"], then, ignore=shutil.ignore_patterns("__pycache__"))
    with (then / "sparse_adam.py").open("a") as file:
        file.write(GONE)
    keys = [("small-step", "train-sgd", ""), ("sparse-zipf", "sparse-adam", "")]
    request = Request("reference")
    with rounds.trees(builds.packed({"reference": then})) as at:
        steps, sparse = rounds.against_build(request, keys, at, "reference")
        assert math.isfinite(steps.slowdown)
        assert sparse.slowdown is None
        assert "it was not there then" in sparse.why
        (foreign,) = rounds.against_build(request, keys[:1], at, "fused")
        assert "fused" in foreign.why  # the installed one is not measured in its stead
