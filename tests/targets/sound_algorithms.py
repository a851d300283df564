"""Sound algorithms that are unlike the reference in all that documents leave free.

State of every parameter of a group lies in one flat buffer, made at once, whose views are the state; a
count is a tensor of one element, in float64. How an element is computed depends on where it lies, as in
vectors of a processor: most in float64, rounded once, every fifth in the dtype itself and in another
order. Duplicates of a sparse gradient are found by hashing, last first. Messages, the order of names, and
further keys of groups are its own.
"""

import math
from typing import Any

import torch

VECTOR = 5


class RefusedError(ValueError):
    """What cannot be."""


class Flat(torch.optim.Optimizer):
    """An optimizer whose state is views of one buffer a group."""

    names: tuple[str, ...] = ()
    rows_alone: tuple[str, ...] = ()
    counted = True
    tables = False

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    def add_param_group(self, param_group: Any) -> None:
        if not isinstance(param_group, dict):
            raise TypeError("a group is a dict")
        given = {**self.defaults, **param_group}
        unknown = set(given) - set(self.defaults) - {"params", "param_names"}
        if unknown:
            raise RefusedError(f"unknown options {unknown}")
        self.check(given)
        super().add_param_group(dict(param_group))
        group = self.param_groups[-1]
        group["arena"] = "flat"
        self.allocate(group)

    def check(self, group: Any) -> None:
        for name in ("lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value", "eta"):
            if name in group:
                value = group[name]
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise RefusedError(f"{name}: one number, please")
                if not float(value) >= 0.0:
                    raise RefusedError(f"{name} cannot be {value}")
        if "betas" in group:
            first, second = group["betas"]
            if not (0 <= first < 1 and 0 <= second < 1):
                raise RefusedError("betas lie between 0 and 1")
        if group.get("nesterov") and (not group["momentum"] or group["dampening"]):
            raise RefusedError("nesterov wants momentum, undamped")

    def shape(self, param: torch.Tensor, name: str) -> tuple[int, ...]:
        if name in self.rows_alone:
            return (len(param),) if self.column is None else (len(param), self.column)
        return tuple(param.shape)

    column: int | None = None

    def start(self, group: Any, name: str) -> float:
        return 0.0

    def wanted(self, group: Any) -> tuple[str, ...]:
        return self.names

    def allocate(self, group: Any, missing: Any = None) -> None:
        for param in group["params"] if missing is None else missing:
            if self.tables and param.ndim != 2:
                return  # refused in the step
        lists = group["params"] if missing is None else missing
        for dtype in {param.dtype for param in lists}:
            params = [param for param in lists if param.dtype == dtype]
            wanted = [(param, name) for param in params for name in reversed(self.wanted(group))]
            sizes = [math.prod(self.shape(param, name)) for param, name in wanted]
            device = params[0].device
            buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
            for (param, name), part in zip(wanted, buffer.split(sizes), strict=True):
                part.fill_(self.start(group, name))
                self.state[param][name] = part.view(self.shape(param, name))
            if self.counted:
                for param in params:
                    self.state[param]["step"] = torch.zeros(1, dtype=torch.float64)

    # --- the step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if self.tables and param.ndim != 2:
                        raise RefusedError("a table has rows and columns")
                    self.check_grad(param)
        place = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(group, param, param.grad, place)
                place += param.numel()
        return loss

    def check_grad(self, param: Any) -> None:
        pass

    def update(self, group: Any, param: Any, grad: Any, place: int) -> None:
        state = self.state[param]
        for name in self.wanted(group):
            if name in state and state[name].numel() != math.prod(self.shape(param, name)):
                raise RefusedError(f"{name} has no room")
            if name in state and tuple(state[name].shape) != self.shape(param, name):
                raise RefusedError(f"{name} has another shape")
        if self.counted:
            state["step"] += 1
        if grad.is_sparse:
            rows, grads = hashed(grad)
            if not len(rows):
                return
        else:
            rows, grads = None, grad
        old = {name: state[name] if rows is None else state[name][rows] for name in self.wanted(group)}
        weight = param.detach() if rows is None else param.detach()[rows]
        index = torch.arange(place, place + param.numel()).reshape(param.shape)
        index = index if rows is None else index[rows]
        low = torch.float32 if param.dtype.itemsize < 4 else param.dtype
        made = []
        for kind, reverse in ((torch.float64, False), (low, True)):
            arguments = {name: value.to(kind) for name, value in old.items()}
            made.append(self.rule(group, state, weight.to(kind), grads.to(kind), arguments, reverse))
        tail = index % VECTOR == 0
        for name in ("weight", *self.wanted(group)):
            body, rest = (one[name] for one in made)
            target = param.detach() if name == "weight" else state[name]
            chosen = tail if body.shape == tail.shape else tail[:, :1].reshape(body.shape)
            new = torch.where(chosen, rest.double(), body).to(target.dtype)
            if rows is None:
                target.copy_(new)
            else:
                target[rows] = new

    def rule(self, group: Any, state: Any, w: Any, g: Any, old: Any, reverse: bool) -> dict[str, Any]:
        raise NotImplementedError

    # --- loading

    def load_state_dict(self, state_dict: Any) -> None:
        for given in state_dict["param_groups"]:
            self.check({**self.defaults, **given})
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("arena", "flat")
            missing = [param for param in group["params"] if not self.state.get(param)]
            self.allocate(group, missing)
            for param in group["params"]:
                state = self.state[param]
                if self.counted and "step" in state:
                    state["step"] = torch.as_tensor(state["step"]).double().reshape(1).clone()
                for name in self.wanted(group):
                    if name in state and isinstance(state[name], torch.Tensor):
                        state[name] = state[name].clone()


