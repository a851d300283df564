"""Make asv's page of what has results: ``python -m keyedopt.benchmarks.asv.publish [FOLDER]``.

`asv publish` shows a row for each combination of parameters, also for those that nobody measured: with the
stored history 384 rows, of which ten have a value. Here `asv publish` gets a copy of the results whose
``benchmarks.json`` has only benchmarks and parameters with a result, and rows without a value are removed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keyedopt.benchmarks.asv import history
from keyedopt.benchmarks.gpu.asv_runs import PLACES, asv_config
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.model import write_atomically

#: asv's configuration, in the checkout from which the page is made.
CONFIG = Path("asv.conf.json")


class PublishError(KeyedoptError):
    """There is nothing to publish, or asv failed; the message says what to do."""


def measured(folder: Path) -> dict[str, Any]:
    """Return ``benchmarks.json`` of a folder of results with the benchmarks and parameters that have one."""
    about = json.loads((folder / "benchmarks.json").read_text(encoding="utf-8"))
    seen: dict[str, list[set[str]]] = {}
    for item in history.read(folder):
        values = seen.setdefault(item.benchmark, [set() for _ in item.params])
        for among, (_, value) in zip(values, item.params, strict=True):
            among.add(value)
    return {"version": about["version"]} | {
        name: {
            **about[name],
            "params": [
                [text for text in listed if text.strip("'") in among]
                for listed, among in zip(about[name]["params"], values, strict=True)
            ],
        }
        for name, values in seen.items()
        if name in about
    }


def publish(results: Path, html: Path) -> int:
    """Write asv's page, and return the number of rows with a value.

    Raises:
        HistoryError: the results cannot be read.
        PublishError: there are none, git has none of their commits, asv failed, or the present folder is no
            checkout.
    """
    if not CONFIG.exists():
        raise PublishError(f"{CONFIG} is missing in {Path.cwd()}: change to a checkout of keyedopt")
    found = measured(results)
    if len(found) == 1:
        raise PublishError(f"{results} has no results; measure with: asv run")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, PLACES["results"])
        shutil.copytree(results, copy)
        write_atomically(copy / "benchmarks.json", json.dumps(found))
        asv_config(CONFIG.resolve(), Path(scratch), CONFIG.resolve().parent)
        config = ["--config", str(Path(scratch, "asv.conf.json")), "--html-dir", str(html.resolve())]
        command = [sys.executable, "-m", "asv", "publish", "--no-pull", *config]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PublishError(f"asv publish failed: {(done.stderr or done.stdout).strip()[-500:]}")
    rows = sum(_drop_empty_rows(path) for path in html.rglob("summary.json"))
    if not rows:
        raise PublishError("git has none of the measured commits; fetch them with: git fetch --unshallow")
    return rows


def _drop_empty_rows(path: Path) -> int:
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if row["last_value"] is not None]
    write_atomically(path, json.dumps(rows))
    return len(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the page; return 2 if that is not possible."""
    parser = argparse.ArgumentParser(prog="python -m keyedopt.benchmarks.asv.publish", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("benchmarks/results/asv"))
    parser.add_argument("--html-dir", type=Path, default=Path(".asv/html"), help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        count = publish(given.folder, given.html_dir)
    except KeyedoptError as error:
        sys.stderr.write(f"keyedopt: {error}\n")
        return 2
    print(f"published: {given.html_dir / 'index.html'} ({count} series)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
