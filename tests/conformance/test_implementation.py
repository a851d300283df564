"""Targets: how they are named, found, described, and what is said when they are not as they should be."""

import dataclasses
import sys
import types

import pytest
import torch
from making import TARGETS, module

from keyedopt import reference
from keyedopt.conformance import spec
from keyedopt.conformance.targets.find import find, registered
from keyedopt.conformance.targets.implementation import Implementation, MissingName, TargetError, load
from keyedopt.conformance.targets.smoke import extended


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let modules of the tests be imported, and forget them afterwards."""
    monkeypatch.syspath_prepend(TARGETS)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith(("torch", "keyedopt")):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


# --- finding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["reference", "keyedopt.reference", "vendor:NAMESPACE", "vendor:CLASS", "vendor:MODULE"],
)
def test_whatever_has_the_names_is_an_implementation(target):
    surface = find(target).surface()
    assert surface.KeyedOptimizerWrapper is reference.KeyedOptimizerWrapper
    assert set(surface.claimed()) == set(spec.areas())


def test_an_attribute_may_be_an_implementation():
    found = find("vendor:IMPLEMENTATION")
    assert (found.name, found.dtypes, found.variants) == ("acme", ("float32",), {"LAMB": "per_tensor"})


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing_of_this_name", "there is no module 'nothing_of_this_name' in this environment; install it"),
        ("os.nothing", "there is no module 'os.nothing'"),
        ("vendor:NOTHING", "'vendor' has no attribute 'NOTHING'"),
        ("vendor:NAMESPAC", "'vendor' has no attribute 'NAMESPAC'; did you mean NAMESPACE"),
        ("torch.optmi", "correct the name; did you mean torch.optim"),
        ("torhc.optim", "correct the name; did you mean torch"),
        ("reference:Adm", "'keyedopt.reference' has no attribute 'Adm'; did you mean Adam"),
        ("reference:Adam", "which has no attributes; did you mean keyedopt.reference:Adam?"),
        ("vendor:NAMESPACE.nothing", "has no attribute 'NAMESPACE.nothing'"),
        ("../vendor.py", "is not a target: give one of apollo, bitsandbytes, catalyst, colossalai,"),
        ("vendor:A:B", "is not a target"),
        ("", "is not a target"),
        ("a b", "is not a target"),
        (".vendor", "is not a target"),
    ],
)
def test_what_is_no_target_is_refused(target, said):
    with pytest.raises(TargetError) as caught:
        find(target)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def", "cannot be imported: SyntaxError: "),
        ("raise ImportError('two\\nlines')", "cannot be imported: ImportError: two lines"),
        ("import not_installed.sub", "'broken' needs 'not_installed', which is not installed"),
        ("import sys; sys.exit('no')", "cannot be imported: SystemExit: no"),
        ("import pytest; pytest.skip('no', allow_module_level=True)", "cannot be imported: Skipped: no"),
        ("class E(Exception):\n def __str__(self): raise E\nraise E", "cannot be imported: E: its message"),
        ("raise RuntimeError('\\x1b[31m' + 'x' * 10**6)", "RuntimeError: \\x1b[31mxxx"),
        ("raise AttributeError('no')", "cannot be imported: AttributeError: no"),
    ],
)
def test_a_module_that_cannot_be_imported_says_so_in_one_line(folder, source, said):
    module(folder, "broken", source)
    with pytest.raises(TargetError) as caught:
        find("broken")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 3000


# --- registering ----------------------------------------------------------------------------------


def distribution(folder, **points):
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("[keyedopt.implementations]\n" + "\n".join(lines))


def test_a_vendor_registers_an_implementation(folder):
    distribution(folder, acme="vendor:IMPLEMENTATION", odd="vendor:NAMESPACE", gone="not_there:x")
    assert {"acme", "reference", "torchrec"} <= set(registered())
    assert find("acme").dtypes == ("float32",)
    with pytest.raises(TargetError, match="the entry point 'odd' gives a SimpleNamespace, not"):
        find("odd")
    with pytest.raises(TargetError, match="there is no module 'not_there'"):
        find("gone")


def test_nobody_takes_a_name_of_ours(folder):
    distribution(folder, reference="vendor:IMPLEMENTATION")
    assert find("reference").root == "keyedopt.reference"


# --- what an implementation says of itself ---------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"areas": "keyed"},
        {"areas": ("keyd",)},
        {"dtypes": "float32"},
        {"dtypes": ("float31",)},
        {"dtypes": ()},
        {"devices": ()},
        {"devices": "cpu"},
        {"distributions": "acme"},
        {"placeholders": (1,)},
    ],
)
def test_an_implementation_that_says_nonsense_is_refused(wrong):
    with pytest.raises((TypeError, ValueError)):
        Implementation(name="acme", root="acme", **wrong)


def test_only_what_is_supported_can_be_asked_for():
    acme = Implementation(name="acme", root="acme", devices=("cuda", "cpu"), dtypes=("float32",))
    assert acme.supported(None) == "cuda"
    assert acme.supported("cuda:1", ["float32"]) == "cuda:1"
    with pytest.raises(TargetError, match="acme supports the devices cuda, cpu, not 'xpu'"):
        acme.supported("xpu")
    with pytest.raises(TargetError, match="acme supports the dtypes float32, not 'float64'"):
        acme.supported(None, ["float64"])


# --- the surface ----------------------------------------------------------------------------------


def test_an_area_is_claimed_when_one_of_its_names_is_there():
    assert find("vendor:KEYED_ALONE").surface().claimed() == ("keyed", "sharded", "devices")


def test_a_claimed_name_that_is_missing_is_missing():
    surface = find("vendor:IMPLEMENTATION").surface()
    assert surface.claimed() == ("keyed", "wrapper", "clipping", "sharded", "devices")
    assert surface.OptimizerWrapper is reference.OptimizerWrapper
    for _ in range(2):
        with pytest.raises(MissingName, match="acme has no GradientClippingOptimizer"):
            surface.GradientClippingOptimizer  # noqa: B018


def test_what_a_class_lacks_is_looked_for_nowhere():
    """A case says by it that it is unsupported, so no namespace that has anything may answer."""
    surface = Implementation("acme", types.SimpleNamespace(**{"SGD.fused": object()})).surface()
    assert not surface.claims("SGD.fused")
    with pytest.raises(MissingName, match=r"acme has no SGD\.fused"):
        getattr(surface, "SGD.fused")


def test_a_placeholder_is_no_name():
    surface = find("vendor:OBJECT").surface()
    assert not surface.has("CombinedOptimizer")
    assert "combined" not in surface.claimed()
    with pytest.raises(MissingName, match="only as a placeholder"):
        surface.CombinedOptimizer  # noqa: B018


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("keyedopt.reference", "keyedopt.reference:OptimizerWrapper"),
        ("vendor:NAMESPACE", "vendor:NAMESPACE.OptimizerWrapper"),
        ("vendor:IMPLEMENTATION", "keyedopt.reference.keyed:OptimizerWrapper"),
        ("vendor:OBJECT", f"{reference.OptimizerWrapper.__module__}:OptimizerWrapper"),
        ("split", "split.keyed:OptimizerWrapper"),
    ],
)
def test_each_name_has_a_place_from_which_it_can_be_imported(folder, target, place):
    module(folder, "split.keyed", "from keyedopt.reference.keyed import *")
    module(folder, "split.__init__", "")
    surface = find(target).surface()
    places = surface.places()
    assert places["OptimizerWrapper"] == place
    for name, where in places.items():
        assert load(where) is getattr(surface, name)


def test_what_is_defined_in_a_function_has_no_place():
    class Local:
        pass

    Local.__module__ = __name__
    acme = Implementation(name="acme", root=type("Root", (), {"OptimizerWrapper": Local}))
    assert acme.surface().places() == {}


def test_submodules_of_a_package_are_searched(folder):
    module(folder, "acme.__init__", "")
    module(folder, "acme.elsewhere", "from keyedopt.reference import OptimizerWrapper")
    module(folder, "acme.unrelated", "raise RuntimeError('of no concern')")
    module(folder, "acme.test_acme", "raise SystemExit('tests are not imported')")
    module(folder, "acme._private", "from keyedopt.reference import GradientClipping")
    assert find("acme").surface().claimed() == ("wrapper", "sharded", "devices")


def test_what_a_module_only_imports_is_not_claimed(folder):
    module(folder, "acme", "from torch.optim import SGD, Adam, SparseAdam\nclass SGD(SGD): ...")
    surface = find("acme").surface()
    assert surface.claimed() == ("algorithms", "sharded", "devices")
    assert surface.claims("SGD")
    assert not surface.claims("Adam")
    assert surface.SparseAdam is torch.optim.SparseAdam  # of no claimed area
    with pytest.raises(MissingName, match="acme only imports Adam"):
        surface.Adam  # noqa: B018
    module(folder, "nothing", "from torch.optim import SGD")
    assert find("nothing").surface().claimed() == ()


PLACEHOLDERS = """
import torch

