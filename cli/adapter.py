"""``keyedopt init-adapter``: a small package that makes a library known to keyedopt."""

import dataclasses
import importlib.util
import json
import keyword
import os
import pprint
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.targets.find import registered
from keyedopt.conformance.targets.implementation import TargetError

#: Names of packages that are taken, whoever has them installed.
TAKEN = ("keyedopt", "torch", "conformance", "test", "tests")


def init_adapter(
    name: str, output: Path, fail: Callable[[str], NoReturn], libraries: Sequence[str] = ()
) -> int:
    """Write the package into a new folder, for libraries with what their signatures show; return 0.

    Without a name, the adapter is named after the package of the first library.
    """
    if not name and libraries:
        name = re.split("[.:]", libraries[0].rpartition("=")[2])[0].lower().strip("_")
    if not name:
        fail("give a NAME, or --from MODULE to name the adapter after its package")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or name.endswith("_") or keyword.iskeyword(name):
        fail(f"{name!r} cannot be a name: use lower-case letters, digits and _, beginning with a letter")
    package = f"{name}_keyedopt"
    if name in registered() or name in TAKEN or name in sys.stdlib_module_names:
        fail(f"the name {name!r} is taken: choose another one")
    if importlib.util.find_spec(package) is not None:
        fail(f"a package {package!r} is installed already: choose another name")
    folder = output / f"{name.replace('_', '-')}-keyedopt"
    if os.path.lexists(folder):
        fail(f"{folder} exists already: choose another name, or another --output")
    notes: Sequence[str] = ()
    texts = files(name, package, _DESCRIBED if libraries else _WRITTEN)
    if libraries:
        texts[f"{package}/__init__.py"], inherits, notes = _proposed(name, libraries, fail)
        texts["expectations.toml"] += (
            "\n# Defects of the base classes are not charged to the library.\n"
            f"inherits = {json.dumps(inherits)}\n"
        )
        del texts[f"{package}/optimizers.py"]
    try:
        output.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".keyedopt-", dir=output))
    except OSError as error:
        fail(f"{output} cannot be written ({error.strerror}): name another folder")
    try:
        for path, text in texts.items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_text(text, encoding="utf-8")
        scratch.chmod(0o755)
        scratch.rename(folder)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        fail(f"{folder} cannot be written: {error}")
    for note in notes:
        print(one_line(f"note: {note}"))
    print(f"written: {folder}; next: pip install -e {folder} && keyedopt check {name}")
    return 0


def _proposed(
    name: str, libraries: Sequence[str], fail: Callable[[str], NoReturn]
) -> tuple[str, list[str], list[str]]:
    """Return the adapter of libraries, as their classes show it, the libraries of their bases, and notes."""
    from keyedopt.conformance.targets.proposal import propose

    sys.path.append(os.getcwd())  # as `keyedopt check` does
    try:
        found = propose(*libraries, by_words=True)
    except TargetError as error:
        fail(str(error))
    if not found.areas:
        fail(
            f"{', '.join(libraries)}: no class has a common name of an algorithm, and none subclasses a "
            f"published keyed optimizer or wrapper: {''.join(f'{note}; ' for note in found.notes)}"
            "say what a class is, such as --from AdamW=MODULE:CLASS, or OtherOptimizer=MODULE:CLASS for "
            "another formula, or write the adapter without --from"
        )
    parts = {part.name: getattr(found, part.name) for part in dataclasses.fields(found)}
    inherits, notes = parts.pop("inherits"), parts.pop("notes")
    lines = {part: pprint.pformat(value, width=96, compact=True) for part, value in parts.items() if value}
    fields = textwrap.indent("\n".join(f"{part}={text}," for part, text in lines.items()), "    ")
    said = "".join(textwrap.fill(one_line(note), 96, **_COMMENT) + "\n" for note in notes)
    text = _PROPOSED.replace("@NAME@", name).replace("@LIBRARY@", libraries[0].rpartition("=")[2])
    return text.replace("@NOTES@", said).replace("@FIELDS@", fields), list(inherits), list(notes)


def files(name: str, package: str, first: str) -> dict[str, str]:
    """Return the files of an adapter; `first` says in its README what to do first."""
    templates = {
        "pyproject.toml": _PROJECT,
        "README.md": _README,
        "expectations.toml": _EXPECTATIONS,
        f"{package}/__init__.py": _IMPLEMENTATION,
        f"{package}/optimizers.py": _OPTIMIZERS,
        ".github/workflows/conformance.yml": _WORKFLOW,
    }
    return {
        path: text.replace("@FIRST@", first).replace("@NAME@", name).replace("@PACKAGE@", package)
        for path, text in templates.items()
    }


_PROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "@PACKAGE@"
version = "0.1.0"
description = "Makes @NAME@ known to keyedopt"
requires-python = ">=3.11"
dependencies = ["keyedopt"]  # and the library itself

# `keyedopt check @NAME@` finds it here.
[project.entry-points."keyedopt.implementations"]
@NAME@ = "@PACKAGE@:IMPLEMENTATION"

