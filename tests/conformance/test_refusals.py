"""Which errors say what a target does not have."""

import pytest

from keyedopt.conformance.run.device_seen import SUITE
from keyedopt.conformance.run.refusals import unclaimed


@pytest.mark.parametrize(
    "text",
    [
        "Adam does not support sparse gradients, please consider SparseAdam instead",
        "RowWise adagrad cannot be used with sparse gradients",
        "Lamb doesn't support sparse gradients.",
    ],
)
def test_an_optimizer_may_refuse_sparse_gradients_in_words_of_its_own(text):
    assert unclaimed(RuntimeError(text), ["SGD", "SGD.sparse"]).startswith("SGD.sparse: ")
    assert unclaimed(RuntimeError(text), ["SGD"]) == ""
    assert unclaimed(RuntimeError("sparse gradients have other rows"), ["SGD.sparse"]) == ""


class Inner:
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def step(self) -> None: ...


class Outer:
    def __init__(self, **options: float) -> None:
        self.inner = Inner(**options)


def error_of(action) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("no error")


def test_an_option_that_the_case_needs_may_be_missing_deeper_inside():
    error = error_of(lambda: Outer(lr=0.1, eta=1.0))
    assert unclaimed(error, ["Outer", "Outer.eta"]) == "Inner has no argument eta"
    assert unclaimed(error, ["Outer", "Outer.beta"]) == ""


def test_a_function_may_stand_for_a_class_of_an_algorithm():
    text = "SGD() got an unexpected keyword argument 'rows'"
    case = {"__name__": f"{SUITE}algorithms", "error": TypeError(text)}
    assert unclaimed(error_of(lambda: exec("raise error", case)), []) == "SGD has no argument rows"
    case["error"] = TypeError(text.replace("SGD", "apply_optimizer_in_backward"))
    assert unclaimed(error_of(lambda: exec("raise error", case)), []) == ""


def test_a_method_without_an_argument_is_a_failure():
    error = error_of(lambda: Inner(lr=0.1).step(eta=1.0))
    assert unclaimed(error, ["Inner.eta"]) == ""
