"""Name this machine for asv: ``python -m keyedopt.benchmarks.machine [--beside] [NAME]``.

asv keeps results by machine, and takes the host's name where nothing else is given. Here a machine is called
by what matters to speed (``2-core-avx512-epyc``, ``16-core-avx2-xeon-h200``), so that results of hosts alike
lie together and no host's name is published. `gpu` and `cuda` are dimensions of asv's page, as is the name.

The machine becomes the only one that asv knows, so that it takes it unless told otherwise; with ``--beside``
those that it knows already stay, and asv is told by ``--machine``.
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

#: Where asv looks, and the version of the format.
FILE, VERSION = ".asv-machine.json", 1
#: Words of a processor's name that do not tell it apart.
COMMON = {"amd", "intel", "r", "tm", "cpu", "processor", "core", "gen", "with", "family", "arm", "nvidia"}


def word(name: str) -> str:
    """Return the word of a processor's name that tells it apart.

    >>> word("AMD EPYC 9R14 96-Core Processor"), word("Intel(R) Xeon(R) CPU"), word("NVIDIA H200")
    ('epyc', 'xeon', 'h200')
    """
    words = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part not in COMMON]
    return next((part for part in words if part), "unknown")


def describe(name: str = "") -> dict[str, str]:
    """Return what asv is to know of this machine; all values are texts.

    Args:
        name: what to call it; by default cores, instruction set, processor and GPU.
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
        "cuda": torch.version.cuda or "" if gpu else "",
    }


def remember(about: dict[str, str], file: Path, beside: bool = False) -> None:
    """Make a machine the one that asv takes: the only one in its file.

    The only one in its file is what asv takes if ``--machine`` does not say which.

    Args:
        about: see `describe`.
        file: asv's file.
        beside: whether other machines in it stay.

    Raises:
        ValueError: the file is none of asv's; it is left as it is.
    """
    known: dict[str, Any] = {}
    if file.exists():
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            version = known["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no list of asv's machines: remove it") from error
        if version != VERSION:
            raise ValueError(f"{file} has version {version!r} of asv's format, not {VERSION}")
    listed = {**(known if beside else {}), about["machine"]: about, "version": VERSION}
    write_atomically(file, json.dumps(listed, indent=4) + "\n")


def main() -> int:
    """Name the machine; return 0, or 2 where that cannot be."""
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
