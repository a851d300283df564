"""Name this machine for asv: ``python -m keyedopt.benchmarks.asv.machine [--beside] [NAME]``.

asv stores results by machine, by default under the host name. Here the name says what matters for speed
(``2-core-avx512-epyc``, ``16-core-avx2-xeon-h200``): equal hosts share results, and no host name is
published. `device` (``cpu``, or the name of the GPU) and `cuda` are dimensions of asv's page, like the name.

The machine replaces all others in asv's file, so that asv selects it by default. With ``--beside`` the others
stay, and ``asv run`` needs ``--machine``.
"""

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

from keyedopt.benchmarks.environment import environment
from keyedopt.conformance.results.model import write_atomically

#: asv's file in the home directory, and the version of its format.
FILE, VERSION = ".asv-machine.json", 1
#: Words of processor names that do not identify a processor.
COMMON = {"amd", "intel", "r", "tm", "cpu", "processor", "core", "gen", "with", "family", "arm", "nvidia"}


def word(name: str) -> str:
    """Return the word of a processor's name that identifies it.

    >>> word("AMD EPYC 9R14 96-Core Processor"), word("Intel(R) Xeon(R) CPU"), word("NVIDIA H200")
    ('epyc', 'xeon', 'h200')
    """
    words = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part not in COMMON]
    return next((part for part in words if part), "unknown")


def describe(name: str = "") -> dict[str, str]:
    """Return asv's description of this machine; all values are texts.

    Args:
        name: its name; by default made of cores, instruction set, processor and GPU.
    """
    where = environment("cuda" if torch.cuda.is_available() else "cpu")
    gpu = str(where["gpu"]["name"]) if where["gpu"] else ""
    capability = str(where["capability"]).lower()
    parts = [f"{where['cores']}-core", capability, word(str(where["cpu"])), *([word(gpu)] if gpu else [])]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "machine": name or "-".join(parts),
        "os": platform.system(),
        "arch": platform.machine(),
        "cpu": str(where["cpu"]),
        "num_cpu": str(where["cores"]),
        "ram": f"{round(pages / 2**30)} GiB",
        "gpu": gpu,
        "device": gpu or "cpu",
        "cuda": torch.version.cuda or "" if gpu else "",
    }


def remember(about: dict[str, str], file: Path, beside: bool = False) -> None:
    """Write a machine to asv's file.

    Args:
        about: its description, see `describe`.
        file: asv's file.
        beside: whether other machines stay in it.

    Raises:
        ValueError: the file is not asv's; it is left unchanged.
    """
    known: dict[str, Any] = {}
    if file.exists():
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            version = known["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a list of asv machines: remove it") from error
        if version != VERSION:
            raise ValueError(f"{file} has version {version!r} of asv's format, not {VERSION}")
    listed = {**(known if beside else {}), about["machine"]: about, "version": VERSION}
    write_atomically(file, json.dumps(listed, indent=4) + "\n")


def main() -> int:
    """Name the machine and print the name; return 0, or 2 on bad input."""
    words = sys.argv[1:]
    beside = words[:1] == ["--beside"]
    names = words[beside:]
    name = names[0] if names else ""
    if len(names) > 1 or (name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)):
        sys.stderr.write("keyedopt: give one name, of letters, digits, '.', '_' and '-'\n")
        return 2
    about = describe(name)
    try:
        remember(about, Path.home() / FILE, beside)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"keyedopt: {error}\n")
        return 2
    print(about["machine"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