def hashed(grad: Any) -> tuple[Any, Any]:
    """Sum duplicates: a dictionary of rows, the last first, in float64."""
    places: dict[int, int] = {}
    rows, values = grad._indices()[0].flip(0), grad._values().flip(0)
    slots = torch.tensor([places.setdefault(row, len(places)) for row in rows.tolist()], dtype=torch.int64)
    total = torch.zeros(len(places), *values.shape[1:], dtype=torch.float64)
    total.index_add_(0, slots, values.double())
    wide = values.dtype if values.dtype.itemsize >= 4 else torch.float32
    return torch.tensor(list(places), dtype=torch.int64), total.to(wide)


def signed(g: Any, group: Any) -> Any:
    return g.neg() if group["maximize"] else g


def ratio(top: Any, bottom: Any, reverse: bool) -> Any:
    """Divide, or multiply with the reciprocal; nothing by nothing is nothing."""
    found = top / bottom
    if reverse:
        turned = top * bottom.reciprocal()
        found = torch.where(turned.isfinite() & (turned.abs() > 1e-30), turned, found)
    return torch.where((top == 0) & (bottom == 0), torch.zeros_like(found), found)


def total(values: Any, reverse: bool) -> Any:
    """Sum rows, from the right or pairwise."""
    return values.flip(1).cumsum(1)[:, -1:] if reverse and values.shape[1] else values.sum(1, keepdim=True)


def length(values: Any, reverse: bool) -> Any:
    return total(values.double().square(), reverse).sqrt().to(values.dtype)