class SGD(torch.optim.Optimizer):
    def __init__(self, params, **options): ...
    @torch.no_grad()
    def step(self, closure=None):
        \"\"\"Take a step.\"\"\"
        raise NotImplementedError

class Adam(torch.optim.Adam): ...
"""


def test_a_class_that_only_names_an_algorithm_is_not_claimed(folder):
    module(folder, "acme", PLACEHOLDERS)
    surface = find("acme").surface()
    assert surface.claims("Adam")
    assert surface.lacks("SGD")
    assert not surface.claims("SGD")


WARMUP = """
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

class WarmupOptimizer(WarmupOptimizer): ...
"""


@pytest.mark.parametrize("target", ["acme", "acme:WarmupOptimizer"])
def test_types_of_arguments_may_come_from_the_library_that_is_extended(torchrec, folder, target):
    module(folder, "acme", WARMUP)
    surface = find(target).surface()
    assert "warmup" in surface.claimed()
    assert surface.claims("WarmupStage")
    assert not surface.lacks("WarmupPolicy")
    assert surface.WarmupStage is torchrec.optim.warmup.WarmupStage
    assert extended(surface) == ["torchrec"]
    module(folder, "types_alone", "from torchrec.optim.warmup import WarmupStage")
    assert find("types_alone").surface().claimed() == ()


@pytest.mark.parametrize(("module", "name"), [("torchrec.optim", "torchrec"), ("torch", "torch")])
def test_the_module_of_a_published_library_means_its_description(module, name):
    assert find(module) is find(name)


def test_a_submodule_where_a_name_should_be_has_to_be_importable(folder):
    module(folder, "acme.__init__", "")
    module(folder, "acme.keyed", "import fbgemm_of_another_name")
    with pytest.raises(TargetError, match=r"'acme\.keyed' needs 'fbgemm_of_another_name'"):
        find("acme").surface().claimed()


def test_a_name_that_cannot_be_had_says_why(folder):
    module(folder, "lazy", "def __getattr__(name):\n raise ImportError(f'no {name}\\nsorry')")
    with pytest.raises(TargetError, match="lazy cannot give its KeyedOptimizer: ImportError: no Keyed"):
        find("lazy").surface().claimed()


def test_a_submodule_is_no_public_name(folder):
    module(folder, "acme.__init__", "import acme.KeyedOptimizer")
    module(folder, "acme.KeyedOptimizer", "")
    assert not find("acme").surface().has("KeyedOptimizer")


def test_private_names_are_not_public():
    surface = find("reference").surface()
    with pytest.raises(AttributeError):
        surface._anything  # noqa: B018


def test_an_implementation_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        find("reference").name = "other"


def test_a_name_of_an_area_that_is_not_claimed_is_lacked_unless_it_is_there():
    library = types.SimpleNamespace(SGD=object, WarmupOptimizer=object)
    surface = Implementation(name="acme", root=library, areas=("algorithms",)).surface()
    assert not surface.lacks("SGD")
    assert not surface.lacks("Adam.decay")  # of the area that is claimed, so its absence is a failure
    assert not surface.lacks("WarmupOptimizer")
    assert surface.lacks("KeyedOptimizerWrapper")
