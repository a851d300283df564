"""The published formulas of the algorithms, one row at a time and in plain loops.

``a`` is the arithmetic, see `arithmetic`. A formula takes a row of weights w, its gradient g, the row's
state, the step number t and the options. It returns the new row and changes the state in place.
"""

import itertools
from collections.abc import Callable
from typing import Any

Row = list[Any]
State = dict[str, Row]
Options = dict[str, Any]


def l2(a: Any, w: Row, g: Row, o: Options) -> Row:
    """Return the gradient, negated for maximize, with L2 decay if it is selected."""
    signed = [-x for x in g] if o.get("maximize") else list(g)
    if o["decay"] != "l2" or not o["weight_decay"]:
        return signed
    return [x + a.scalar(o["weight_decay"]) * y for x, y in zip(signed, w, strict=True)]


def decoupled(o: Options) -> Any:
    """Return the factor of decoupled decay that is multiplied by the learning rate in the step itself."""
    apart = o.get("decay_by_itself") or o.get("decay_after")
    return o["weight_decay"] if o["decay"] == "decoupled" and not apart else 0.0


def decayed(a: Any, moved: Row, w: Row, o: Options) -> Row:
    """Decay a row w that moved, in the variants whose decay is apart from the step."""
    if not o["weight_decay"]:
        return moved
    if o.get("decay_by_itself"):
        return [x - a.scalar(o["weight_decay"]) * y for x, y in zip(moved, w, strict=True)]
    return shrunk(a, moved, o) if o.get("decay_after") else moved


def shrunk(a: Any, w: Row, o: Options) -> Row:
    """Shrink the row by 1 − lr·weight_decay."""
    kept = 1 - a.product([a.scalar(o["lr"]), a.scalar(o["weight_decay"])])
    return [x * kept for x in w]


def norm(a: Any, row: Row) -> Any:
    """Return ‖x‖."""
    return a.sqrt(a.total([x * x for x in row]))


def mean_square(a: Any, row: Row) -> Any:
    """Return mean(x²), with the division first or last."""
    if a.either("mean square"):
        return a.total([x * x for x in row]) / a.scalar(len(row))
    return a.total([x * x / a.scalar(len(row)) for x in row])


def average(a: Any, beta: float, mean: Any, factors: Row) -> Any:
    """Return βm + (1 − β)x, in either form; x is the product of the factors."""
    beta, rest = a.scalar(beta), 1 - a.scalar(beta)
    if a.either("average"):
        return beta * mean + a.product([rest, *factors])
    return mean + rest * (a.product(factors) - mean)


def sgd(a: Any, w: Row, g: Row, s: State, t: int, o: Options) -> Row:
    """SGD with momentum, dampening and Nesterov."""
    g = l2(a, w, g, o)
    lr, mu = a.scalar(o["lr"]), a.scalar(o["momentum"])
    direction = g
    if o["momentum"]:
        keep = 1 - a.scalar(o["dampening"])
        b = s["momentum_buffer"]
        undamped = t == 1 and not o.get("dampened_first")
        s["momentum_buffer"] = b = [x if undamped else mu * y + keep * x for x, y in zip(g, b, strict=True)]
        direction = [x + mu * y for x, y in zip(g, b, strict=True)] if o["nesterov"] else b
    rest = a.product([lr, a.scalar(decoupled(o))])
    moved = [x - a.product([lr, d]) - rest * x for x, d in zip(w, direction, strict=True)]
    return decayed(a, moved, w, o)


def adagrad(a: Any, w: Row, g: Row, s: State, t: int, o: Options) -> Row:
    """Adagrad: one sum of squares per element."""
    g = l2(a, w, g, o)
    s["sum"] = [x + y * y for x, y in zip(s["sum"], g, strict=True)]
    return rated(a, w, g, s["sum"], t, o)


def rowwise_adagrad(a: Any, w: Row, g: Row, s: State, t: int, o: Options) -> Row:
    """Row-wise Adagrad: one sum of mean squares (or sums of squares) per row, and max_norm."""
    g = l2(a, w, g, o)
    square = a.total([x * x for x in g]) if o.get("accumulate") == "sum" else mean_square(a, g)
    s["sum"] = [s["sum"][0] + square]
    return limited(a, rated(a, w, g, s["sum"] * len(w), t, o), o)


