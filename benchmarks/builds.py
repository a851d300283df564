"""The build that a baseline is of, kept beside it as a zip archive: what is measured of the package.

A build is `keyedopt.fused` and `keyedopt.reference` with what was compiled of them, as they lie in the
package. The baseline names the archive and its SHA-256. An archive holds code that will run: it is unpacked
only if it is the one that the baseline names, and only as plain files below the folder that is meant for it.
"""

import hashlib
import io
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from keyedopt.benchmarks.sides import MEASURED, TODAY

#: What comes after the name of the baseline.
SUFFIX = ".build.zip"
#: Bytes of an archive, and of all that is in it, at most.
LARGEST, MOST = 1 << 26, 1 << 28


class BuildError(Exception):
    """A build that cannot be used here; the message says why and what to do."""


def is_ours(target: str) -> bool:
    """Whether a target is part of this package, so that its build can be kept.

    >>> is_ours("fused"), is_ours("keyedopt.reference"), is_ours("torchrec"), is_ours("keyedopt.benchmarks.x")
    (True, True, False, False)
    """
    module = target.partition(":")[0]
    return module in MEASURED or module.split(".")[:2] in [["keyedopt", part] for part in MEASURED]


def abi() -> str:
    """Return what compiled modules have to be made for.

    >>> abi().startswith("cpython-") or abi() == sys.implementation.cache_tag
    True
    """
    return str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag)


def beside(baseline: Path, digest: str) -> Path:
    """Return where a build is kept beside a baseline: each has a name of its own, so none replaces another.

    >>> beside(Path("a/base.json"), "0123456789abcdef").as_posix()
    'a/base.0123456789ab.build.zip'
    """
    return baseline.with_name(f"{baseline.name.removesuffix('.json')}.{digest[:12]}{SUFFIX}")


def of_today() -> dict[str, Path]:
    """Return the folders of what is measured of the running package, by name."""
    return {part: TODAY / part for part in MEASURED}


def packed(parts: Mapping[str, Path]) -> bytes:
    """Return an archive of some folders, without what Python caches; the same files make the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for part, path in ((part, path) for part, folder in parts.items() for path in _files(folder)):
            name = PurePosixPath(part, path.relative_to(parts[part]).as_posix())
            archive.writestr(zipfile.ZipInfo(str(name)), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def digest(archive: bytes) -> str:
    """Return the SHA-256 of an archive."""
    return hashlib.sha256(archive).hexdigest()


def read(path: Path, expected: str) -> bytes:
    """Return the archive that a baseline names.

    Raises:
        BuildError: it is not there, or it is another one.
    """
    again = "keep both files that --write-baseline writes together, or write them anew"
    try:
        if path.stat().st_size > LARGEST:
            raise BuildError(f"{path} is not the build of the baseline: {again}")
        archive = path.read_bytes()
    except OSError as error:
        raise BuildError(
            f"the build of the baseline, {path}, cannot be read ({error.strerror}): {again}"
        ) from error
    if digest(archive) != expected:
        raise BuildError(f"{path} is not the build of the baseline (its SHA-256 is another one): {again}")
    return archive


def unpack(archive: bytes, folder: Path) -> dict[str, Path]:
    """Write the files of an archive below a folder, and return those of what is measured, by name.

    Raises:
        BuildError: it is no archive, or has something in it that is not a plain file of a build.
    """
    written = 0
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            for entry in opened.infolist():
                target = folder / _checked(entry)
                written += entry.file_size
                if written > MOST:
                    raise BuildError(f"the build of the baseline is larger than {MOST >> 20} MB unpacked")
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(entry) as source:
                    target.write_bytes(source.read(entry.file_size))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError, zlib.error) as error:
        raise BuildError(f"the build of the baseline cannot be unpacked: {error}") from error
    found = {part: folder / part for part in MEASURED if (folder / part).is_dir()}
    if not found:
        raise BuildError("the build of the baseline is empty")
    return found


def _checked(entry: zipfile.ZipInfo) -> str:
    """Return the name of an entry, if it is that of a plain file of a build.

    Raises:
        BuildError: it is not.
    """
    name = entry.filename
    path = PurePosixPath(name)
    kind = entry.external_attr >> 28  # of Unix: 8 is a file, 0 says nothing, 0xA is a link
    inside = len(path.parts) > 1 and path.parts[0] in MEASURED and ".." not in path.parts
    if not inside or str(path) != name or "\\" in name or kind not in (0, 8):
        raise BuildError(f"the build of the baseline has {name!r} in it, which is no file of a build")
    return name
