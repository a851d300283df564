"""Each case honours each field of an adapter: shown on the reference with every name and default changed.

The copy differs from the reference only in what its adapter says, so each case must end as it does on the
reference, or be unsupported for a reason that the adapter gives.
"""

import re
import shutil
from pathlib import Path

import pytest

from keyedopt.conformance.results.verdict import FAILING
from keyedopt.conformance.run import runner
from keyedopt.conformance.targets.implementation import TargetError
from keyedopt.conformance.targets.proposal import propose

REFERENCE = Path(__file__).parents[2] / "reference"
OPTIONS = {"weight_decay": "shrink", "betas": "keep", "momentum": "mu", "dampening": "damp", "eta": "trust"}
OPTIONS |= {"lr_decay": "slower", "nesterov": "look_ahead", "initial_accumulator_value": "first_sum"}
STATE = {"exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "velocity", "sum": "squares"}
ADAMS = ("Adam", "AdamW", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB")
CLASSES = ("SGD", "Adagrad", "RowWiseAdagrad", *ADAMS)


def renamed(folder: Path) -> None:
    """Write the copy as the package ``renamed``, with an adapter as ``described``."""
    for path in sorted(REFERENCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8").replace("keyedopt.reference", "renamed")
        for old, new in OPTIONS.items():
            text = re.sub(rf"\b{old}\b", new, text)
        for old, new in STATE.items():
            text = text.replace(f'"{old}"', f'"{new}"')
        text = re.sub(r"lr: float \| Tensor = [-\de.]+,", "lr: float | Tensor,", text)
        text = re.sub(r"eps: float = 1e-8", "eps: float = 1e-3", text)
        copy = folder / "renamed" / path.relative_to(REFERENCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    (folder / "described.py").write_text(
        f"""
from keyedopt.conformance.targets.implementation import Implementation
IMPLEMENTATION = Implementation(
    name="renamed",
    root="renamed",
    areas=("algorithms",),
    absent=("Accumulate*",),
    option_names={{f"*.{{name}}": own for name, own in {OPTIONS}.items()}},
    state_names={{f"*.{{name}}": own for name, own in {STATE}.items()}},
    fixed_options={{"*.lr": 0.1}},
    defaults={{f"{{name}}.eps": 1e-3 for name in {ADAMS}}},
    dtypes=("float32", "float64"),
)
""",
        encoding="utf-8",
    )


@pytest.fixture(name="folder")
def _folder(tmp_path):
    renamed(tmp_path)
    yield tmp_path
    shutil.rmtree(tmp_path / "renamed")


def test_every_case_honours_names_of_options_and_state_fixed_options_defaults_and_dtypes(folder):
    options = runner.Options(
        areas=("algorithms",)
    )  # the only one that it claims; it has no embedding modules
    result = runner.run("described:IMPLEMENTATION", options, path=[str(folder)])
    bad = {case.case: case.seen for case in result.cases if case.outcome in FAILING}
    assert bad == {}
    held = {case.case for case in result.cases if case.outcome == "pass"}
    assert {case.dtype for case in result.cases if case.case in held} == {None, "float32", "float64"}
    reasons = {str(case.seen) for case in result.cases if case.outcome == "unsupported"}
    assert {reason for reason in reasons if not reason.startswith("not claimed: ")} == set()
    for algorithm in CLASSES:  # the formulas, the state, and the defaults were judged
        assert any("test_precision[" in name and f"{algorithm}-plain" in name for name in held), algorithm
        assert any("test_names_and_shapes" in name and f"[{algorithm}-" in name for name in held), algorithm


def test_embedding_modules_get_the_optimizer_and_its_options_by_their_names(folder):
    options = runner.Options(areas=("sharded",), clauses=("SHARD-006", "SHARD-018"))
    result = runner.run("described:IMPLEMENTATION", options, path=[str(folder)])
    assert {case.case: case.seen for case in result.cases if case.outcome in FAILING} == {}
    assert any("test_replicas_begin_alike" in case.case and case.outcome == "pass" for case in result.cases)


LIBRARY = """
import torch
from torch.optim import Adam
class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0): ...
class SGDW(torch.optim.SGD): ...
"""


def test_a_proposal_shows_common_names_missing_options_and_other_defaults(tmp_path, monkeypatch):
    (tmp_path / "some_library.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    proposal = propose("some_library")
    assert proposal.names == {"LAMB": "some_library:Lamb", "SGD": "some_library:SGDW"}  # Adam is torch's
    assert proposal.defaults == {"LAMB.eps": 1e-6}
    assert proposal.variants == {"SGD": "decoupled"}
    assert {"Adam", "LAMB.maximize"} <= set(proposal.absent)
    assert not {"LAMB", "SGD", "SGD.maximize"} & set(proposal.absent)
    with pytest.raises(TargetError, match="no module"):
        propose("no_such_library")
