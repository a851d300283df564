"""Unpack what `gpu_bundle` made: ``python unpack_bundle.py BUNDLE SITE``; needs only the standard library.

SITE gets ``packages`` for PYTHONPATH, in which `keyedopt` is a tree of links to the checkout in the
bundle, and ``environment.sh``, which sets the variables that `first_light` reads. A second call with the
same bundle changes nothing.
"""

import shlex
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

#: Archives, and the folders of the site into which they are unpacked.
ARCHIVES = {
    "checkout.tar.xz": "checkout",
    "extensions.tar.xz": "checkout",
    "fbgemm.tar.xz": "packages",
    "commits.tar.xz": ".",
}
#: The archive of compiled kernels, which stage 1 unpacks if it fits.
KERNELS = "kernels.tar.gz"
MANIFEST = "manifest.json"


def unpack(bundle: Path, site: Path) -> None:
    """Unpack a bundle, unless the site is of this bundle already."""
    known = site / MANIFEST
    manifest = (bundle / MANIFEST).read_bytes()
    if known.exists() and known.read_bytes() == manifest:
        return
    shutil.rmtree(site, ignore_errors=True)
    packages = site / "packages"
    packages.mkdir(parents=True)
    for wheel in sorted((bundle / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    for name, folder in ARCHIVES.items():
        if (bundle / name).exists():
            with tarfile.open(bundle / name) as tar:
                tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer
                tar.extractall(site / folder)
    link(site / "checkout", packages)
    (site / "environment.sh").write_text(environment(bundle, site), encoding="utf-8")
    known.write_bytes(manifest)  # last: a site that was not finished is unpacked again


def link(checkout: Path, packages: Path) -> None:
    """Make the folders of a checkout the packages of `keyedopt`, with its version and entry points."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    (packages / "keyedopt").mkdir()
    for name, folder in project["tool"]["setuptools"]["package-dir"].items():
        (packages / "keyedopt" / name.removeprefix("keyedopt.")).symlink_to(checkout / folder)
    about = project["project"]
    info = packages / f"keyedopt-{about['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    lines = []
    for group, points in about["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def environment(bundle: Path, site: Path) -> str:
    """Return lines of shell that set the variables."""
    values = {
        "TRITON_CACHE_DIR": site / "triton-cache",
        "KEYEDOPT_FIRST_LIGHT_KERNELS": bundle / KERNELS,
        "KEYEDOPT_FIRST_LIGHT_COMMITS": site / "commits",
        "KEYEDOPT_FIRST_LIGHT_REPOSITORY": site / "repository",
    }
    lines = [f"export {name}={shlex.quote(str(path))}" for name, path in values.items()]
    packages = shlex.quote(str(site / "packages"))
    return "\n".join([*lines, f'export PYTHONPATH={packages}"${{PYTHONPATH:+:$PYTHONPATH}}"', ""])


if __name__ == "__main__":
    unpack(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
