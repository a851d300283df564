"""Cases do not apply where torch itself has no kernel: ``targets/without_kernels.py`` lacks fused Adagrad."""

import pytest
import torch
from making import TARGETS

from keyedopt.conformance.run import runner
from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


@pytest.mark.parametrize(
    ("target", "clauses", "fused"),
    [("REFERENCE", ("CLIP-083", "CLIP-085"), "True"), ("TORCH", ("ALGO-097",), "fused")],
)
def test_a_kernel_that_torch_lacks_is_not_asked_of_an_implementation(target, clauses, fused):
    """In ALGO-097 torch has other failures, but none of fused Adam except for the layouts."""
    found = runner.run(f"without_kernels:{target}", runner.Options(clauses=clauses), path=[TARGETS]).cases
    lacking = [case for case in found if "Adagrad" in case.case and fused in case.case]
    assert len(lacking) >= 4
    for case in lacking:
        assert (case.outcome, case.seen[:26]) == ("unsupported", "torch has no Adagrad with ")
    others = [case for case in found if "Adam" in case.case and fused in case.case]
    assert {case.outcome for case in others if "layouts" not in case.case} == {"pass"}


def test_torch_is_asked_for_a_step_on_the_device():
    optimizer = torch_factory(torch.optim.SGD, lr=0.5, momentum=0.5)([torch.nn.Parameter(torch.ones(1))])
    assert optimizer.param_groups[0]["momentum"] == 0.5
    with pytest.raises(CannotRun, match="torch has no Adam with capturable=True, foreach=False on cpu: "):
        torch_factory(torch.optim.Adam, capturable=True, foreach=False)
    with pytest.raises(TypeError, match="speed"):  # an error of the suite
        torch_factory(torch.optim.Adam, speed=1)
