"""The algorithms against their golden trajectories: in float64 to 1e-12, otherwise within a budget."""

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    expect_same_way,
    make_algorithm,
    need_switch,
    trained_copy,
)
from keyedopt.conformance.suite.support.assertions import error_of, expect
from keyedopt.conformance.suite.support.described import OTHER
from keyedopt.conformance.suite.support.device import zeros
from keyedopt.conformance.suite.support.inputs import parameter
from keyedopt.conformance.suite.support.trajectories import (
    follow_trajectory,
    formula,
    golden_trajectories,
    special,
)

#: Switches that choose how fast a step is.
KERNELS = ("fused", "foreach")
KIN = ("PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD", "Ftrl")


# --- the formulas ---------------------------------------------------------------------------------


@pytest.mark.clause("ALGO-001")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("SGD-plain"))
def test_sgd(impl, algorithm, made):
    """SGD subtracts lr times the gradient."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-002")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("SGD-momentum", "SGD-dampening", "SGD-nesterov"))
def test_sgd_momentum(impl, algorithm, made):
    """SGD has a momentum buffer, applies dampening from the second step on, and looks ahead with nesterov."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-003")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("SGD-decay"))
def test_sgd_weight_decay(impl, algorithm, made):
    """SGD adds weight_decay times the weight to the gradient."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-004")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("Adagrad-plain"))
def test_adagrad(impl, algorithm, made):
    """Adagrad divides by the square root of the sum of squares plus eps."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-005")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("Adagrad-lr-decay"))
def test_adagrad_lr_decay(impl, algorithm, made):
    """Adagrad's learning rate decreases with lr_decay; its sum starts at initial_accumulator_value."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-006")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("Adagrad-decay"))
def test_adagrad_weight_decay(impl, algorithm, made):
    """Adagrad adds weight_decay times the weight to the gradient."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-007")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("RowWiseAdagrad-plain"))
def test_rowwise_adagrad(impl, algorithm, made):
    """Row-wise Adagrad divides by the square root of the sum of the row's mean squares, plus eps."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-008")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("RowWiseAdagrad-lr-decay"))
def test_rowwise_adagrad_lr_decay(impl, algorithm, made):
    """Row-wise Adagrad applies lr_decay, and its sum starts at initial_accumulator_value."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-009")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("RowWiseAdagrad-decay"))
def test_rowwise_adagrad_weight_decay(impl, algorithm, made):
    """Row-wise Adagrad adds weight_decay times the weight to the gradient, in all rows if it is dense."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-010")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("Adam-plain", "Adam-betas"))
def test_adam(impl, algorithm, made):
    """Adam divides the corrected mean by the square root of the corrected mean square plus eps."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-011")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("Adam-decay"))
def test_adam_weight_decay(impl, algorithm, made):
    """Adam adds weight_decay times the weight to the gradient."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-102")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("AdamW-plain", "AdamW-betas", "AdamW-decay"))
def test_adamw(impl, algorithm, made):
    """AdamW steps as Adam does without decay, and subtracts lr times weight_decay times the weight."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-012")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("PartialRowWiseAdam-plain", "PartialRowWiseAdam-betas"))
def test_partial_rowwise_adam(impl, algorithm, made):
    """Partial row-wise Adam keeps the mean of the row's mean squares."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-013")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("PartialRowWiseAdam-decay"))
def test_partial_rowwise_adam_weight_decay(impl, algorithm, made):
    """Partial row-wise Adam's decay is decoupled from the moments."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-014")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("LAMB-plain", "LAMB-betas"))
def test_lamb(impl, algorithm, made):
    """LAMB scales Adam's direction by the ratio of the row's norms."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-015")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("LAMB-decay"))
def test_lamb_weight_decay(impl, algorithm, made):
    """LAMB adds the decay to the direction before it computes the ratio."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-016")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("PartialRowWiseLAMB-plain", "PartialRowWiseLAMB-betas"))
def test_partial_rowwise_lamb(impl, algorithm, made):
    """Partial row-wise LAMB is LAMB with the mean of the row's mean squares."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-017")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("PartialRowWiseLAMB-decay"))
def test_partial_rowwise_lamb_weight_decay(impl, algorithm, made):
    """Partial row-wise LAMB adds the decay to the direction before it computes the ratio."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-018")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("LarsSGD-plain", "LarsSGD-momentum"))
def test_lars_sgd(impl, algorithm, made):
    """LARS scales the gradient by eta times the ratio of the row's norms and adds it to a momentum buffer."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-019")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("LarsSGD-decay"))
def test_lars_sgd_weight_decay(impl, algorithm, made):
    """LARS adds weight_decay times the weight to the gradient, and times its norm to the denominator."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-107")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("Ftrl-plain", "Ftrl-lr-power"))
def test_ftrl(impl, algorithm, made):
    """Ftrl sums squares and linearized losses, and computes the weight from both sums."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-108")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories("Ftrl-regularized"))
def test_ftrl_regularized(impl, algorithm, made):
    """Ftrl sets weights to 0 by l1, shrinks them by l2 and l2_shrinkage, and adds beta to the root."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-109")
@pytest.mark.needs("{algorithm}.weight_decay")
@pytest.mark.parametrize(**golden_trajectories("Ftrl-decay"))
def test_ftrl_weight_decay(impl, algorithm, made):
    """Ftrl adds weight_decay times the weight to the gradient, also in the accumulator."""
    formula(impl, algorithm, made)


# --- variants and kinds of gradients --------------------------------------------------------------


