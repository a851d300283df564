"""Tasks: each does what it says, alike in both implementations, and together they cover the surface."""

import os

import pytest
import torch
from clocks import UnitClock

from keyedopt.benchmarks import compare
from keyedopt.benchmarks.tasks import TASKS, NotOffered, dense, make, tables
from keyedopt.benchmarks.tasks.base import ACCUMULATING, CLASSES
from keyedopt.benchmarks.workloads import STATE, Dense, Lookups, SparseGradients
from keyedopt.conformance import spec
from keyedopt.conformance.targets.find import find

WORKS = {
    "lookups": Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3),
    "dense": Dense("few", "for tests", ((4, 3), (3,)), 2),
    "sparse": SparseGradients("few-rows", "for tests", tables=2, rows=30, dim=4, lookups=40),
}
#: Names of the surface that are not timed: abstract bases, what only chooses, and another name of Adam.
NOT_TIMED = {
    *("KeyedOptimizer", "FusedOptimizer", "EmptyFusedOptimizer", "FusedOptimizerModule", "PoolingType"),
    *("in_backward_optimizer_filter", "AdamW", "OtherOptimizer"),
    "Ftrl",  # no library beside has it
}


class Asked:
    """An implementation's names, and which of them were asked for."""

    def __init__(self, surface):
        self.surface, self.names = surface, set()

    def has(self, name):
        return self.surface.has(name)

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.surface, name)


def begun(name, task):
    surface = find(name).surface()
    return compare.start(lambda: make(surface, task, WORKS[task.kind], "cpu"), UnitClock(), 0.0, "cpu")


@pytest.mark.parametrize("name", TASKS)
def test_a_task_does_the_same_in_both_implementations(name):
    task = TASKS[name]
    ours = begun("fused", task)
    assert any(not torch.equal(value, ours.after[key]) for key, value in ours.before.items())
    assert compare.error_between(ours, begun("reference", task)) < 1e-5
    assert task.moved(WORKS[task.kind]) > 0


@pytest.mark.parametrize("name", TASKS)
def test_a_task_says_what_it_lacks_before_anything_is_timed(name):
    """An implementation of nothing offers nothing, and that is found out where the job is made."""

    class Nothing:
        def has(self, name):
            return False

    with pytest.raises(NotOffered, match=r"^no "):
        make(Nothing(), TASKS[name], WORKS[TASKS[name].kind], "cpu")


@pytest.mark.parametrize("backend", ["native", "torch", "fbgemm"])
@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith(("train", "sparse", "forward"))])
def test_a_task_does_the_same_with_each_backend(name, backend, monkeypatch):
    from keyedopt.fused.backends import available

    if available()[backend]:
        if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1" and backend == "native":
            pytest.fail(available()[backend])
        pytest.skip(available()[backend])
    expected = begun("reference", TASKS[name])
    monkeypatch.setenv("KEYEDOPT_BACKEND", backend)
    assert compare.error_between(begun("fused", TASKS[name]), expected) < 1e-5


def test_the_tasks_cover_the_surface():
    asked = Asked(find("reference").surface())
    for task in TASKS.values():
        make(asked, task, WORKS[task.kind], "cpu")
    surface = {name for area in spec.areas().values() for name in area.names}
    assert surface - asked.names == NOT_TIMED


#: What is timed of every optimizer, and of every wrapper.
OF_OPTIMIZERS = {
    *("train", "backward", "train_unpooled", "train_warmup", "train_clipped-norm", "train_clipped-value"),
    *("train_clipped-none", "bag_in_backward", "sparse"),
    *("step", "step_clipped-norm", "step_clipped-value", "step_warmed_up", "in_backward"),
}
OF_STATE = {"state_dict", "load_state_dict", "save", "load"}


@pytest.mark.parametrize("optimizer", STATE)
def test_of_every_optimizer_everything_is_timed(optimizer):
    wanted = {f"{kind}-{optimizer}" for kind in OF_OPTIMIZERS}
    if optimizer != "sgd":  # which keeps nothing
        wanted |= {f"{way}-{what}{optimizer}" for way in OF_STATE for what in ("", "tables_")}
    if optimizer in ACCUMULATING:
        wanted |= {f"accumulate-{optimizer}", f"step_accumulate-{optimizer}"}
        wanted |= {f"{way}-{what}_{optimizer}" for way in OF_STATE for what in ("window", "accumulate")}
    if optimizer == "adam":
        wanted |= {f"{way}-sparse_adam" for way in OF_STATE}
    assert wanted <= set(TASKS)


def test_every_optimizer_of_the_surface_is_one_of_them():
    algorithms = {name for area in ("algorithms", "accumulate") for name in spec.areas()[area].names}
    assert algorithms - NOT_TIMED == {*CLASSES.values(), *ACCUMULATING.values()}
    assert set(CLASSES) == set(STATE)


def test_of_every_wrapper_step_and_state_are_timed():
    """Modes of clipping have steps alone: what a clipper keeps is that of the optimizer inside."""
    steps = {"clip-adam" if name == "clip_norm" else f"step_{name}" for name in dense.WRAPPERS}
    keeping = {name for name in dense.WRAPPERS if not name.startswith("clip_")} | {"clip_value"}
    assert steps | {f"{way}-{name}" for way in OF_STATE for name in keeping} <= set(TASKS)


def test_every_mode_of_clipping_is_a_wrapper():
    from keyedopt.fused import GradientClipping

    assert {mode.name.lower() for mode in GradientClipping} == set(tables.MODES)
    for mode in GradientClipping:
        assert any(name.startswith(f"clip_{mode.name.lower()}") for name in dense.WRAPPERS), mode


@pytest.mark.parametrize(
    "name", ["save-keyed", "load-keyed", "save_distributed-keyed", "load_distributed-keyed"]
)
def test_folders_of_checkpoints_go_with_the_job(name, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    begin = begun("fused", TASKS[name])
    assert list(tmp_path.iterdir())
    del begin
    assert not list(tmp_path.iterdir())


def test_an_argument_that_a_peer_does_not_take_is_said():
    class Clipper:
        def __init__(self, optimizer, clipping, max_gradient):
            """Take no type of norm."""

    class Old(Asked):
        GradientClippingOptimizer = Clipper

    with pytest.raises(NotOffered, match=r"no Clipper.norm_type"):
        make(Old(find("reference").surface()), TASKS["step_clip_norm_inf"], WORKS["dense"], "cpu")


def test_tasks_need_the_public_names_of_an_implementation_and_no_more():
    """Old commits are measured by the tasks of today."""
    import ast
    from pathlib import Path

    import keyedopt.benchmarks

    folder = Path(keyedopt.benchmarks.__file__).parent
    seen, waiting = set(), {"tasks", "peers"}
    while waiting:
        part = waiting.pop()
        seen.add(part)
        file = folder / f"{part}.py"
        for path in [file] if file.exists() else sorted((folder / part).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                ours = [name.split(".") for name in names if name.startswith("keyedopt.")]
                assert all(name[1] == "benchmarks" for name in ours), f"{path} imports {ours}"
                waiting |= {name[2] for name in ours if len(name) > 2} - seen
    assert {"timing", "workloads"} <= seen