def limited(a: Any, w: Row, o: Options) -> Row:
    """Scale a row whose norm exceeds max_norm down to it."""
    length, most = norm(a, w), o.get("max_norm")
    if most is not None and length > a.scalar(most):
        return [a.product([x, a.scalar(most)], [length]) for x in w]
    return w


def rated(a: Any, w: Row, g: Row, sums: Row, t: int, o: Options) -> Row:
    """Step by lr / (1 + (t − 1)·lr_decay) · g / (√s + eps)."""
    slower = 1 + a.scalar(t - 1) * a.scalar(o["lr_decay"])
    lr = a.scalar(o["lr"])
    rest = a.product([lr, a.scalar(decoupled(o))])
    moved = [
        x - a.product([lr, y], [slower, divisor(a, z, o)]) - rest * x
        for x, y, z in zip(w, g, sums, strict=True)
    ]
    return decayed(a, moved, w, o)


def divisor(a: Any, v: Any, o: Options) -> Any:
    """Return √v + eps, or what the variant has in its place."""
    if o.get("eps_placement") == "in_root":
        return a.sqrt(v + a.scalar(o["eps"]))
    if o.get("eps_placement") == "bound":
        return max(a.sqrt(v), a.number(o["eps"]))
    return a.sqrt(v) + a.scalar(o["eps"])


def direction(a: Any, w: Row, g: Row, s: State, t: int, o: Options, partial: bool, rest: Any = 0.0) -> Row:
    """Move Adam's moments; return m̂ / (√v̂ + eps), plus `rest` times the weights."""
    beta1, beta2 = o["betas"]
    squares = [[mean_square(a, g)]] if partial else [[x, x] for x in g]
    s["exp_avg"] = [average(a, beta1, m, [x]) for m, x in zip(s["exp_avg"], g, strict=True)]
    s["exp_avg_sq"] = [average(a, beta2, v, x) for v, x in zip(s["exp_avg_sq"], squares, strict=True)]
    if "step" in s:  # a count a row
        s["step"] = [s["step"][0] + 1]
        t = int(s["step"][0])
    first, second = 1 - a.scalar(beta1) ** t, 1 - a.scalar(beta2) ** t
    if o.get("bias_correction") == "none":
        first, second = a.scalar(1.0), a.scalar(1.0)
    if "max_exp_avg_sq" in s:  # amsgrad
        s["max_exp_avg_sq"] = [
            max(v, most) for v, most in zip(s["exp_avg_sq"], s["max_exp_avg_sq"], strict=True)
        ]
    roots = [root(a, v, second, o) for v in s.get("max_exp_avg_sq", s["exp_avg_sq"])]
    roots *= len(w) if partial else 1
    result = []
    for x, m, (over, under) in zip(w, s["exp_avg"], roots, strict=True):
        step = a.product([m, *over], [first, under])
        result.append(step + a.scalar(rest) * x if rest else step)
    return result


def root(a: Any, v: Any, correction: Any, o: Options) -> tuple[Row, Any]:
    """Return the factors of the numerator and the denominator of m, which depend on the placement of eps."""
    placement, eps = o.get("eps_placement"), a.scalar(o["eps"])
    if placement == "before_bias_correction":
        return [a.sqrt(correction)], a.sqrt(v) + eps
    if placement in ("in_root", "bound") or a.either("root"):
        return [], divisor(a, v / correction, o)
    return [], a.sqrt(v) / a.sqrt(correction) + eps


def adam(a: Any, w: Row, g: Row, s: State, t: int, o: Options, partial: bool = False) -> Row:
    """Adam and AdamW; with `partial`, one second moment per row."""
    rest = decoupled(o)
    first = bool(rest) and a.either("decay first")
    steps = direction(a, w, l2(a, w, g, o), s, t, o, partial, 0.0 if first else rest)
    w = shrunk(a, w, o) if first else w
    moved = decayed(a, [x - a.scalar(o["lr"]) * d for x, d in zip(w, steps, strict=True)], w, o)
    return limited(a, moved, o) if "max_norm" in o else moved


