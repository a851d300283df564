"""Which devices the command line takes, and what it says of those that it does not."""

import pytest
from making import keyedopt, module, refused

from keyedopt.conformance.run import runner
from keyedopt.conformance.run.runner import Options, RunError

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=2, spread=True)

PRETEND = ("--import", "keyedopt.conformance.pretend")


@slow
def test_list_devices_shows_what_is_here():
    plain, more = keyedopt("list", "devices"), keyedopt("list", "devices", *PRETEND)
    assert plain.returncode == more.returncode == 0, plain.stderr + more.stderr
    assert plain.stdout.startswith("cpu ")
    assert "npu" not in plain.stdout
    lines = more.stdout.splitlines()
    assert lines[-1] == "npu:1      pretend accelerator 1; dtypes: float64, float32, bfloat16, float16"
    assert lines[-2].startswith("npu:0 ")


@slow
@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_a_built_in_target_is_checked_on_a_device_of_an_imported_module(device):
    options = Options(clauses=("KEYED-001",), device=device, imports=PRETEND[1:])
    result = runner.run("reference", options)
    assert (result.environment["device"], result.options["imports"]) == (device, list(PRETEND[1:]))
    assert result.environment["gpu"] == f"pretend accelerator {1 if device == 'npu:1' else 0}"
    assert {case.outcome for case in result.cases} == {"pass"}


@slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("reference", "--device", "nothing"), "torch knows no device 'nothing': `keyedopt list devices`"),
        (("reference", "--device", "npu"), "torch knows no device 'npu': `keyedopt list devices` shows"),
        (("reference", "--device", "npu:7", *PRETEND), "'npu:7' is not here (there is npu:0, npu:1)"),
        (("reference", "--device", "xpu"), "the device 'xpu' is not here (there is none of type xpu)"),
        (("reference", "--device", "cpu:1"), "the device 'cpu:1' is not here"),
        (
            ("reference", "--device", "meta"),
            "the device 'meta' does not add numbers, so nothing can be checked",
        ),
        (
            ("reference", "--import", "no_such_module"),
            "there is no module 'no_such_module' in this environment",
        ),
        (("fbgemm", "--device", "npu", *PRETEND), "fbgemm supports the devices cpu, cuda, not 'npu'"),
    ],
)
def test_devices_that_are_not_here(arguments, said, run_line):
    assert said in refused(run_line("check", *arguments))


@slow
def test_an_adapter_names_its_modules_devices_and_dtypes(tmp_path):
    module(
        tmp_path,
        "acme_devices",
        "from keyedopt.conformance.targets.implementation import Implementation\n"
        "ACME = Implementation(\n"
        "    name='acme', root='keyedopt.reference', areas=('keyed',), devices=('npu', 'cpu'),\n"
        "    device_dtypes={'npu': ('float32',)}, imports=('keyedopt.conformance.pretend',),\n"
        ")\n"
        "NO_DATA = Implementation(name='acme', root='keyedopt.reference', devices=('meta',))\n",
    )

    def check(**options):
        return runner.run(
            "acme_devices:ACME", Options(clauses=("KEYED-001",), **options), path=[str(tmp_path)]
        )

    result = check()
    assert result.environment["device"] == "npu"
    assert result.implementation["dtypes"] == ["float32"]
    assert {case.dtype for case in result.cases} <= {None, "float32"}
    with pytest.raises(RunError, match="the device 'meta' does not add numbers"):
        runner.run("acme_devices:NO_DATA", Options(clauses=("KEYED-001",)), path=[str(tmp_path)])
    for options, said in (
        ({"dtypes": ("bfloat16",)}, "acme supports the dtypes float32, not 'bfloat16'"),
        ({"device": "cuda"}, "acme supports the devices npu, cpu, not 'cuda'"),
    ):
        with pytest.raises(RunError, match=said):
            check(**options)