class SGD(Flat):
    names = ("momentum_buffer",)
    counted = False

    def __init__(
        self, params: Any, lr: Any = 1e-3, momentum: float = 0, dampening: float = 0, weight_decay: float = 0,
        nesterov: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=nesterov, maximize=maximize,
        )  # fmt: skip

    def allocate(self, group: Any, missing: Any = None) -> None:
        pass  # the first gradient is the buffer

    def wanted(self, group: Any) -> tuple[str, ...]:
        return self.names if group["momentum"] else ()

    def update(self, group: Any, param: Any, grad: Any, place: int) -> None:
        self.first = bool(group["momentum"]) and "momentum_buffer" not in self.state[param]
        if self.first:
            self.state[param]["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
        if grad.is_sparse and group["momentum"]:
            grad = grad.to_dense()
        super().update(group, param, grad, place)

    def rule(self, group: Any, state: Any, w: Any, g: Any, old: Any, reverse: bool) -> dict[str, Any]:
        g = torch.add(signed(g, group), w, alpha=group["weight_decay"])
        lr = float(group["lr"])
        if not group["momentum"]:
            return {"weight": torch.addcmul(w, g, torch.full_like(g, -lr)) if reverse else w - lr * g}
        buffer = old["momentum_buffer"]
        mu, keep = group["momentum"], 1 - group["dampening"]
        b = g if self.first else torch.add(keep * g, buffer, alpha=mu) if reverse else mu * buffer + keep * g
        d = g.add(b, alpha=mu) if group["nesterov"] else b
        return {"weight": w.sub(d, alpha=lr) if reverse else w - lr * d, "momentum_buffer": b}


class Adagrad(Flat):
    names = ("sum",)

    def __init__(
        self, params: Any, lr: Any = 1e-2, lr_decay: float = 0, weight_decay: float = 0,
        initial_accumulator_value: float = 0, eps: float = 1e-10, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps,
            initial_accumulator_value=initial_accumulator_value, maximize=maximize,
        )  # fmt: skip

    def start(self, group: Any, name: str) -> float:
        return float(group["initial_accumulator_value"])

    def squares(self, g: Any, reverse: bool) -> Any:
        return g * g

    def rule(self, group: Any, state: Any, w: Any, g: Any, old: Any, reverse: bool) -> dict[str, Any]:
        g = signed(g, group) + group["weight_decay"] * w
        rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        s = self.squares(g, reverse) + old["sum"]
        root = s.sqrt() + group["eps"]
        moved = ratio(rate * g, root.expand_as(g), True) if reverse else rate * ratio(g, root, False)
        return {"weight": w - moved, "sum": s}


class RowWiseAdagrad(Adagrad):
    rows_alone = ("sum",)
    column = 1
    tables = True

    def squares(self, g: Any, reverse: bool) -> Any:
        return total(g * g, reverse) / max(g.shape[1], 1)


class Adam(Flat):
    names = ("exp_avg", "exp_avg_sq")
    before = False

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize)

    def direction(self, group: Any, state: Any, g: Any, old: Any, reverse: bool) -> Any:
        one, two = group["betas"]
        square = g * g
        if self.rows_alone:
            square = (total(square, reverse) / max(g.shape[1], 1)).reshape(old["exp_avg_sq"].shape)
        m = torch.lerp(old["exp_avg"], g, 1 - one) if reverse else one * old["exp_avg"] + (1 - one) * g
        v = (
            torch.lerp(old["exp_avg_sq"], square, 1 - two)
            if reverse
            else two * old["exp_avg_sq"] + (1 - two) * square
        )
        t = float(state["step"])
        c1, c2 = (
            -math.expm1(t * math.log(one)) if one else 1.0,
            -math.expm1(t * math.log(two)) if two else 1.0,
        )
        column = v.reshape(-1, 1) if self.rows_alone else v
        if self.before:
            d = ratio(m, column.sqrt() + group["eps"], reverse) * (math.sqrt(c2) / c1)
        elif reverse:
            d = ratio(m / c1, (column.sqrt() / math.sqrt(c2) + group["eps"]).expand_as(m), True)
        else:
            d = ratio(m / c1, (column / c2).sqrt() + group["eps"], False)
        return m, v, d

    def rule(self, group: Any, state: Any, w: Any, g: Any, old: Any, reverse: bool) -> dict[str, Any]:
        g = signed(g, group) + group["weight_decay"] * w
        m, v, d = self.direction(group, state, g, old, reverse)
        return {"weight": w - float(group["lr"]) * d, "exp_avg": m, "exp_avg_sq": v}


