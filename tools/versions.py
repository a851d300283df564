"""``python -m keyedopt.tools.versions [TORCH…]`` checks keyedopt on versions of torch, and prints a table.

Each version gets an environment of its own in ``--environments``, with the FBGEMM and torchrec of its time.
`reference` and `fused` must pass, and the gates of the peers be green with their lists. The results go to
``--output``. The exit code is 1 if one is not.
"""

import argparse
import datetime
import platform
import subprocess
import sys
import venv
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


def install(torch: str, folder: Path) -> Path:
    """Make the environment of a version of torch; return its folder of commands."""
    fbgemm, torchrec = RELEASES[torch]
    commands = folder / torch / "bin"
    venv.create(folder / torch, with_pip=True, clear=True)
    pip = [str(commands / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, str(ROOT), f"torch=={torch}"], check=True)
    if fbgemm:
        subprocess.run([*pip, f"fbgemm-gpu-cpu=={fbgemm}"], check=True)
    if torchrec:
        subprocess.run([*pip, "--no-deps", f"torchrec=={torchrec}"], check=True)
        subprocess.run([*pip, *BESIDE_TORCHREC], check=True)
    return commands


def check(torch: str, commands: Path, output: Path) -> dict[str, bool]:
    """Check all targets that the environment has; return whether each gate is green."""
    peers = [
        "torch",
        *(name for name, one in zip(("fbgemm", "torchrec"), RELEASES[torch], strict=True) if one),
    ]
    green = {}
    for target in ("reference", "fused", *peers):
        listed = ["--expectations", target] if target in peers else []
        path = output / f"{target}-{torch}.json"
        command = [str(commands / "keyedopt"), "check", target, *listed, "--output", str(path)]
        green[target] = subprocess.run(command, cwd=output, check=False).returncode == 0
    return green


def row(torch: str, green: dict[str, bool]) -> tuple[str, ...]:
    """Return the row of the table: each of ours, and the peers that were checked."""
    words = {name: "pass" if one else "FAIL" for name, one in green.items()}
    peers = ", ".join(f"{name} {word}" for name, word in words.items() if name not in ("reference", "fused"))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return (torch, platform.python_version(), today, words["reference"], words["fused"], peers)


def main() -> int:
    """Check the versions that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="TORCH", help=f"of {', '.join(RELEASES)}, or lowest")
    parser.add_argument("--environments", type=Path, default=Path("versions"))
    parser.add_argument("--output", type=Path, default=Path("results"))
    options = parser.parse_args()
    wanted = [next(iter(RELEASES)) if one == "lowest" else one for one in options.versions or RELEASES]
    if unknown := [one for one in wanted if one not in RELEASES]:
        parser.error(f"there is no torch {unknown[0]!r} here; there are: lowest, {', '.join(RELEASES)}")
    options.output.mkdir(parents=True, exist_ok=True)
    lines: list[tuple[str, ...]] = [HEAD, ("---",) * len(HEAD)]
    failed = False
    for torch in wanted:
        commands = install(torch, options.environments.resolve())
        green = check(torch, commands, options.output.resolve())
        lines.append(row(torch, green))
        failed = failed or not all(green.values())
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
