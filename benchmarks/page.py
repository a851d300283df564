"""Make the page of ``asv publish`` work without a network: ``python -m keyedopt.benchmarks.page [FOLDER]``.

asv's page loads its scripts from several hosts, so it shows nothing on a machine that has no network, and
tells those hosts who looks at it. This puts the same scripts beside the page, as npm has them, and takes the
links away.
"""

import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

#: What of a link tells which script it is, and where npm has it: package, version, file.
SCRIPTS = {
    "jquery-3.3.1": ("jquery@3.3.1", "dist/jquery.min.js"),
    "jquery.flot.min": ("jquery-flot@0.8.3", "jquery.flot.js"),
    "jquery.flot.time": ("jquery-flot@0.8.3", "jquery.flot.time.js"),
    "jquery.flot.selection": ("jquery-flot@0.8.3", "jquery.flot.selection.js"),
    "jquery.flot.categories": ("jquery-flot@0.8.3", "jquery.flot.categories.js"),
    "jquery.flot.orderBars": ("flot-orderbars@1.0.0", "js/jquery.flot.orderBars.js"),
    "stupidtable": ("stupid-table-plugin@1.1.3", "stupidtable.min.js"),
    "blueimp-md5": ("blueimp-md5@2.19.0", "js/md5.min.js"),
    "bootstrap.min.js": ("bootstrap@3.1.1", "dist/js/bootstrap.min.js"),
    "bootstrap.min.css": ("bootstrap@3.1.1", "dist/css/bootstrap.min.css"),
}
LINK = re.compile(r'(?P<name>src|href)="(?P<url>https://[^"]+\.(?:js|css))"(?: integrity="[^"]*")?')
#: The folder beside the page.
SCRIPTS_FOLDER = "scripts"


class PageError(Exception):
    """The page cannot be completed; the message says what to do."""


def fetch(packages: set[str], folder: Path) -> None:
    """Have npm bring packages, each into a folder of its name.

    Raises:
        PageError: npm is not there, or cannot bring one.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise PageError("the page's scripts are packages of npm, which is not installed")
    for package in sorted(packages):
        with tempfile.TemporaryDirectory() as scratch:
            command = [npm, "pack", "--silent", package]
            done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
            files = list(Path(scratch).glob("*.tgz"))
            if done.returncode != 0 or len(files) != 1:
                reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
                raise PageError(f"npm cannot bring {package}: {reason}")
            with tarfile.open(fileobj=io.BytesIO(files[0].read_bytes())) as archive:
                _unpack(archive, (folder / package).resolve())


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the files of an archive that lie in the folder; early Pythons 3.11 have no filter that does."""
    for member in archive:
        path = (folder / member.name).resolve()
        file = archive.extractfile(member) if member.isfile() else None
        if file is not None and path.is_relative_to(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read())


def complete(page: str, folder: Path, packages: Path) -> str:
    """Return a page whose links are files in a folder, which are copied there.

    Args:
        page: the text of ``index.html``.
        folder: where it lies.
        packages: what `fetch` has brought.

    Raises:
        PageError: the page links to something that is not known.
    """

    def local(link: re.Match[str]) -> str:
        found = [place for part, place in SCRIPTS.items() if part in link["url"]]
        if len(found) != 1:
            raise PageError(f"the page loads {link['url']}, which is not known here: asv 0.6.6 is")
        package, file = found[0]
        target = folder / SCRIPTS_FOLDER / Path(file).name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(packages / package / "package" / file, target)
        return f'{link["name"]}="{SCRIPTS_FOLDER}/{target.name}"'

    return LINK.sub(local, page)


def main() -> int:
    """Complete a page; return 0, or 2 where that cannot be."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".asv/html")
    index = folder / "index.html"
    try:
        page = index.read_text(encoding="utf-8")
        if LINK.search(page):
            with tempfile.TemporaryDirectory() as packages:
                fetch({package for package, _ in SCRIPTS.values()}, Path(packages))
                page = complete(page, folder, Path(packages))
            index.write_text(page, encoding="utf-8")
    except FileNotFoundError:
        sys.stderr.write(f"keyedopt: there is no {index}: run asv publish first\n")
        return 2
    except (PageError, OSError) as error:
        sys.stderr.write(f"keyedopt: {error}\n")
        return 2
    print(index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