@pytest.mark.clause("ALGO-020")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(
    **golden_trajectories(
        *(f"{name}-maximize" for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW"))
    )
)
def test_maximize(impl, algorithm, made):
    """With maximize the objective increases."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-021")
@pytest.mark.needs("{algorithm}.maximize")
@pytest.mark.parametrize(**golden_trajectories(*(f"{name}-maximize" for name in KIN)))
def test_maximize_rowwise(impl, algorithm, made):
    """With maximize the objective increases."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-022")
@pytest.mark.needs("{algorithm}.decay")
@pytest.mark.parametrize(**golden_trajectories(*special("decay-decoupled"), *special("decay-l2")))
def test_other_decay(impl, algorithm, made):
    """The argument decay selects L2 or decoupled decay."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-023")
@pytest.mark.needs("Adam.eps_placement")
@pytest.mark.parametrize(**golden_trajectories("Adam-eps-placement"))
def test_eps_placement(impl, algorithm, made):
    """The argument eps_placement adds eps before the bias correction."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-024")
@pytest.mark.needs("{algorithm}.bias_correction")
@pytest.mark.parametrize(**golden_trajectories(*special("per-row")))
def test_bias_correction_per_row(impl, algorithm, made):
    """The argument bias_correction corrects every row by the number of its own steps."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-025")
@pytest.mark.needs("{algorithm}.max_norm")
@pytest.mark.parametrize(**golden_trajectories(*special("max-norm")))
def test_max_norm(impl, algorithm, made):
    """The argument max_norm limits the norm of every row after the step."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-026")
@pytest.mark.needs("{algorithm}.sparse")
@pytest.mark.parametrize(**golden_trajectories(*special("sparse")))
def test_sparse(impl, algorithm, made):
    """A sparse gradient updates each row that it lists once, with the sum of its duplicates."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-040")
@pytest.mark.needs("SGD.rows")
@pytest.mark.parametrize(**golden_trajectories("SGD-momentum-sparse"))
def test_sparse_momentum(impl, algorithm, made):
    """With a sparse gradient only the listed rows move, and only their momentum decays."""
    formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-027")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(**golden_trajectories(*special("extreme")))
def test_extreme_magnitudes(impl, algorithm, made, precision):
    """Gradients of 2^-40 and 2^20 in one row lose no more precision than rounding causes."""
    return follow_trajectory(impl, algorithm, made, precision)


@pytest.mark.clause("ALGO-028")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories(*special("plain")))
def test_precision(impl, algorithm, made, dtype):
    """The error is at most twice the worst of 64 orders of the formula in the same dtype, or 2 ULP."""
    return follow_trajectory(impl, algorithm, made, dtype)


@pytest.mark.clause("ALGO-029")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@pytest.mark.parametrize(**golden_trajectories(*special("sparse")))
def test_precision_of_sparse(impl, algorithm, made, dtype):
    """A sparse gradient with duplicates loses no more precision than the formula in the same dtype."""
    return follow_trajectory(impl, algorithm, made, dtype)


@pytest.mark.clause("ALGO-030")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(
    **golden_trajectories(
        *special("betas"), *special("momentum"), *special("lr-decay"), *special("regularized")
    )
)
def test_precision_of_options(impl, algorithm, made, dtype):
    """Other betas, momentum and lr_decay lose no more precision than the formula in the same dtype."""
    return follow_trajectory(impl, algorithm, made, dtype)


@pytest.mark.clause("ALGO-106")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(**golden_trajectories(*special("amsgrad")))
def test_amsgrad(impl, algorithm, made):
    """With amsgrad the largest second moment so far replaces the second moment, or it is refused."""
    if not error_of(lambda: make_algorithm(impl, algorithm, [parameter(2, 2)], amsgrad=True)):
        formula(impl, algorithm, made)


@pytest.mark.clause("ALGO-097")
@pytest.mark.needs("{algorithm}", "{algorithm}.{kernels}")
@pytest.mark.parametrize(**golden_trajectories("SGD-momentum", "Adagrad-plain", "Adam-plain", "AdamW-plain"))
@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels(impl, algorithm, made, kernels, dtype):
    """If there is a kernel switch, a step with the other kernel stays within the budget of the formula."""
    need_switch(impl, algorithm, kernels)
    follow_trajectory(impl, algorithm, {**made, "options": {**made["options"], kernels: True}}, dtype)


@pytest.mark.clause("ALGO-097")
@pytest.mark.needs("{algorithm}", "{algorithm}.{kernels}")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "Adam", "AdamW", OTHER])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("which", ["weight", "gradient"])
def test_kernels_and_layouts(impl, algorithm, kernels, which):
    """Other kernels respect the layouts of weight and gradient, and write only to the elements."""
    need_switch(impl, algorithm, kernels)
    start, grads = parameter(8, 4), [parameter(8, 4, seed=step).detach() for step in (1, 2)]
    plain, _ = trained_copy(impl, algorithm, start, grads)
    buffer = zeros(8, 8)
    weight = torch.nn.Parameter(buffer[:, ::2] if which == "weight" else start.detach().clone())
    weight.data.copy_(start)
    optimizer = make_algorithm(impl, algorithm, [weight], **{kernels: True})
    for grad in grads:
        weight.grad = grad.clone() if which == "weight" else grad.t().contiguous().t()
        optimizer.step()
    expect_same_way(weight, plain, start, "the weight", algorithm)
    expect(not buffer[:, 1::2].any(), "what lies between the elements unchanged", buffer)
