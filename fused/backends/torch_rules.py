"""The algorithms in plain torch: the rows of a table and their state, updated in place, all at once.

The formulas are those of `keyedopt.reference.rules`. Each gets the weight in float32 at least, and writes
weight and state; the gradient is only read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.backends.rounding import round_into
from keyedopt.fused.backends.row_norms import row_norm, trust_ratio

WIDE = (torch.float32, torch.float64)
#: A number, a tensor of one number, or a column of one number for each row.
Number = Any


def update(
    step: Step, weight: Tensor, grad: Tensor, states: Sequence[Tensor] = (), counts: Tensor | None = None
) -> None:
    """Update rows in place.

    Args:
        step: the formula and its numbers.
        weight: (U, D), gathered rows or a whole table; any shape for algorithms without row sums.
        grad: as `weight`, every row once; not written.
        states: in the order of `ALGORITHMS`, for these rows; contiguous if they have one number for each row.
        counts: (U,) the earlier steps of each row, for bias correction by row; increased by 1.
    """
    count: Number = step.count
    if counts is not None:
        counts += 1
        count = counts.reshape(-1, *[1] * (weight.ndim - 1))
    w = _wide(weight)
    g = grad.to(w.dtype)
    if step.maximize:
        g = -g
    if step.decay == "l2" and step.weight_decay:
        g = torch.add(g, w, alpha=step.weight_decay)
    wide = [_wide(state) for state in states]
    RULES[step.algorithm](w, g, wide, step, count)
    for tensor, new in zip(states, wide, strict=True):
        if new is not tensor:
            tensor.copy_(new)
    if w is not weight:
        round_into(weight, w, step.seed)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in WIDE else tensor.float()


# --- the formulas ---------------------------------------------------------------------------------


def _sgd(w: Tensor, g: Tensor, states: Sequence[Tensor], step: Step, count: Number) -> None:
    if states:
        (b,) = states
        if step.first:
            b.copy_(g)
        else:
            b.mul_(step.momentum).add_(g, alpha=1 - step.dampening)
        g = torch.add(g, b, alpha=step.momentum) if step.nesterov else b
    _decouple(w, step)
    if isinstance(step.lr, Tensor):
        w -= g * step.lr
    else:
        w.add_(g, alpha=-step.lr)


def _adagrad(w: Tensor, g: Tensor, states: Sequence[Tensor], step: Step, count: Number) -> None:
    (s,) = states
    s.addcmul_(g, g)
    _decouple(w, step)
    _descend(w, g, s.sqrt(), step.eps, _falling_rate(step, count, w))


def _rowwise_adagrad(w: Tensor, g: Tensor, states: Sequence[Tensor], step: Step, count: Number) -> None:
    s = states[0].view(-1, 1)
    s += _mean_square(g)
    _decouple(w, step)
    _descend(w, g, s.sqrt(), step.eps, _falling_rate(step, count, w))
    _limit_norm(w, step)


def _adam(w: Tensor, g: Tensor, states: Sequence[Tensor], step: Step, count: Number) -> None:
    m, v = _moments(g, states, step)
    first, second = (_correction(beta, count, w) for beta in step.betas)
    _decouple(w, step)
    if step.eps_placement == "before_bias_correction":
        _descend(w, m, v.sqrt(), step.eps, step.lr * (second**0.5 / first))
    else:
        _descend(w, m, (v / second).sqrt_(), step.eps, step.lr / first)
    _limit_norm(w, step)


def _lamb(w: Tensor, g: Tensor, states: Sequence[Tensor], step: Step, count: Number) -> None:
    m, v = _moments(g, states, step)
    first, second = (_correction(beta, count, w) for beta in step.betas)
    r = (m / first).div_(_with_eps((v / second).sqrt_(), m, step.eps))
    if step.decay == "decoupled" and step.weight_decay:
        r.add_(w, alpha=step.weight_decay)
    rate = step.lr * trust_ratio(row_norm(w), row_norm(r))
    w.addcmul_(r, rate.to(w.dtype), value=-1)
    _limit_norm(w, step)


def _lars_sgd(w: Tensor, g: Tensor, states: Sequence[Tensor], step: Step, count: Number) -> None:
    (b,) = states
    length = row_norm(w)
    rate = step.lr * trust_ratio(step.eta * length, row_norm(g) + step.weight_decay * length)
    if step.weight_decay:
        g = torch.add(g, w, alpha=step.weight_decay)
    b.mul_(step.momentum).addcmul_(g, rate.to(w.dtype))
    w -= b


def _ftrl(w: Tensor, g: Tensor, states: Sequence[Tensor], step: Step, count: Number) -> None:
    n, z = states
    if step.weight_decay:
        g = torch.add(g, w, alpha=step.weight_decay)
    before = n.pow(-step.lr_power)
    root = n.addcmul_(g, g).pow(-step.lr_power)
    z += g
    z.addcmul_((root - before).div_(step.lr), w, value=-1)
    if step.l2_shrinkage:
        z.add_(w, alpha=2 * step.l2_shrinkage)
    numerator = z.clamp(-step.l1, step.l1).sub_(z)
    denominator = root.add_(step.beta).div_(step.lr).add_(2 * step.l2)
    undefined = (denominator == 0) & (numerator == 0)
    w.zero_().add_(numerator.div_(denominator).masked_fill_(undefined, 0.0))


RULES: dict[str, Callable[[Tensor, Tensor, Sequence[Tensor], Step, Number], None]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "sparse_adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "partial_rowwise_lamb": _lamb,
    "lars_sgd": _lars_sgd,
    "ftrl": _ftrl,
}


# --- shared parts ------------------------------------------------------------------------------


def _limit_norm(w: Tensor, step: Step) -> None:
    """Scale rows with a norm above `max_norm` down to it."""
    if step.max_norm is not None:
        length = row_norm(w)
        w *= torch.where(length > step.max_norm, step.max_norm / length, 1.0).to(w.dtype)


def _mean_square(values: Tensor) -> Tensor:
    """Return mean(x²) of every row as a column."""
    return values.square().mean(dim=1, keepdim=True)


def _moments(g: Tensor, states: Sequence[Tensor], step: Step) -> tuple[Tensor, Tensor]:
    """Update and return the moments of Adam; the second one as a column if it has one number for each row."""
    (m, v), (beta1, beta2) = states, step.betas
    if v.ndim < m.ndim:
        v = v.view(-1, 1)
        v.mul_(beta2).add_(_mean_square(g), alpha=1 - beta2)
    else:
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    return m, v


def _correction(beta: float, count: Number, like: Tensor) -> Number:
    """Return 1 − βᵗ, computed in float64: one number, or a column of one number for each row."""
    if not isinstance(count, Tensor):
        return 1.0 - beta**count
    exact = 1.0 - torch.pow(beta, count.to(like.device, torch.float64))
    return exact.to(like.dtype)


def _falling_rate(step: Step, count: Number, like: Tensor) -> Number:
    """Return lr / (1 + (t − 1) lr_decay), computed in float64."""
    if not step.lr_decay:
        return step.lr
    if not isinstance(count, Tensor):
        return step.lr / (1 + (count - 1) * step.lr_decay)
    exact = step.lr / (1 + (count.to(like.device, torch.float64) - 1) * step.lr_decay)
    return exact.to(like.dtype)


def _decouple(w: Tensor, step: Step) -> None:
    """Shrink the weight by decoupled decay; 1 − γλ, rounded, would add as large an error as the product."""
    if step.decay == "decoupled" and step.weight_decay:
        w -= w * (step.lr * step.weight_decay)


def _descend(w: Tensor, numerator: Tensor, root: Tensor, eps: float, rate: Number) -> None:
    """Step by rate · numerator / (root + eps), with 0 / 0 = 0; `root` is overwritten."""
    denominator = _with_eps(root, numerator, eps)
    if isinstance(rate, Tensor):
        w -= numerator / denominator * rate
    else:
        w.addcdiv_(numerator, denominator, value=-rate)


def _with_eps(root: Tensor, numerator: Tensor, eps: float) -> Tensor:
    """Return root + eps; 1 where that and the numerator are zero, so that the quotient is 0."""
    root.add_(eps)
    if eps > torch.finfo(root.dtype).tiny:
        return root
    # Any other number over zero stays infinite: its square underflowed, which must not be hidden.
    return root.expand_as(numerator).masked_fill((root == 0) & (numerator == 0), 1.0)
