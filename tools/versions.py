"""``python -m keyedopt.tools.versions [TORCH…]`` checks keyedopt on versions of torch, and prints a table.

Each version gets an environment of its own in ``--environments``, with the FBGEMM and torchrec of its time.
``--python 3.12`` names another interpreter; the option may be repeated. `reference` and `fused` must pass,
and the gates of the peers be green with their lists; ``--no-peers`` leaves the peers out. The results go to
``--output``. The exit code is 1 if one is not.
"""

import argparse
import datetime
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The releases of FBGEMM and torchrec beside each release of torch, the lowest torch first.
RELEASES: dict[str, tuple[str | None, str | None]] = {
    "2.11.0": ("1.6.0", None),
    "2.12.0": ("1.7.0", None),
    "2.13.0": ("1.8.0", "1.8.0"),
    "2.14.1": ("1.9.0", "1.9.2"),
    "2.15.0": (None, None),
}
HEAD = ("torch", "Python", "date", "reference", "fused", "peers")
#: What torchrec needs besides torch and FBGEMM.
BESIDE_TORCHREC = ("tensordict", "torchmetrics==1.0.3", "pyre-extensions", "tqdm")


def find_python(name: str) -> str | None:
    """Return the path of an interpreter, or None if it is missing.

    Args:
        name: a path, a command, or a version such as ``3.12``, which means the command ``python3.12``.
    """
    return shutil.which(name) or shutil.which(f"python{name}")


def version_of(python: str | Path) -> str:
    """Return the version of an interpreter, as ``3.12.1``."""
    command = [str(python), "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def install(torch: str, python: str, folder: Path, peers: bool) -> Path:
    """Make the environment of a version of torch.

    Args:
        torch: one of `RELEASES`.
        python: the path of the interpreter.
        folder: where the environment is made; an environment that is there is made anew.
        peers: whether FBGEMM and torchrec are installed too.

    Returns:
        The environment's folder of commands.
    """
    fbgemm, torchrec = RELEASES[torch] if peers else (None, None)
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    commands = folder / "bin"
    pip = [str(commands / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, str(ROOT), f"torch=={torch}"], check=True)
    if fbgemm:
        subprocess.run([*pip, f"fbgemm-gpu-cpu=={fbgemm}"], check=True)
    if torchrec:
        subprocess.run([*pip, "--no-deps", f"torchrec=={torchrec}"], check=True)
        subprocess.run([*pip, *BESIDE_TORCHREC], check=True)
    return commands


def targets(torch: str, peers: bool) -> list[str]:
    """Return what is checked on a version of torch: `reference`, `fused` and the peers of its time."""
    beside = [name for name, one in zip(("fbgemm", "torchrec"), RELEASES[torch], strict=True) if one]
    return ["reference", "fused", *(["torch", *beside] if peers else [])]


def check(names: list[str], commands: Path, output: Path, label: str) -> dict[str, bool]:
    """Check targets in an environment; return whether each gate is green.

    Args:
        names: of the targets, see `targets`.
        commands: the environment's folder of commands.
        output: the folder of the results.
        label: what the names of the results end with.
    """
    green = {}
    for target in names:
        listed = [] if target in ("reference", "fused") else ["--expectations", target]
        path = output / f"{target}-{label}.json"
        command = [str(commands / "keyedopt"), "check", target, *listed, "--output", str(path)]
        green[target] = subprocess.run(command, cwd=output, check=False).returncode == 0
    return green


def row(torch: str, python: str, green: dict[str, bool]) -> tuple[str, ...]:
    """Return the row of the table: each of ours, and the peers that were checked."""
    words = {name: "pass" if one else "FAIL" for name, one in green.items()}
    releases = dict(zip(("fbgemm", "torchrec"), RELEASES[torch], strict=True))
    peers = ", ".join(
        " ".join(filter(None, (name, releases.get(name), word)))
        for name, word in words.items()
        if name not in ("reference", "fused")
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (torch, python, today, words["reference"], words["fused"], peers or "not checked")


def main(arguments: list[str] | None = None) -> int:
    """Check the versions that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="TORCH", help=f"of {', '.join(RELEASES)}, or lowest")
    parser.add_argument(
        "--python", action="append", metavar="NAME", help="3.12, a command or a path; default: this Python"
    )
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="only reference and fused")
    parser.add_argument("--environments", type=Path, default=Path("versions"))
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    wanted = [next(iter(RELEASES)) if one == "lowest" else one for one in options.versions or RELEASES]
    if unknown := [one for one in wanted if one not in RELEASES]:
        parser.error(f"there is no torch {unknown[0]!r} here; there are: lowest, {', '.join(RELEASES)}")
    pythons = {name: find_python(name) for name in options.python or [sys.executable]}
    if missing := [name for name, path in pythons.items() if path is None]:
        parser.error(f"there is no Python {missing[0]!r}: give the path of an interpreter, or put it on PATH")
    options.output.mkdir(parents=True, exist_ok=True)
    lines: list[tuple[str, ...]] = [HEAD, ("---",) * len(HEAD)]
    failed = False
    for python in filter(None, pythons.values()):
        version = version_of(python)
        for torch in wanted:
            label = f"torch-{torch}-python-{version}"
            commands = install(torch, python, options.environments.resolve() / label, options.peers)
            green = check(targets(torch, options.peers), commands, options.output.resolve(), label)
            lines.append(row(torch, version, green))
            failed = failed or not all(green.values())
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
