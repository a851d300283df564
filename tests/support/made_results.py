"""Results of the suite that were made before the tests, which then need not run the suite again."""

import dataclasses
import importlib.metadata
import json
import os
import platform
from pathlib import Path

import torch

from keyedopt.conformance import spec
from keyedopt.conformance.results import model
from keyedopt.conformance.results.digest import digest
from keyedopt.conformance.results.verdict import level_of
from keyedopt.conformance.run import runner
from keyedopt.conformance.targets.find import find as find_target

#: The outcomes that a list of known failures gives.
MARKED = ("known", "unexpected-pass")
#: The environment variable that names the folder of the results, ``TARGET.json``.
FOLDER = "KEYEDOPT_RESULTS"


def find(target):
    """Return the result of the whole suite on a target, or None if there is none of the present state."""
    file = Path(os.environ.get(FOLDER) or os.devnull) / f"{target}.json"
    if not file.is_file():
        return None
    result = model.read(file)
    return without_expectations(result) if is_present(result, target) else None


def without_expectations(result):
    """Return a result as it was before a list of known failures was applied."""
    cases = tuple(
        dataclasses.replace(case, outcome=_before(case), known={}) if case.outcome in MARKED else case
        for case in result.cases
    )
    return dataclasses.replace(result, cases=cases, expectations={})


def _before(case):
    if case.outcome == "unexpected-pass":
        levels = {level_of(clause) for clause in case.clauses}
        return "observed" if levels == {"recorded"} else "pass"
    return "error" if case.expected == "the case to end" else "fail"  # as the runner writes a crash


def is_present(result, target):
    """Whether a run of the suite on a target, here and now, would run the same cases on the same code."""
    usual = {**json.loads(json.dumps(dataclasses.asdict(runner.Options()))), "seed": 0}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return (
        result.complete
        and result.suite["hash"] == spec.suite_hash()
        and result.options == usual
        and result.implementation["target"] == target
        and result.implementation["build"] == digest(find_target(target).root)
        and all(_version(name) == version for name, version in result.implementation["versions"].items())
        and {name: result.environment[name] for name in versions} == versions
    )


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