class Decoupled(Adam):
    tables = True

    def rule(self, group: Any, state: Any, w: Any, g: Any, old: Any, reverse: bool) -> dict[str, Any]:
        m, v, d = self.direction(group, state, signed(g, group), old, reverse)
        d = d + group["weight_decay"] * w
        return {
            "weight": w - float(group["lr"]) * self.trust(w, d, reverse) * d,
            "exp_avg": m,
            "exp_avg_sq": v,
        }

    def trust(self, w: Any, d: Any, reverse: bool) -> Any:
        return 1.0


class AdamW(Decoupled):
    tables = False

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)


class PartialRowWiseAdam(Decoupled):
    rows_alone = ("exp_avg_sq",)


class LAMB(Decoupled):
    def trust(self, w: Any, d: Any, reverse: bool) -> Any:
        top, bottom = length(w, reverse), length(d, reverse)
        return torch.where((top == 0) | (bottom == 0), torch.ones_like(top), top / bottom)


class PartialRowWiseLAMB(LAMB):
    rows_alone = ("exp_avg_sq",)


class LarsSGD(Flat):
    names = ("momentum_buffer",)
    counted = False
    tables = True

    def __init__(
        self, params: Any, lr: Any = 1e-2, momentum: float = 0.9, weight_decay: float = 0,
        eta: float = 1e-3, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta, maximize=maximize
        )

    def rule(self, group: Any, state: Any, w: Any, g: Any, old: Any, reverse: bool) -> dict[str, Any]:
        g, decay = signed(g, group), group["weight_decay"]
        top = group["eta"] * length(w, reverse)
        bottom = length(g, reverse) + decay * length(w, reverse)
        share = torch.where((top == 0) | (bottom == 0), torch.ones_like(top), top / bottom)
        b = group["momentum"] * old["momentum_buffer"] + float(group["lr"]) * share * (g + decay * w)
        return {"weight": w - b, "momentum_buffer": b}


class Ftrl(Flat):
    names = ("accumulator", "linear")
    counted = False
    penalties = ("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta")

    def __init__(
        self, params: Any, lr: Any = 1e-3, lr_power: float = -0.5, initial_accumulator_value: float = 0.1,
        l1: float = 0, l2: float = 0, l2_shrinkage: float = 0, beta: float = 0, weight_decay: float = 0,
        *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr=lr, lr_power=lr_power, initial_accumulator_value=initial_accumulator_value, l1=l1,
            l2=l2, l2_shrinkage=l2_shrinkage, beta=beta, weight_decay=weight_decay, maximize=maximize,
        )  # fmt: skip

    def check(self, group: Any) -> None:
        super().check(group)
        for name in self.penalties:
            if not float(group[name]) >= 0.0:
                raise RefusedError(f"{name} cannot be {group[name]}")
        if not float(group["lr_power"]) <= 0.0:
            raise RefusedError(f"lr_power cannot be {group['lr_power']}")

    def start(self, group: Any, name: str) -> float:
        return float(group["initial_accumulator_value"]) if name == "accumulator" else 0.0

    def rule(self, group: Any, state: Any, w: Any, g: Any, old: Any, reverse: bool) -> dict[str, Any]:
        g = signed(g, group) + group["weight_decay"] * w
        # A rate of 0 gives the smallest step, where the formula divides by it.
        n, power, rate = old["accumulator"], -group["lr_power"], float(group["lr"]) or 1e-30
        more = n + g * g
        pull = (more.pow(power) - n.pow(power)) * w / rate
        shrink = 2 * group["l2_shrinkage"] * w
        z = old["linear"] + g + shrink - pull if reverse else old["linear"] - (pull - (g + shrink))
        over = -z.sign() * (z.abs() - group["l1"]).clamp(min=0)
        if reverse and not (group["l2"] or group["beta"]):
            return {"weight": ratio(over * rate, more.pow(power), True), "accumulator": more, "linear": z}
        under = more.pow(power) / rate + (2 * group["l2"] + group["beta"] / rate)
        return {"weight": ratio(over, under, False), "accumulator": more, "linear": z}
