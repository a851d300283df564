"""Each case honours each field of an adapter: shown on the reference with every name and default changed.

The copy differs from the reference only in what its adapter says, so each case must end as it does on the
reference, or be unsupported for a reason that the adapter gives.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from keyedopt.cli.summary import show
from keyedopt.conformance import expectations
from keyedopt.conformance.results.verdict import FAILING, judge
from keyedopt.conformance.run import runner
from keyedopt.conformance.suite.support.described import said
from keyedopt.conformance.targets import beyond, beyond_later, panel
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import RESTRICTIONS, Implementation, TargetError
from keyedopt.conformance.targets.proposal import propose
from keyedopt.tools.panel import BEYOND

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

REFERENCE = Path(__file__).parents[2] / "reference"
PANEL = Path(__file__).parents[2] / "conformance" / "PANEL.md"
OPTIONS = {"weight_decay": "shrink", "betas": "keep", "momentum": "mu", "dampening": "damp", "eta": "trust"}
OPTIONS |= {
    "eps": "epsilon",
    "lr_decay": "slower",
    "nesterov": "look_ahead",
    "initial_accumulator_value": "first_sum",
}
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
        text = re.sub(r"epsilon: float = 1e-8", "epsilon: float = 1e-3", text)
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


@slow
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
class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0, weight_decay=0, trust_coefficient=1e-3, eps=1e-8): ...
"""