def lamb(a: Any, w: Row, g: Row, s: State, t: int, o: Options, partial: bool = False) -> Row:
    """Adam's direction scaled to the norm of the row; the ratio is 1 if a norm is 0."""
    rest = decoupled(o)
    steps = direction(a, w, l2(a, w, g, o), s, t, o, partial, rest)
    over, under = norm(a, w), norm(a, steps)
    ratio = ([over], [under]) if over and under else ([], [])
    lr = a.scalar(o["lr"])
    moved = [x - a.product([lr, d, *ratio[0]], ratio[1]) for x, d in zip(w, steps, strict=True)]
    moved = decayed(a, moved, w, o)
    return limited(a, moved, o) if "max_norm" in o else moved


def lars(a: Any, w: Row, g: Row, s: State, t: int, o: Options) -> Row:
    """Momentum of gradients scaled to the norm of the row; the ratio is 1 if a norm is 0."""
    g = [-x for x in g] if o.get("maximize") else g
    lr, mu, eta = a.scalar(o["lr"]), a.scalar(o["momentum"]), a.scalar(o["eta"])
    decay = a.scalar(o["weight_decay"])
    length = norm(a, w)
    under = norm(a, g) + decay * length
    scaled = o["weight_decay"] or not o.get("scale_only_decayed")
    ratio = ([eta, length], [under]) if scaled and length and under else ([], [])
    decayed = [x + decay * y for x, y in zip(g, w, strict=True)]
    s["momentum_buffer"] = [
        mu * b + a.product([lr, x, *ratio[0]], ratio[1])
        for b, x in zip(s["momentum_buffer"], decayed, strict=True)
    ]
    return [x - b for x, b in zip(w, s["momentum_buffer"], strict=True)]


def ftrl(a: Any, w: Row, g: Row, s: State, t: int, o: Options) -> Row:
    """FTRL-Proximal: the weights that minimize the regularized sum of the linearized losses."""
    g = l2(a, w, g, {**o, "decay": "l2"})
    lr, power, most = a.scalar(o["lr"]), -o["lr_power"], a.scalar(o["l1"])
    shrinkage, beta = a.scalar(2 * o["l2_shrinkage"]), a.scalar(o["beta"])
    penalty = a.scalar(o.get("l2_factor", 2) * o["l2"])
    before = [a.power(n, power) for n in s["accumulator"]]
    s["accumulator"] = [n + x * x for n, x in zip(s["accumulator"], g, strict=True)]
    roots = [a.power(n, power) for n in s["accumulator"]]
    s["linear"] = [
        a.total([z, x, -a.product([new - old, y], [lr]), *([shrinkage * y] if o["l2_shrinkage"] else [])])
        for z, x, y, old, new in zip(s["linear"], g, w, before, roots, strict=True)
    ]
    over = [max(-most, min(most, z)) - z for z in s["linear"]]
    if not (o["beta"] or o["l2"]):
        return [a.product([lr, x], [root]) for x, root in zip(over, roots, strict=True)]
    under = [a.product([beta + root], [lr]) + penalty for root in roots]
    return [a.product([x], [y]) for x, y in zip(over, under, strict=True)]


def _partial(formula: Callable[..., Row]) -> Callable[..., Row]:
    return lambda a, w, g, s, t, o: formula(a, w, g, s, t, o, partial=True)


