"""Whether the build that is measured is conformant, which a published ratio needs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keyedopt.benchmarks.compare import RequestError
from keyedopt.benchmarks.environment import versions
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.digest import digest
from keyedopt.conformance.results.verdict import judge
from keyedopt.conformance.run import runner
from keyedopt.conformance.targets.find import find


def from_file(path: Path, target: str, device: str) -> dict[str, Any]:
    """Return the conformance of the implementation according to a result file.

    The result must cover the whole suite: a `must` clause that was not checked counts as failed.

    Raises:
        RequestError: the result is of another implementation, build, version or kind of device.
        ResultError: the file cannot be read.
    """
    result = results.read(path)
    about, name = result.implementation, find(target).name
    again = f"run `keyedopt check {target} --device {device} --output {path}` again"
    if about["name"] != name:
        raise RequestError(f"{path} is a result of {about['name']}, not of {name}")
    then = {**about.get("versions", {}), "torch": result.environment["torch"]}
    now = versions(then) | {"torch": torch.__version__}
    for part, version in then.items():
        if now.get(part) != version:
            raise RequestError(f"{path} was made with {part} {version}, here is {now.get(part)}: {again}")
    if not about.get("build") or about["build"] != digest(find(target).root):
        raise RequestError(f"{path} is of another build of {name}, its files have changed since: {again}")
    if torch.device(result.environment["device"]).type != torch.device(device).type:
        raise RequestError(f"{path} was made on {result.environment['device']}, not on {device}: {again}")
    return {"file": str(path), **_conformance(result)}


def on_the_spot(target: str, device: str) -> dict[str, Any]:
    """Run the whole suite on the implementation, and return its conformance.

    Raises:
        RunError: the suite cannot be run on it.
    """
    result = runner.run(target, runner.Options(device=device))
    if not result.complete:
        raise KeyboardInterrupt
    return {"file": None, **_conformance(result)}


def _conformance(result: results.Result) -> dict[str, Any]:
    everything = replace(result, options={**result.options, "areas": [], "clauses": []})
    verdict = judge(everything)
    return {
        "conformant": verdict.conformant,
        "verdict": verdict.word,
        "suite": result.suite["hash"],
        "build": result.implementation.get("build", ""),
    }
