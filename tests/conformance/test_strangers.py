"""Sound optimizers that differ from the reference in what they say of themselves fail nothing."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from making import TARGETS

from keyedopt.conformance import spec
from keyedopt.conformance.golden import formulas
from keyedopt.conformance.results.model import Result
from keyedopt.conformance.run import replay, runner
from keyedopt.conformance.suite.support.described import OPTIONS, described
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.proposal import propose

SOUND = ("pass", "observed", "unsupported")
REFERENCE = Path(__file__).parents[2] / "reference"
#: The cases in which torch's foreach kernel of SGD overwrites gradients.
OVERWRITTEN = {
    f"test_algorithms_layouts::test_{layout}gradients_are_left_with_each_option[SGD]"
    for layout in ("", "sparse_")
}
loop = pytest.mark.complete(loop=__name__, sample=3, spread=True)


def checked(target: str, *clauses: str, path: object = TARGETS) -> Result:
    return runner.run(target, runner.Options(clauses=clauses), path=[str(path), TARGETS])


def expect_sound(result: Result, passing: int) -> None:
    wrong = [f"{one.case}: {one.seen}" for one in result.cases if one.outcome not in SOUND]
    assert wrong == []
    assert sum(case.outcome == "pass" for case in result.cases) > passing


@loop
@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_no_case_asks_for_an_option_that_a_target_lacks(option):
    expect_sound(checked(f"lacking:absent_{option}"), 30)


@loop
def test_each_case_gives_an_option_that_has_no_default():
    expect_sound(checked("lacking:fixed"), 1500)


@loop
@pytest.mark.parametrize(
    "words",
    ["no_debias", "eps_bound", "decoupled__by_itself", "decoupled__decay_after__no_debias__eps_in_root"],
)
def test_no_clause_contradicts_a_variant(words):
    expect_sound(checked(f"varying:{words}"), 100)


STRANGERS = """
import torch
from keyedopt.conformance.targets.implementation import Implementation

KINDS = ("SGD", "Adagrad", "Adam", "AdamW", "SparseAdam")
globals().update({one: type(one, (getattr(torch.optim, one),), {"__module__": __name__}) for one in KINDS})
NAMES = ("RowWiseAdagrad", "PartialRowWise*", "LAMB", "LarsSGD", "Ftrl")
LACKING = ("decay", "rows", "eps_placement", "bias_correction", "max_norm")

def target(dtype, *also_absent, **fixed):
    return Implementation(
        name="strangers",
        root="strangers",
        areas=("algorithms", "sparse"),
        dtypes=tuple(dict.fromkeys(("float32", dtype))),
        absent=(*NAMES, *(f"*.{one}" for one in LACKING), *also_absent),
        fixed_options={f"{name}.{option}": True for name in KINDS[:4] for option in fixed},
    )

for one in ("float32", "bfloat16", "float16"):
    globals()[f"plain_{one}"] = target(one)
    globals()[f"foreach_{one}"] = target(one, foreach=True)
    globals()[f"fused_{one}"] = target(one, "*.sparse", fused=True)
"""


@loop
@pytest.mark.parametrize("kernels", ["plain", "foreach", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_fails_no_must_also_without_float64(tmp_path, kernels, dtype):
    """The foreach kernels overwrite gradients: findings/torch_nesterov_overwrites_gradients.py."""
    (tmp_path / "strangers.py").write_text(STRANGERS, encoding="utf-8")
    musts = (name for name, clause in spec.clauses().items() if clause.level == "must")
    result = checked(f"strangers:{kernels}_{dtype}", *musts, path=tmp_path)
    left = [case for case in result.cases if kernels != "foreach" or case.case not in OVERWRITTEN]
    expect_sound(dataclasses.replace(result, cases=left), 100)


@loop
@pytest.mark.parametrize(("claimed", "code"), [("decoupled no_debias", 0), ("no_debias", 1)])
def test_a_script_contains_the_oracle_of_the_variant(claimed, code, monkeypatch):
    result = checked("varying:decoupled__no_debias", "ALGO-011")
    (case,) = (one for one in result.cases if one.outcome == "pass" and not one.built)
    monkeypatch.syspath_prepend(TARGETS)
    about = find("varying:decoupled__no_debias")
    adapter = {**about.adapter(), "variants": {"Adam": claimed}}
    script = replay.script(result, case, case.inputs, about.surface().places(), adapter=adapter)
    alone = "import sys; sys.modules['keyedopt.conformance.golden.oracle'] = None; exec(sys.stdin.read())"
    done = subprocess.run(
        [sys.executable, "-c", alone], input=script, cwd=TARGETS, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "within 1e-12 of" in done.stdout + done.stderr) == (code, bool(code))


def test_a_class_that_is_described_receives_the_group_itself():
    given: list[object] = []

    class Optimizer:
        def __init__(self, params: list[object], lr: float = 0.1) -> None:
            given.extend(params)

        def add_param_group(self, group: object) -> None: ...

    group = {"params": [], "lr": 0.5}
    described(Optimizer, "Adam", {"absent": {"Adam.eps": True}})([group])
    assert given[0] is group


UNCLAIMED = """
import dataclasses
import varying
TARGET = dataclasses.replace(varying.decoupled__no_debias, variants={variants})
"""


@loop
@pytest.mark.parametrize("claimed", [None, "no_debias", "decoupled eps_before"])
def test_a_failure_names_the_variant_that_fits_everywhere(tmp_path, claimed):
    variants = {"Adam": claimed} if claimed else {}
    (tmp_path / "unclaimed.py").write_text(UNCLAIMED.format(variants=variants), encoding="utf-8")
    result = checked("unclaimed:TARGET", "ALGO-010", "ALGO-011", path=tmp_path)
    failed = [case.seen for case in result.cases if case.outcome == "fail"]
    assert failed
    assert all("the variant 'decoupled no_debias' fits: claim it in `variants`" in seen for seen in failed)


OWN_STATE = """
import torch
from keyedopt.conformance.targets.implementation import Implementation