[tool.setuptools]
packages = ["@PACKAGE@"]
"""

_IMPLEMENTATION = '''\
"""What @NAME@ says about itself to keyedopt."""

from keyedopt.conformance.targets.implementation import Implementation

IMPLEMENTATION = Implementation(
    name="@NAME@",
    # A module, or a package whose submodules have the public names (`keyedopt list areas`).
    root="@PACKAGE@.optimizers",
    # What it claims. A claimed name that is missing fails; the rest is reported as not claimed.
    areas=("algorithms",),
    # Names of claimed areas, and options of classes, that it does not have; shell patterns.
    absent=(
        *("Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "PartialRowWiseAdam"),
        *("LAMB", "PartialRowWiseLAMB", "LarsSGD", "Ftrl"),
        *("*.decay", "*.rows", "*.eps_placement", "*.bias_correction", "*.error_if_nonfinite"),
        *("*.fused", "*.foreach"),  # kernels that are torch's own
    ),
    devices=("cpu", "cuda"),
    dtypes=("float32", "float64"),
    # The distributions whose versions identify it; the first one's is shown.
    distributions=("@PACKAGE@",),
    install="pip install @PACKAGE@",
)
'''

_PROPOSED = '''\
"""What @NAME@ says about itself to keyedopt: proposed from its signatures. Correct it by its documents."""

from keyedopt.conformance.targets.implementation import Implementation

IMPLEMENTATION = Implementation(
    name="@NAME@",
    root="@LIBRARY@",
    # Claimed: the areas, without what is absent. Names of other areas are what cases put beside its classes.
    # `variants` are described in docs/howto/adapters.md of keyedopt.
@NOTES@@FIELDS@
    devices=("cpu", "cuda"),
    dtypes=("float32",),
)
'''

#: How the notes of a proposal are written into it.
_COMMENT: dict[str, Any] = {"initial_indent": "    # Note: ", "subsequent_indent": "    # "}

_OPTIMIZERS = '''\
"""The public names of @NAME@, as keyedopt looks for them: replace what is here with your own."""

import copy

import torch


class SGD(torch.optim.SGD):
    """A stand-in: the formula of torch's, which holds where that one does not."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step; sizes that disagree raise before anything is changed."""
        with torch.enable_grad():
            loss = closure() if closure else None
        self.check_sizes()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(self.direction(weight, group), alpha=-group["lr"])
        return loss

    def check_sizes(self):
        """Raise ValueError if a gradient or state has another shape than its parameter."""
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            for tensor in (weight.grad, *self.state.get(weight, {}).values()):
                if tensor is not None and tensor.shape != weight.shape:
                    shapes = f"{tuple(tensor.shape)} beside {tuple(weight.shape)}"
                    raise ValueError(f"a gradient or state of another shape than its parameter: {shapes}")

    def direction(self, weight, group):
        """Return what a step subtracts from a parameter, before the learning rate."""
        grad = -weight.grad if group["maximize"] else weight.grad
        if group["weight_decay"]:
            grad = grad + group["weight_decay"] * weight
        if not group["momentum"]:
            return grad
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = grad.clone()
        else:
            state["momentum_buffer"].mul_(group["momentum"]).add_(grad, alpha=1 - group["dampening"])
        buffer = state["momentum_buffer"]
        return grad + group["momentum"] * buffer if group["nesterov"] else buffer

    def add_param_group(self, param_group):
        """Refuse options out of range, NaN and those of a group too."""
        self.check_options(param_group)
        super().add_param_group(param_group)

    def check_options(self, group):
        """Raise ValueError if an option is out of range."""
        for name in ("lr", "momentum", "weight_decay"):
            value = group.get(name, self.defaults[name])
            if not value >= 0:
                raise ValueError(f"Invalid {name}: {value}")

    def load_state_dict(self, state_dict):
        """Load a copy: later steps leave what was loaded as it is. Options out of range are refused."""
        for group in state_dict["param_groups"]:
            self.check_options(group)
        super().load_state_dict(copy.deepcopy(state_dict))
'''

_EXPECTATIONS = """\
# Known failures of @NAME@: a gate is green while nothing else fails.
#
# `keyedopt check @NAME@ --expectations expectations.toml --update-expectations` writes an entry for each
# clause that fails; then give each its reason and a link. An entry looks like this:
#
# [[known]]
# clause = "ALGO-001"
# cases = ["test_algorithms_state::test_x[SGD]"]
# reason = "why it fails"
# link = "an issue, or a script that shows it"
# expires = 2027-05-31
"""

_WORKFLOW = """\
name: conformance
on: [push, pull_request]
permissions:
  contents: read
jobs:
  check:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: pip install "keyedopt[cpu,reports]" .
      - run: >-
          keyedopt check @NAME@ --expectations expectations.toml
          --output results/@NAME@.json --output results/@NAME@.xml
      - if: always()
        run: |
          keyedopt report results --output site --format html --format markdown --format badge
          cat site/report.md >> "$GITHUB_STEP_SUMMARY"
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: conformance
          path: |
            results
            site
"""

_README = """\
# @PACKAGE@

Makes @NAME@ known to keyedopt, which checks clause by clause whether
an optimizer does what it claims.

```bash
pip install -e .
keyedopt check @NAME@ --output results/@NAME@.json
```

1. @FIRST@ `keyedopt list areas` shows the names.
2. When something fails: `keyedopt explain CLAUSE` says what is asked and why, and
   `keyedopt replay results/@NAME@.json CLAUSE --output again.py` writes the case as a script of torch and
   your library alone.
3. What cannot be fixed now goes into `expectations.toml`:
   `keyedopt check @NAME@ --expectations expectations.toml --update-expectations`.
4. `keyedopt check @NAME@ --like torchrec` fails on whatever differs from torchrec.

`.github/workflows/conformance.yml` gates on it and keeps the report.
"""

#: What to do first in an adapter that stands for a library, and in one that was proposed.
_WRITTEN = """\
Replace `@PACKAGE@/optimizers.py` with imports from your library, or point `root` in
   `@PACKAGE@/__init__.py` at it; say there what is claimed."""
_DESCRIBED = """\
Correct `@PACKAGE@/__init__.py` by the documents of the library: what is claimed, what is absent,
   defaults and variants."""