def test_a_proposal_shows_common_names_missing_options_and_other_defaults(tmp_path, monkeypatch):
    (tmp_path / "some_library.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    proposal = propose("some_library")
    own = {"LAMB": "some_library:Lamb", "LarsSGD": "some_library:LARS", "SGD": "some_library:SGDW"}
    assert proposal.names == own  # Adam is torch's
    assert proposal.defaults == {"LAMB.eps": 1e-6, "LarsSGD.momentum": 0}
    assert proposal.fixed_options == {"LAMB.lr": 1e-3, "LarsSGD.lr": 1e-3, "LarsSGD.eps": 0.0}
    assert proposal.option_names == {"LarsSGD.eta": "trust_coefficient"}
    assert proposal.variants == {"SGD": "decoupled"}
    assert {"Adam", "LAMB.maximize"} <= set(proposal.absent)
    assert not {"LAMB", "SGD", "SGD.maximize"} & set(proposal.absent)
    assert (proposal.areas, proposal.inherits) == (("algorithms",), ("torch",))
    # raises KeyError for other names
    lazy = "def __getattr__(name):\n    import some_library\n    return vars(some_library)[name]\n"
    (tmp_path / "lazy_library.py").write_text(lazy, encoding="utf-8")
    assert propose("lazy_library").names == {name: f"lazy_{place[5:]}" for name, place in own.items()}
    with pytest.raises(TargetError, match="no module"):
        propose("no_such_library")


ONE_CLASS = """
import torch
class Schedule(torch.optim.SGD):
    def __init__(self, params, lr=0.1, momentum=0):
        super().__init__(params, lr=lr, momentum=momentum)
class Unrelated: ...
def Adam(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
    return torch.optim.Adam(params, lr, betas, eps)
"""


@slow
def test_a_single_class_is_judged_as_what_it_is_named_or_derives_from(tmp_path, monkeypatch, torchrec):
    (tmp_path / "one_class.py").write_text(ONE_CLASS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = find("one_class:Schedule")
    assert (found.areas, found.names["SGD"]) == (("algorithms",), "one_class:Schedule")
    assert {"SGD.nesterov", "Adam"} <= set(found.absent)
    assert found.defaults == {"SGD.lr": 0.1}
    published = find("torch.optim:AdamW")
    assert (published.root, published.areas) == ("torch.optim", ("algorithms",))
    assert {"Adam", "AdamW.rows"} & set(published.absent) == {"Adam"}
    assert find("one_class:Unrelated").names == {}
    made = find("one_class:Adam")  # by a function
    assert (made.areas, made.names) == (("algorithms",), {"Adam": "one_class:Adam"})
    assert {"Adam.weight_decay", "Adam.maximize", "SGD"} <= set(made.absent)
    assert find("torchrec.optim:KeyedOptimizer").areas == ("keyed",)
    for wrong, meant in (("one_class.Schedule", "one_class:Schedule"), ("one_class.py", "one_class")):
        with pytest.raises(TargetError, match=f"did you mean {meant}\\?$"):
            find(wrong)
    options = runner.Options(clauses=("ALGO-001",), dtypes=("float32",))
    result = runner.run("one_class:Schedule", options, path=[str(tmp_path)])
    assert {case.outcome for case in result.cases} >= {"pass"}
    assert {case.outcome for case in result.cases} <= {"pass", "unsupported"}


SUBCLASSES = """
from torchrec.optim.keyed import KeyedOptimizer, OptimizerWrapper
class Forgetful(OptimizerWrapper):
    def zero_grad(self, set_to_none=False): ...
"""


@slow
def test_a_subclass_of_a_published_class_is_proposed_and_charged_with_its_own_defects(
    tmp_path, monkeypatch, torchrec
):
    (tmp_path / "subclasses.py").write_text(SUBCLASSES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    proposal = propose("subclasses")
    assert (proposal.areas, proposal.inherits) == (("wrapper",), ("torchrec",))
    assert proposal.names["OptimizerWrapper"] == "subclasses:Forgetful"
    assert proposal.names["KeyedOptimizer"] == "torchrec.optim:KeyedOptimizer"
    about = Implementation("subclasses", "subclasses", names=proposal.names, areas=proposal.areas)
    described = f"from keyedopt.conformance.targets.implementation import Implementation\nABOUT = {about}\n"
    (tmp_path / "about_subclasses.py").write_text(described, encoding="utf-8")
    known = tmp_path / "known.toml"
    known.write_text('inherits = ["torchrec"]', encoding="utf-8")
    options = runner.Options(clauses=("WRAP-012", "WRAP-025", "SHARD-001"), dtypes=("float32",))
    result = expectations.apply(
        runner.run("about_subclasses:ABOUT", options, path=[str(tmp_path)]), (), known
    )
    outcomes: dict[str, set[str]] = {}
    for case in (case for case in result.cases if "situation" not in case.inputs):
        outcomes.setdefault(case.case.partition("[")[0].partition("::")[2], set()).add(case.outcome)
    assert outcomes["test_the_argument_of_zero_grad_is_passed_on"] == {"fail"}  # its own
    assert outcomes["test_step_hooks_run_once_a_step"] == {"known"}  # torchrec's
    unsupported = {case.outcome for case in result.cases if "SHARD-001" in case.clauses}
    assert unsupported == {"unsupported"}  # none of its classes takes part


UNCHANGED = """
import torch
class Adam(torch.optim.Adam):
    \"\"\"Torch's.\"\"\"
class SparseAdam(torch.optim.SparseAdam): ...
class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)
class Adagrad(torch.optim.Adam): ...
for kind in (Adam, AdamW):  # torch then writes `step` into the class
    kind([torch.nn.Parameter(torch.ones(1))])
"""


def test_a_class_that_changes_nothing_of_its_base_is_charged_with_none_of_its_defects(tmp_path):
    (tmp_path / "unchanged.py").write_text(UNCHANGED, encoding="utf-8")
    known = tmp_path / "known.toml"
    known.write_text('inherits = ["torch"]', encoding="utf-8")
    options = runner.Options(clauses=("ALGO-033", "SPARSE-020"), dtypes=("float32",))
    result = runner.run("unchanged", options, path=[str(tmp_path)])
    assert result.implementation["unchanged"] == {"Adam": "torch", "SparseAdam": "torch"}
    failed = {case.case for case in result.cases if case.outcome in FAILING}
    own = "test_algorithms_gradients::test_zero_without_eps[{}]"
    assert {own.format(name) for name in ("Adam", "AdamW", "Adagrad")} < failed
    result = expectations.apply(result, (), known)
    left = {case.case for case in result.cases if case.outcome in FAILING}
    assert left == {own.format(name) for name in ("AdamW", "Adagrad")}
    assert {case.case for case in result.cases if case.outcome == "known"} == failed - left
    assert expectations.update(known, result) == 1
    assert {name for entry in expectations.read(known) for name in entry.cases} == left


RESTRICTED = """
import inspect, torch
from keyedopt.conformance.targets.implementation import RESTRICTIONS, Implementation

def restricted(base):
    class Restricted(base):
        def add_param_group(self, group):
            super().add_param_group(group)
            (only,) = self.param_groups
            if not isinstance(only["lr"], float) or any(weight.dim() != 2 for weight in only["params"]):
                raise RuntimeError("RESTRICTED")
        def step(self, closure=None):
            weights = self.param_groups[0]["params"]
            sparse = base is not torch.optim.SparseAdam and any(
                weight.grad is not None and weight.grad.is_sparse for weight in weights
            )
            if closure is not None or sparse or not isinstance(self.param_groups[0]["lr"], float):
                raise RuntimeError("RESTRICTED")
            return super().step()
    Restricted.__init__.__signature__ = inspect.signature(base.__init__)
    return Restricted

NAMES = ("SGD", "Adam", "SparseAdam")
for name in NAMES:
    globals()[name] = restricted(getattr(torch.optim, name))
ABOUT = Implementation(
    "restricted", "restricted", areas=("algorithms", "sparse"), dtypes=("float32",),
    absent=(
        *("Adagrad", "RowWiseAdagrad", "AdamW", "Partial*", "LAMB", "LarsSGD", "Ftrl", "*.decay", "*.rows"),
        *("*.eps_placement", "*.bias_correction", "*.error_if_nonfinite", "*.positional", "*.dtensor"),
        *("*.fused", "*.foreach"), *(f"*.{what}" for what in RESTRICTIONS),
    ),
)
"""


@slow
def test_what_a_library_restricts_is_not_claimed_and_not_failed(tmp_path, capsys):
    (tmp_path / "restricted.py").write_text(RESTRICTED, encoding="utf-8")
    options = runner.Options(areas=("algorithms", "sparse"))
    result = runner.run("restricted:ABOUT", options, path=[str(tmp_path)])
    seen = {case.case: case.seen for case in result.cases if case.outcome in FAILING}
    refused = ("RESTRICTED", "too many values")  # for another reason than what the case asks
    assert not [case for case, text in seen.items() if any(why in text for why in refused)]
    for what, text in RESTRICTIONS.items():
        assert any(f".{what}" in str(case.seen) for case in result.cases if case.outcome == "unsupported")
        assert result.implementation["restrictions"][text][:2] == ["SGD", "Adam"]
    show(result, judge(result))
    assert (
        "restricted, as its description says: step takes no closure (SGD, Adam, Spar"
        in capsys.readouterr().out
    )


BROKEN = """
import torch
class Adam(torch.optim.Adam):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, maximize=False):
        raise RuntimeError("no kernel here")
class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        raise OSError(f"no kernel at {id(self)}")
"""


def test_what_fails_because_no_first_step_works_has_one_cause_for_each_class(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    clauses = ("ALGO-020", "ALGO-041", "ALGO-053", "ALGO-061")
    result = runner.run("broken", runner.Options(clauses=clauses, dtypes=("float32",)), path=[str(tmp_path)])
    verdict = judge(result)
    assert (verdict.word, verdict.green) == ("could not be judged", False)
    assert {cause.name for cause in verdict.causes} == {"Adam", "AdamW"}
    behind = {clause for cause in verdict.causes for clause in cause.clauses}
    assert behind == {"ALGO-020", "ALGO-041", "ALGO-053"}
    assert {case.cause["class"] for case in result.cases if case.cause} == {"Adam", "AdamW"}
    (seen,) = {case.cause["error"] for case in result.cases if case.cause.get("class") == "Adam"}
    assert seen == "RuntimeError: no kernel here"
    own = {case.clauses[0] for case in result.cases if case.outcome in FAILING and not case.cause}
    assert own == {"ALGO-061"}  # a group is not validated: no step is needed to see it


DUCK = """
import torch
class SGD:
    def __init__(
        self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, *, maximize=False
    ):
        options = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
        self._inner = torch.optim.SGD(params, nesterov=nesterov, maximize=maximize, **options)
    def step(self, closure=None):
        return self._inner.step(closure)
"""


def test_formulas_are_judged_by_weights_if_an_optimizer_shows_no_state(tmp_path):
    (tmp_path / "duck.py").write_text(DUCK, encoding="utf-8")
    clauses = ("ALGO-001", "ALGO-002", "ALGO-020", "ALGO-031")
    result = runner.run("duck", runner.Options(clauses=clauses), path=[str(tmp_path)])
    judged = {(case.clauses[0], case.outcome) for case in result.cases if case.outcome != "unsupported"}
    assert judged == {(clause, "pass") for clause in clauses}


@slow
def test_a_failure_names_the_variant_of_the_formula_that_the_optimizer_follows(tmp_path):
    (tmp_path / "mine.py").write_text(
        """
from keyedopt.conformance.targets.implementation import Implementation
own = dict(name="mine", root="torch.optim", areas=("algorithms",), names={"Adam": "torch.optim:AdamW"})
PLAIN, CLAIMED = Implementation(**own), Implementation(**own, variants={"Adam": "decoupled"})
""",
        encoding="utf-8",
    )
    options = runner.Options(clauses=("ALGO-011",))
    plain, claimed = (
        runner.run(f"mine:{name}", options, path=[str(tmp_path)]) for name in ("PLAIN", "CLAIMED")
    )
    (failed,) = (case for case in plain.cases if "situation" not in case.inputs)
    assert failed.outcome == "fail"
    assert "the variant 'decoupled' fits" in failed.seen
    assert {case.outcome for case in claimed.cases} == {"pass"}


def test_an_empty_name_says_that_the_state_has_no_such_entry(tmp_path):
    (tmp_path / "empty.py").write_text(
        """
from keyedopt.conformance.targets.implementation import Implementation
own = {"Adam.exp_avg": "", "Adam.exp_avg_sq": ""}
ABOUT = Implementation("empty", "torch.optim", areas=("algorithms",), state_names=own, dtypes=("float32",))
""",
        encoding="utf-8",
    )
    result = runner.run("empty:ABOUT", runner.Options(clauses=("ALGO-070",)), path=[str(tmp_path)])
    outcomes = {case.inputs["algorithm"]: case.outcome for case in result.cases if "algorithm" in case.inputs}
    assert (outcomes["Adam"], outcomes["AdamW"]) == ("unsupported", "pass")


def test_a_fixed_option_may_be_a_dtype():
    """It is plain data on the way to the processes that run cases, and in scripts."""
    given = {"SGD.state_dtype": torch.bfloat16, "SGD.kind": "torch.like", "SGD.betas": (0.9, 0.5)}
    about = Implementation(name="x", root="torch.optim", areas=("algorithms",), fixed_options=given)
    plain = json.loads(json.dumps(about.adapter()))
    assert said(plain, "fixed", "SGD") == {
        "state_dtype": torch.bfloat16,
        "kind": "torch.like",
        "betas": [0.9, 0.5],
    }
    with pytest.raises(TypeError, match=r"SGD.lr must be None, a number, .* not <object"):
        Implementation(name="x", root="torch.optim", fixed_options={"SGD.lr": object()})


def test_every_library_of_the_panel_is_a_target():
    described = {name: one for name, one in vars(panel).items() if isinstance(one, Implementation)}
    assert len(described) >= 14
    for name, one in described.items():
        assert find(name) is one
        assert find(str(one.root)).root == one.root


def test_the_tool_and_the_table_have_each_library_beyond_the_panel():
    both = {**vars(beyond), **vars(beyond_later)}
    described = {name for name, one in both.items() if isinstance(one, Implementation)}
    assert described == set(BEYOND)
    rows = re.findall(r"^\| (\w+): .* \| (\S+) \| (\d+) of \d+ \|", PANEL.read_text(encoding="utf-8"), re.M)
    assert {(name, f"=={version}") for name, version, _ in rows if name in described} == {
        (name, pinned[0][pinned[0].index("=") :]) for name, pinned in BEYOND.items()
    }
