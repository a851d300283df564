"""Make a bundle for a GPU host without a network: ``python -m keyedopt.tools.gpu_bundle [FOLDER]``.

It needs a Python of the host's version with the host's torch and Triton, and what keyedopt needs
(`--python`); pip, git, readelf and xz, and a compiler for the extensions; not a GPU. `first_light.sh` uses
the bundle beside it.

=====================  =====================================================================================
file                   contents
=====================  =====================================================================================
``wheels/``            packages that the host lacks
``checkout.tar.xz``    the present commit, without what a first run does not need
``extensions.tar.xz``  keyedopt's C++ modules for the host's Python
``kernels.tar.gz``     kernels compiled ahead, see `kernel_cache`
``fbgemm.tar.xz``      FBGEMM with the device code of one architecture, for the optimizers that are measured
``commits.tar.xz``     `fused` and `reference` of earlier commits; a git repository without trees and files
``manifest.json``      what is in the bundle, and why something is not
=====================  =====================================================================================
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from keyedopt.benchmarks.gpu import unpack_bundle
from keyedopt.tools.fbgemm_device_code import blank_unused

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "gpu" / "bundle"
#: The largest bundle, in bytes: it travels with a checkout.
LIMIT = 54 << 20
#: What the host lacks of what keyedopt and asv need.
WHEELS = (
    *("tomlkit", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
    *("asv==0.6.6", "asv-runner", "json5", "pympler", "importlib-metadata==8.7.0"),
)
FBGEMM = "fbgemm-gpu==1.6.0"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
#: What a first run does not need of the checkout.
LEFT_OUT = ("docs", "examples", "containers", "tests", "benchmarks/results", "reports/ci")
#: Earlier commits, at most, and how many commits of the Triton backend lie between two of them.
COMMITS, APART = 4, 5
ARCHITECTURE = 90


class Maker:
    """Makes the parts of a bundle.

    Args:
        folder: of the bundle.
        python: the interpreter of the host's version, with the host's torch and Triton.
        scratch: a folder for files that are not part of the bundle.
    """

    def __init__(self, folder: Path, python: str, scratch: Path) -> None:
        self.folder, self.python, self.scratch = folder, python, scratch

    def wheels(self) -> str:
        """Download the wheels that the host lacks."""
        self._download(self.folder / "wheels", *WHEELS)
        return f"{len(list((self.folder / 'wheels').glob('*.whl')))} wheels"

    def checkout(self) -> str:
        """Pack the present commit."""
        plain = self.scratch / "checkout.tar"
        git("archive", "-o", str(plain), "HEAD", ".", *(f":(exclude){name}" for name in LEFT_OUT))
        compress(plain, self.folder / "checkout.tar.xz")
        return git("rev-parse", "HEAD").strip()

    def extensions(self) -> str:
        """Build the C++ modules for the host's Python, and pack them at their places in the checkout."""
        source, built = self.scratch / "source", self.scratch / "built"
        git("worktree", "add", "--detach", "--force", str(source), "HEAD")
        try:
            command = [self.python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(built), str(source)]
            subprocess.run(command, check=True)
        finally:
            git("worktree", "remove", "--force", str(source))
        tree = self.scratch / "extensions"
        with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
            for name in archive.namelist():
                if name.endswith(".so"):
                    place = tree / name.removeprefix("keyedopt/")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(archive.read(name))
        names = sorted(path.name for path in tree.rglob("*.so"))
        if not names:
            raise RuntimeError("no module was built: is there a compiler?")
        pack(tree, self.folder / "extensions.tar.xz", self.scratch)
        return ", ".join(names)

    def kernels(self) -> str:
        """Compile the kernels with the Triton of the host, from the checkout of the bundle."""
        site = self.scratch / "site"
        (self.folder / unpack_bundle.MANIFEST).write_text("{}", encoding="utf-8")
        unpack_bundle.unpack(self.folder, site)
        changed = ("PYTHON", "TRITON")  # which packages or kernels are found
        kept = {name: value for name, value in os.environ.items() if not name.startswith(changed)}
        command = [self.python, "-m", "keyedopt.tools.kernel_cache", "make"]
        command += ["--architecture", str(ARCHITECTURE)]
        command += ["--archive", str(self.folder / unpack_bundle.KERNELS)]
        subprocess.run(command, check=True, env={**kept, "PYTHONPATH": str(site / "packages")})
        return f"triton {version_of(self.python, 'triton')}"

    def fbgemm(self) -> str:
        """Download FBGEMM, blank the device code that is not launched, and pack it."""
        self._download(self.scratch / "fbgemm", FBGEMM)
        tree = self.scratch / "tree"
        with zipfile.ZipFile(next((self.scratch / "fbgemm").glob("*.whl"))) as archive:
            archive.extractall(tree)
        shutil.rmtree(tree / "fbgemm_gpu" / "experimental", ignore_errors=True)
        kept, blanked = blank_unused(tree / "fbgemm_gpu", ARCHITECTURE)
        pack(tree, self.folder / "fbgemm.tar.xz", self.scratch)
        return f"{FBGEMM}, {kept >> 20} MiB of device code kept, {blanked >> 20} MiB blanked"

    def commits(self) -> str:
        """Pack earlier commits that changed the Triton backend, and a repository without trees and files."""
        tree = self.scratch / "history"
        changed = git("rev-list", "HEAD~1", "--", "fused/backends/triton").split()[APART - 1 :: APART]
        listed = changed[:COMMITS]
        for commit in listed:
            place = tree / "commits" / commit / "keyedopt"
            place.mkdir(parents=True)
            plain = self.scratch / "commit.tar"
            git("archive", "-o", str(plain), commit, "fused", "reference")
            with tarfile.open(plain) as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer
                tar.extractall(place)
        (tree / "commits").mkdir(parents=True, exist_ok=True)
        (tree / "commits" / "commits.txt").write_text("\n".join([*listed, ""]), encoding="utf-8")
        server = "git -c uploadpack.allowFilter=true upload-pack"  # it would not read an option of `clone`
        command = ("clone", "-q", "--bare", "--filter=tree:0", "--no-local", "--upload-pack", server)
        git(*command, "--single-branch", ROOT.as_uri(), str(tree / "repository"))
        pack(tree, self.folder / "commits.tar.xz", self.scratch)
        return ", ".join(listed)

    def _download(self, place: Path, *packages: str) -> None:
        place.mkdir(parents=True, exist_ok=True)
        version = version_of(self.python, "python")
        command = [self.python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", version, "--implementation", "cp", "-d", str(place)]
        command += [word for name in PLATFORMS for word in ("--platform", name)]
        subprocess.run([*command, *packages], check=True)


#: The parts, in the order in which they are made; the kernels need the wheels and the checkout.
PARTS: tuple[Callable[[Maker], str], ...] = (
    Maker.wheels,
    Maker.checkout,
    Maker.extensions,
    Maker.commits,
    Maker.fbgemm,
    Maker.kernels,
)


def make(maker: Maker, chosen: Sequence[str] = ()) -> int:
    """Make the parts, and the manifest; a part that fails is left out, with the reason in the manifest."""
    about: dict[str, object] = {}
    file = maker.folder / unpack_bundle.MANIFEST
    if chosen and file.exists():
        about = json.loads(file.read_text(encoding="utf-8"))
    failed = False
    for part in PARTS:
        if chosen and part.__name__ not in chosen:
            continue
        print(f"{part.__name__}: ", end="", flush=True)
        try:
            about[part.__name__] = part(maker)
        except (OSError, RuntimeError, StopIteration, subprocess.CalledProcessError) as error:
            about[part.__name__] = f"left out: {error}"
            failed = True
        print(about[part.__name__], flush=True)
    listed = sorted(path for path in maker.folder.rglob("*") if path.is_file() and path != file)
    about["files"] = {str(path.relative_to(maker.folder)): digest(path) for path in listed}
    file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in listed)
    print(f"{maker.folder}: {size / 2**20:.1f} MiB of at most {LIMIT >> 20}")
    return int(failed or size > LIMIT)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git(*words: str) -> str:
    """Return the output of git in this checkout."""
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout


def pack(tree: Path, archive: Path, scratch: Path) -> None:
    """Pack the contents of a folder into a compressed archive."""
    plain = scratch / "packed.tar"
    with tarfile.open(plain, "w") as tar:
        for path in sorted(tree.iterdir()):
            tar.add(path, path.name)
    compress(plain, archive)


def compress(plain: Path, archive: Path) -> None:
    """Compress a file with xz, and remove it."""
    with archive.open("wb") as file:
        subprocess.run(["xz", "-T1", "-9", "-c", str(plain)], check=True, stdout=file)
    plain.unlink()


def version_of(python: str, name: str) -> str:
    """Return the version of an interpreter, as "3.12", or of a package in it."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    if name != "python":
        code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the bundle; return 1 if a part is missing or the bundle is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--python", default=sys.executable, help="with the host's torch and Triton")
    parser.add_argument("--part", action="append", default=[], help="make only this part again; repeatable")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        return make(Maker(given.folder.resolve(), given.python, Path(scratch)), given.part)


if __name__ == "__main__":
    sys.exit(main())
