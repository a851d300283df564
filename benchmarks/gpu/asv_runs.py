"""Stage 7: asv's suite of tables on the present commit, and on earlier commits that the bundle has.

asv measures the imported keyedopt, and stores the result under the given commit. As Python with
Triton needs no build, an earlier commit is a folder with its `fused` and `reference`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from keyedopt.benchmarks.asv import machine
from keyedopt.benchmarks.gpu.stage import Context
from keyedopt.conformance.results.model import write_atomically

ROOT = Path(__file__).resolve().parents[2]
#: The environment variable that names the folder of earlier commits: a folder for each, named by its hash.
COMMITS = "KEYEDOPT_FIRST_LIGHT_COMMITS"
#: The environment variable that names a git repository with these commits.
REPOSITORY = "KEYEDOPT_FIRST_LIGHT_REPOSITORY"
#: Earlier commits, at most.
MOST = 4
#: What asv measures: time and ratio of `fused` with Triton, and the time of FBGEMM.
PRESENT = r"tables.Train.track_(seconds|ratio)\(.rowwise_adagrad., .8x200k-zipf., .(fused:triton|fbgemm).\)"
EARLIER = r"tables.Train.track_(seconds|ratio)\(.rowwise_adagrad., .8x200k-zipf., .fused:triton.\)"
SMALL = r"tables.Train.track_seconds\(.rowwise_adagrad., .small-step., .fused:torch.\)"
#: The subfolders of asv.
PLACES = {"results": "asv", "env": ".asv-env", "html": "asv-html"}


def run(context: Context) -> None:
    """Save asv's result files, as texts, after each commit."""
    found: dict[str, Any] = {"runs": {}, "files": {}}
    repository = Path(os.environ.get(REPOSITORY) or ROOT)
    name = machine.describe()["machine"]
    home = context.work / "home"
    asv_config(ROOT / "asv.conf.json", context.work, repository)
    machine.remember(machine.describe(), home / machine.FILE)
    present = head(repository)
    if present is None:
        context.save({**found, "outcome": f"{repository} is no git repository, or git is missing"})
        return
    commits = [(present, None), *[(path.name, path) for path in earlier()]]
    for number, (commit, folder) in enumerate(commits):
        if context.left() < 10:
            found["runs"][commit] = "no time left"
            continue
        chosen = SMALL if context.small else EARLIER if number else PRESENT
        command = [sys.executable, "-m", "asv", "run", "--config", str(context.work / "asv.conf.json")]
        command += ["--machine", name, "--environment", f"existing:{sys.executable}"]
        command += ["--set-commit-hash", commit, "--launch-method", "spawn", "--record-samples"]
        paths = [*([str(folder)] if folder else []), os.environ.get("PYTHONPATH", "")]
        settings = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        code, text = context.command([*command, "--bench", chosen], f"asv-{number}", None, **settings)
        outcome = "cut short" if code is None else f"exit code {code}"
        found["runs"][commit] = {"outcome": outcome, "output": text[-1500:]}
        found["files"] = files(context.work / PLACES["results"])
        context.save(found)
    context.save(found)


def earlier() -> list[Path]:
    """Return the folders of earlier commits, the newest first, in the order of their list."""
    folder = os.environ.get(COMMITS)
    listed = Path(folder, "commits.txt") if folder else None
    if folder is None or listed is None or not listed.exists():
        return []
    names = listed.read_text(encoding="utf-8").split()
    return [Path(folder, name) for name in names if Path(folder, name).is_dir()][:MOST]


def head(repository: Path) -> str | None:
    """Return the present commit of a repository; None if it is none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def files(folder: Path) -> dict[str, str]:
    """Return the texts of asv's result files by their paths, for `unpack`."""
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.json"))
    }


def unpack(result: Path, folder: Path) -> None:
    """Write asv's files in the result of this stage to a folder, such as `benchmarks/results/asv`.

    ``python -m keyedopt.benchmarks.gpu.asv_runs RESULT FOLDER`` does this.
    """
    for name, text in json.loads(result.read_text(encoding="utf-8"))["files"].items():
        place = (folder / name).resolve()
        if not place.is_relative_to(folder.resolve()):
            raise ValueError(f"{result}: {name!r} is outside of {folder}")
        write_atomically(place, text)


def asv_config(source: Path, folder: Path, repository: Path) -> None:
    """Write a copy of asv's configuration to a folder, with absolute paths and results in that folder."""
    text = re.sub(r"^\s*//.*$", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    config = json.loads(text)
    config |= {"repo": str(repository), "benchmark_dir": str(source.parent / config["benchmark_dir"])}
    config |= {f"{name}_dir": str(folder / place) for name, place in PLACES.items()}
    write_atomically(folder / "asv.conf.json", json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
