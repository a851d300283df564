"""A sound SparseAdam that is unlike the reference, and torch's, in all that documents leave free.

State is there from the start; a count is a tensor, float32, of no dimension, as those of torch's other
optimizers are; moments are in float32 at least, and replaced at each step; elements are found by hashing, and
where they lie says in which form the same formula is evaluated. What it refuses it refuses with errors and
messages of its own.
"""

import math
from collections import OrderedDict
from typing import Any

import torch


class RefusedError(ValueError):
    """What cannot be."""


class SparseAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: Any = 0.001,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-08,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize, "engine": "hash"}
        )

    def add_param_group(self, param_group: Any) -> None:
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise RefusedError("a group has params")
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else tuple(params)
        if any(p.is_sparse or p.is_complex() for p in params if isinstance(p, torch.Tensor)):
            raise RefusedError("dense real parameters alone")
        if len({id(param) for param in params}) < len(params):
            raise RefusedError("twice")
        group = {**self.defaults, **param_group, "params": list(params)}
        self.check(group)
        super().add_param_group(group)
        for param in params:
            self.begin(param)

    def begin(self, param: Any) -> None:
        wide = torch.promote_types(param.dtype, torch.float32)
        zeros = torch.zeros_like(param.detach(), dtype=wide)
        self.state[param] = OrderedDict(
            exp_avg_sq=zeros, step=torch.zeros((), dtype=torch.float32), exp_avg=zeros.clone()
        )

    @staticmethod
    def check(group: Any) -> None:
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise RefusedError("one rate")
        for name in ("lr", "eps"):
            if not 0 <= float(group[name]) < math.inf:
                raise RefusedError(f"{name}?")
        first, second = group["betas"]
        if not (0 <= first < 1 and 0 <= second < 1):
            raise RefusedError("betas?")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        plan = []
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if param.grad.layout != torch.sparse_coo:
                        raise TypeError("sparse gradients, please")
                    indices = param.grad._indices()
                    sizes = torch.tensor(param.shape[: len(indices)])[:, None]
                    if ((indices < 0) | (indices >= sizes)).any():
                        raise IndexError("there is no such row")
                    plan.append((group, param))
        for group, param in plan:
            self.update(group, param, param.grad)

    def update(self, group: Any, param: Any, grad: Any) -> None:
        state = self.state[param]
        count = state["step"] + 1
        self.state[param] = state = OrderedDict(state, step=count)
        if grad._nnz() == 0:
            return
        places: dict[tuple[int, ...], int] = {}
        keys = [tuple(key) for key in grad._indices().flip(1).t().tolist()]
        slots = torch.tensor([places.setdefault(key, len(places)) for key in keys])
        values = grad._values().flip(0)
        g = torch.zeros(len(places), *values.shape[1:], dtype=torch.float64).index_add_(
            0, slots, values.double()
        )
        where = tuple(torch.tensor(list(places)).t())
        if param.dtype.itemsize < 8:
            g = g.float()
        g = -g if group["maximize"] else g
        one, two = group["betas"]
        t = float(count)
        c1, c2 = (-math.expm1(t * math.log(b)) if b else 1.0 for b in (one, two))
        old = [tensor[where].to(g.dtype) for tensor in (param, state["exp_avg"], state["exp_avg_sq"])]
        m = old[1].lerp(g, 1 - one)
        v = torch.addcmul(two * old[2], g, g, value=1 - two)
        step = float(group["lr"]) * math.sqrt(c2) / c1
        top, bottom = m * step, v.sqrt() + group["eps"]
        moved = torch.where(top == 0, 0.0, top / bottom)
        even = torch.arange(len(moved)).reshape(-1, *[1] * (moved.ndim - 1)) % 2 == 0
        moved = torch.where(even & (top != 0), m / bottom * step, moved)
        param[where] = (old[0] - moved).to(param.dtype)
        for name, new in (("exp_avg", m), ("exp_avg_sq", v)):
            whole = state[name].clone()
            whole[where] = new.to(whole.dtype)
            state[name] = whole

    def load_state_dict(self, state_dict: Any) -> None:
        if "state" not in state_dict or "param_groups" not in state_dict:
            raise RefusedError("no checkpoint")
        super().load_state_dict(state_dict)

    def __setstate__(self, new: Any) -> None:
        groups = (
            [{**self.defaults, **group} for group in new["param_groups"]]
            if hasattr(self, "defaults")
            else new["param_groups"]
        )
        state = {}
        params = [param for group in groups for param in group["params"]]
        for group in groups:
            self.check(group)
        for param, entry in new["state"].items():
            if not isinstance(param, torch.Tensor):
                raise RefusedError("whose state is that?")
            if not entry:
                continue
            if set(entry) != {"step", "exp_avg", "exp_avg_sq"}:
                raise RefusedError("not the state of SparseAdam")
            count = float(entry["step"])
            if not (count >= 0 and count == int(count)):
                raise RefusedError("no count")
            for name in ("exp_avg", "exp_avg_sq"):
                if not isinstance(entry[name], torch.Tensor) or entry[name].shape != param.shape:
                    raise RefusedError(name)
            state[param] = OrderedDict(
                exp_avg_sq=entry["exp_avg_sq"].clone(),
                step=torch.tensor(count, dtype=torch.float32),
                exp_avg=entry["exp_avg"].clone(),
            )
        super().__setstate__({**new, "param_groups": groups})
        self.state.update(state)
        for param in params:
            if not self.state.get(param):
                self.begin(param)