FORMULAS: dict[str, Callable[..., Row]] = {
    "SGD": sgd,
    "Adagrad": adagrad,
    "RowWiseAdagrad": rowwise_adagrad,
    "Adam": adam,
    "AdamW": adam,
    "PartialRowWiseAdam": _partial(adam),
    "LAMB": lamb,
    "PartialRowWiseLAMB": _partial(lamb),
    "LarsSGD": lars,
    "SparseAdam": adam,
    "Ftrl": ftrl,
}
#: Variants of formulas that libraries document, by the words of `Implementation.variants`.
VARIANTS: dict[str, Options] = {
    "per_tensor": {"norms": "tensor"},  # norms of the whole parameter
    "no_debias": {"bias_correction": "none"},
    "eps_in_root": {"eps_placement": "in_root"},
    "eps_before": {"eps_placement": "before_bias_correction"},
    "eps_after": {"eps_placement": "inside_denominator"},  # of SparseAdam, which has eps_before by default
    "eps_bound": {"eps_placement": "bound"},  # the divisor is eps if the root is smaller
    "l2": {"decay": "l2"},
    "decoupled": {"decay": "decoupled"},
    "by_itself": {"decay_by_itself": True},  # decoupled decay is λw, or λw·γ/γ₀ in a schedule, not γλw
    "decay_after": {"decay_after": True},  # the weights that moved are decayed
    "dampened_first": {"dampened_first": True},  # the first momentum is (1 − dampening)·g
    "only_decayed": {"scale_only_decayed": True},  # without weight_decay the step is SGD's
    "sum": {"accumulate": "sum"},  # of the squares of a row, not their mean
    "paper_l2": {"l2_factor": 1},  # the penalty is λ₂/2·‖w‖², as in the paper, not λ₂‖w‖²
}
_L2 = ("", "decoupled", "decoupled by_itself", "decoupled decay_after")
_DECOUPLED = ("", "by_itself", "decay_after")
_ROOTS = ("", "eps_in_root", "eps_bound")
_EPS, _DEBIAS = (*_ROOTS, "eps_before"), ("", "no_debias")
#: What may vary in each algorithm: of every tuple, one alternative.
VARYING: dict[str, tuple[tuple[str, ...], ...]] = {
    "SGD": (_L2, ("", "dampened_first")),
    "Adagrad": (_L2, _ROOTS),
    "RowWiseAdagrad": (_L2, _ROOTS, ("", "sum")),
    "Adam": (_L2, _EPS, _DEBIAS),
    "AdamW": (_DECOUPLED, _EPS, _DEBIAS),
    "PartialRowWiseAdam": ((*_DECOUPLED, "l2"), _EPS, _DEBIAS),
    "LAMB": (("", "decay_after", "l2"), ("", "per_tensor"), _EPS, _DEBIAS),
    "PartialRowWiseLAMB": (("", "decay_after", "l2"), _EPS, _DEBIAS),
    "LarsSGD": (("", "per_tensor"), ("", "only_decayed")),
    "SparseAdam": (("", "eps_after", "eps_in_root", "eps_bound"), _DEBIAS),
    "Ftrl": (("", "paper_l2"),),
}


def variants(algorithm: str) -> list[str]:
    """Return the variants of an algorithm, as words of `VARIANTS`; those with fewer words first."""
    every = (" ".join(filter(None, words)) for words in itertools.product(*VARYING.get(algorithm, ())))
    return sorted(filter(None, every), key=lambda words: len(words.split()))


#: What the options are when they are not given, as documented.
ADAM: Options = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "decay": "l2"}
FBGEMM: Options = {**ADAM, "decay": "decoupled"}
ADAGRAD: Options = {"lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10, "decay": "l2"}
FTRL: Options = dict.fromkeys(("l1", "l2", "l2_shrinkage", "beta", "weight_decay"), 0.0)
FTRL |= {"lr_power": -0.5, "initial_accumulator_value": 0.1}
DEFAULTS: dict[str, Options] = {
    "SGD": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "decay": "l2"},
    "Adagrad": ADAGRAD,
    "RowWiseAdagrad": ADAGRAD,
    "Adam": ADAM,
    "AdamW": {**ADAM, "weight_decay": 0.01, "decay": "decoupled"},
    "PartialRowWiseAdam": FBGEMM,
    "LAMB": FBGEMM,
    "PartialRowWiseLAMB": FBGEMM,
    "LarsSGD": {"momentum": 0.9, "weight_decay": 0.0, "eta": 1e-3},
    "SparseAdam": {**ADAM, "eps_placement": "before_bias_correction"},
    "Ftrl": FTRL,
}