class Packed:
    def __init__(self, tensor):
        self.tensor = tensor

class AdamW(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay={decay}):
        super().__init__(params, lr, betas, eps, weight_decay={decay})
    def step(self, closure=None):
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].tensor
        super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = Packed(state["exp_avg"])

class LarsSGD(torch.optim.SGD):
    def __init__(self, params, lr=0.1, momentum=0.9, weight_decay=0, eta=1e-3):
        super().__init__(params, lr, momentum, weight_decay=weight_decay)
        self.eta = eta
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                size, slope = weight.detach().norm(), weight.grad.norm()
                bound = slope + group["weight_decay"] * size
                weight.grad = weight.grad.add(weight.detach(), alpha=group["weight_decay"])
                weight.grad.mul_(self.eta * size / bound)
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0
        super().step(closure)
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = decay

TARGET = Implementation(
    name="own", root=__name__, areas=("algorithms",), dtypes=("float32", "float64"),
    names={{"AdamW": __name__ + ":AdamW", "LarsSGD": __name__ + ":LarsSGD"}},
    absent=("SGD", "Ada*grad", "RowWise*", "Partial*", "Adam", "LAMB", "*.sparse", "*.maximize", "*.amsgrad",
            "*.weight_decay", "LarsSGD.by_row"),
    fixed_options={{"AdamW.weight_decay": 0.0}},
    variants={{"LarsSGD": "per_tensor"}},
)
"""


@loop
@pytest.mark.parametrize(("decay", "right"), [(0.0, True), (0.25, False)])
def test_a_formula_is_judged_with_the_option_that_a_target_always_has(tmp_path, decay, right):
    name = f"own_state_{right}".lower()
    (tmp_path / f"{name}.py").write_text(OWN_STATE.format(decay=decay), encoding="utf-8")
    result = checked(f"{name}:TARGET", "ALGO-102", path=tmp_path)
    assert {one.outcome for one in result.cases} == (
        {"pass", "unsupported"} if right else {"fail", "unsupported"}
    )


@loop
def test_a_failure_says_that_only_the_state_is_another(tmp_path):
    (tmp_path / "own_buffer.py").write_text(OWN_STATE.format(decay=0.0), encoding="utf-8")
    result = checked("own_buffer:TARGET", "ALGO-018", path=tmp_path)
    failed = [case.seen for case in result.cases if case.outcome == "fail"]
    assert failed
    assert all("its weights follow: if another momentum_buffer is documented" in seen for seen in failed)


@pytest.mark.parametrize("word", formulas.VARIANTS)
def test_each_word_of_a_variant_has_a_meaning_in_an_algorithm(word):
    assert any(word in one.split() for algorithm in formulas.VARYING for one in formulas.variants(algorithm))


IN_BFLOAT16 = """
import torch
from keyedopt.conformance.targets.implementation import Implementation

class SGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        assert all(weight.dtype is torch.bfloat16 for weight in weights)
        loss = super().step(closure)
        for weight in weights:
            weight.mul_(1 + torch.randint_like(weight, -1, 2) / 256)
        return loss

