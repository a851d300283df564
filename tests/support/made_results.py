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
from keyedopt.conformance.run import runner
from keyedopt.conformance.targets.implementation import find as find_target

#: The environment variable that names the folder of the results, ``TARGET.json``.
FOLDER = "KEYEDOPT_RESULTS"


def find(target):
    """Return the result of the whole suite on a target, or None if there is none of the present state."""
    file = Path(os.environ.get(FOLDER) or os.devnull) / f"{target}.json"
    if not file.is_file():
        return None
    result = model.read(file)
    return result if is_present(result, target) else None


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
