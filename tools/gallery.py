"""Make the gallery: check every installed implementation, and make a page and three pictures of the results.

``python -m keyedopt.tools.gallery [--output FOLDER] [RESULT.json ...]`` writes into FOLDER (default: gallery)

- ``results/NAME.json``; a result that is there already is not made again,
- ``site/index.html`` with the results, the results given as arguments, and those of ``benchmarks/results``,
- ``torchrec-A-to-B.md``, the differences from each version of torchrec to the next,
- ``overview.png``, ``matrix.png`` and ``history.png``, if Chromium is installed (``CHROMIUM`` is its path).

Other versions of torchrec are installed into environments of their own, unless a result of torchrec is given.
"""

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from keyedopt.conformance import expectations
from keyedopt.conformance.results import model
from keyedopt.conformance.results.errors import ResultError

ROOT = Path(__file__).parents[1]
NAMES = ("reference", "fused", "torch", "fbgemm", "torchft", "torchrec")
#: Other versions of torchrec, with their torch and FBGEMM.
OTHERS = (("1.6.1", "2.11.0", "1.6.0"), ("1.9.2", "2.14.1", "1.9.0"))
#: What a picture may take, in bytes, and the numbers of colours that are tried, most first.
SIZE, COLOURS = 100_000, (128, 64, 32, 16)
KEYEDOPT = (sys.executable, "-m", "keyedopt.cli.main")


def check(output: Path, name: str, command: Sequence[str] = KEYEDOPT) -> None:
    """Check an implementation unless its result exists. Exit code 1 is a verdict too."""
    if output.exists():
        print(f"exists already: {output}")
        return
    shipped = Path(expectations.__file__).with_name(f"{name}.toml").exists()
    known = ["--expectations", name] if shipped else []
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    line = [*command, "check", name, *known, "--output", str(output)]
    if subprocess.run(line, check=False, env=None if command == KEYEDOPT else environment).returncode > 1:
        print(f"left out: {name}, as {' '.join(line)} gives no result")
        output.unlink(missing_ok=True)


def check_other(folder: Path, version: str, torch: str, fbgemm: str) -> None:
    """Install another version of torchrec into an environment of its own, and check it there."""
    environment = folder / f"env-{version}"
    pip = str(environment / "bin" / "pip")
    steps = [
        *([] if Path(pip).exists() else [[sys.executable, "-m", "venv", str(environment)]]),
        [pip, "install", "--quiet", str(ROOT), f"torch=={torch}", f"fbgemm-gpu-cpu=={fbgemm}"],
        [pip, "install", "--quiet", "--no-deps", f"torchrec=={version}"],
        [pip, "install", "--quiet", "tensordict", "torchmetrics==1.0.3", "pyre-extensions", "tqdm"],
    ]
    output = folder / "results" / f"torchrec-{version}.json"
    if output.exists() or all(subprocess.run(step, check=False).returncode == 0 for step in steps):
        check(output, "torchrec", [str(environment / "bin" / "keyedopt")])
    else:
        print(f"left out: torchrec {version} cannot be installed here; give its result as an argument")


def is_torchrec(path: Path) -> bool:
    """Whether a file is a result of torchrec."""
    try:
        return bool(model.read(path).implementation["name"] == "torchrec")
    except ResultError:
        return False  # the report names the file


def differences(folder: Path) -> None:
    """Write what changed from each version of torchrec to the next."""
    versions = sorted(
        (path.stem.removeprefix("torchrec-") for path in (folder / "results").glob("torchrec-[0-9]*.json")),
        key=Version,
    )
    for before, after in itertools.pairwise(versions):
        files = [str(folder / "results" / f"torchrec-{version}.json") for version in (before, after)]
        done = subprocess.run(
            [*KEYEDOPT, "diff", *files, "--format", "markdown"], check=False, capture_output=True, text=True
        )
        if done.returncode > 1:
            sys.exit(done.stderr.strip())
        (folder / f"torchrec-{before}-to-{after}.md").write_text(done.stdout, encoding="utf-8")


def pictures(folder: Path, browser: str) -> None:
    """Take pictures of three views of the page, with as many colours as fit into `SIZE`."""
    from PIL import Image

    for view in ("overview", "matrix", "history"):
        path = folder / f"{view}.png"
        page = f"{(folder / 'site' / 'index.html').resolve().as_uri()}#{view}"
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1400,1000",
        ]
        shot = [*flags, "--virtual-time-budget=5000", f"--screenshot={path}", page]
        subprocess.run([browser, *shot], check=True, stderr=subprocess.DEVNULL)
        with Image.open(path) as image:
            plain = image.convert("RGB")
        for colours in COLOURS:
            plain.quantize(colours).save(path, optimize=True)
            if path.stat().st_size <= SIZE:
                break


def main(words: list[str] | None = None) -> int:
    """Make the gallery and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("given", type=Path, nargs="*", metavar="RESULT.json")
    parser.add_argument("--output", type=Path, default=Path("gallery"), metavar="FOLDER")
    parser.add_argument("--commit-url", default="", help="https://…/{commit}, to which the history links")
    asked = parser.parse_args(words)
    folder = asked.output
    (folder / "results").mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        there = importlib.util.find_spec("torchrec") is not None
        version = f"-{importlib.metadata.version(name)}" if name == "torchrec" and there else ""
        check(folder / "results" / f"{name}{version}.json", name)
    if not any(map(is_torchrec, asked.given)):
        for other in OTHERS:
            check_other(folder, *other)
    speeds = [
        path for path in (ROOT / "benchmarks" / "results").rglob("*.json") if "trials" not in path.parts
    ]
    files = [str(path) for path in (folder / "results", *asked.given, *sorted(speeds))]
    forms = [word for form in ("html", "markdown", "badge", "csv") for word in ("--format", form)]
    link = ["--commit-url", asked.commit_url] if asked.commit_url else []
    line = [*KEYEDOPT, "report", *files, "--output", str(folder / "site"), *forms, "--plots", *link]
    code = subprocess.run(line, check=False).returncode
    if code > 1:
        return code
    differences(folder)
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("left out: the pictures, as Chromium is missing")
    else:
        pictures(folder, browser)
    print(f"written: {folder / 'site' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