TARGET = Implementation(
    name="half",
    root=__name__,
    areas=("algorithms",),
    dtypes=("bfloat16",),
    absent=("*Ada*", "*LAMB", "L*", "Ftrl"),
)
"""


@loop
def test_cases_use_no_dtype_that_is_not_claimed_and_what_rounds_at_random_can_resume(tmp_path):
    (tmp_path / "in_bfloat16.py").write_text(IN_BFLOAT16, encoding="utf-8")
    result = checked("in_bfloat16:TARGET", "ALGO-041", "ALGO-072", "ALGO-082", path=tmp_path)
    expect_sound(result, 0)
    resumed = [case for case in result.cases if case.case.endswith("test_resumed[bfloat16-SGD]")]
    assert [case.outcome for case in resumed] == ["pass"]
    (other,) = (case for case in result.cases if case.case.endswith("test_dense_gradient_is_left[SGD]"))
    assert other.seen == "not claimed: float32"


APART = """
import torch

class DecoupledAdamW(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, weight_decay=1e-2):
        super().__init__(params, lr, weight_decay=0)
        self.apart = weight_decay
    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            weight.mul_(1 - self.apart)
        super().step(closure)
"""


def test_a_proposal_names_the_variant_whose_steps_a_class_takes(tmp_path, monkeypatch):
    (tmp_path / "apart.py").write_text(APART, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    found = propose("apart", by_words=True)
    assert found.names == {"AdamW": "apart:DecoupledAdamW"}
    assert any("a variant of AdamW: claim 'by_itself' in `variants`" in note for note in found.notes)


def copied(folder: Path, file: str, **names: str) -> None:
    """Copy the reference as the package ``copied``, with other names of state in one file."""
    for path in sorted(REFERENCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8").replace("keyedopt.reference", "copied")
        for old, new in names.items() if path.name == file else ():
            assert f'"{old}"' in text
            text = text.replace(f'"{old}"', f'"{new}"')
        copy = folder / "copied" / path.relative_to(REFERENCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text, encoding="utf-8")
    (folder / "copy_described.py").write_text(
        "from keyedopt.conformance.targets.implementation import Implementation\n"
        "NAMED = Implementation('named', 'copied', areas=('warmup',),\n"
        "    state_names={'WarmupOptimizer.warmup': 'progress'})\n",
        encoding="utf-8",
    )


@loop
def test_one_clause_asks_for_the_name_of_the_state_of_a_schedule(tmp_path):
    copied(tmp_path, "warmup.py", warmup="progress")
    clauses = ("WARM-024", "WARM-026", "WARM-031", "WARM-040", "WARM-042", "WARM-049", "WARM-054", "WARM-055")
    unnamed = checked("copied", *clauses, path=tmp_path)
    assert {clause for case in unnamed.cases if case.outcome not in SOUND for clause in case.clauses} == {
        "WARM-040"
    }
    assert any(case.seen == "not claimed: WarmupOptimizer.warmup" for case in unnamed.cases)
    named = checked("copy_described:NAMED", *clauses, path=tmp_path)
    assert {case.outcome for case in named.cases} == {"pass", "observed"}


@loop
def test_no_clause_asks_for_the_names_of_entries_of_a_window(tmp_path):
    copied(tmp_path, "window.py", rows="r", gradients="g", count="n")
    expect_sound(checked("copied", "ACC-021", "ACC-022", path=tmp_path), 6)


REFUSING = """
import torch

class SGD(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        for state in state_dict["state"].values():
            for param in self.param_groups[0]["params"]:
                if state["momentum_buffer"].dtype != param.dtype:
                    raise RuntimeError("another dtype")
        super().load_state_dict(state_dict)

class Adam(torch.optim.Adam):
    def __init__(self, params, lr=1e-3, amsgrad=False, **options):
        if amsgrad:
            raise RuntimeError("no amsgrad")
        super().__init__(params, lr, **options)

class SparseAdam(torch.optim.SparseAdam):
    def add_param_group(self, group):
        super().add_param_group(group)
        if len(set(self.param_groups[-1]["params"])) < len(self.param_groups[-1]["params"]):
            raise KeyError("listed twice")
"""


@loop
def test_a_clause_without_a_verdict_records_the_error_of_a_target(tmp_path):
    (tmp_path / "refusing.py").write_text(REFUSING, encoding="utf-8")
    result = checked("refusing:SGD", "ALGO-079", path=tmp_path)
    found = {case.outcome: case.observed for case in result.cases if case.outcome != "unsupported"}
    assert found == {"observed": "raises RuntimeError"}


@loop
@pytest.mark.parametrize(("name", "clause"), [("Adam", "ALGO-106"), ("SparseAdam", "SPARSE-025")])
def test_a_refusal_may_be_an_error_of_any_kind(tmp_path, name, clause):
    (tmp_path / "refusing.py").write_text(REFUSING, encoding="utf-8")
    expect_sound(checked(f"refusing:{name}", clause, path=tmp_path), 0)
