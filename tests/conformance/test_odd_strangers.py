"""Sound optimizers of another formula, which do what no document forbids, fail no must for it."""

import pytest
from test_strangers import checked, expect_sound

ODD = """
import torch
from keyedopt.conformance.targets.implementation import Implementation

class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.mean(weight).mul_(0.5).add_(weight.grad)
                    weight.sub_(group["lr"] * (mean + self.decay(group) * weight))
        return loss

    def mean(self, weight):
        return self.state[weight].setdefault("mean", torch.zeros_like(weight))

    def decay(self, group):
        return group["weight_decay"]

class Noisy(Momentum):
    def mean(self, weight):
        return super().mean(weight).add_(torch.randn_like(weight) / 64)

class Converting(Momentum):
    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, lr, [weight_decay])
    def decay(self, group):
        return group["weight_decay"][0]

class Forgetful(Momentum):
    def mean(self, weight):
        means = self.__dict__.setdefault("means", {})
        return means.setdefault(weight, torch.zeros_like(weight))

class ForgetfulAtFirstRate(Forgetful):
    def step(self, closure=None):
        first = [group.setdefault("first", group["lr"]) for group in self.param_groups]
        seen = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, first):
            group["lr"] = rate
        loss = super().step(closure)
        for group, rate in zip(self.param_groups, seen):
            group["lr"] = rate
        return loss

class WithoutRate(Momentum):
    def __init__(self, params, weight_decay=0.0):
        super().__init__(params, 0.1, weight_decay)
    def add_param_group(self, group):
        super().add_param_group(group)
        self.__dict__["rate"] = group.pop("lr")
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1
        loss = super().step(closure)
        for group in self.param_groups:
            del group["lr"]
        return loss

class DecayingTogether(Momentum):
    def decay(self, group):
        grads = (weight.grad for group in self.param_groups for weight in group["params"])
        return group["weight_decay"] * sum(grad.norm() for grad in grads if grad is not None)

class NeedsGradients(Momentum):
    def step(self, closure=None):
        assert all(weight.grad.shape for group in self.param_groups for weight in group["params"])
        return super().step(closure)

class AdamW(torch.optim.AdamW):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, lr, betas, eps, weight_decay)
        self.in_parts()
    def in_parts(self):
        for group in self.param_groups:
            group["beta1"], group["beta2"] = group.pop("betas")
    def step(self, closure=None):
        for group in self.param_groups:
            group["betas"] = group["beta1"], group["beta2"]
        loss = super().step(closure)
        self.in_parts()
        return loss

class Adam(torch.optim.Adam):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] += 1

class OfFloat32(Momentum):
    def mean(self, weight):
        assert weight.dtype is torch.float32
        return super().mean(weight)

class GroupOfEach(Momentum):
    def __init__(self, params, lr=0.1, weight_decay=0.0):
        params = list(params)
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        every = [{**group, "params": [one]} for group in groups for one in group["params"]]
        super().__init__(every, lr, weight_decay)

class OfOwnBase:  # a package may have its own copy of the base class
    def __init__(self, params, lr=0.1):
        params = list(params)
        groups = params if isinstance(params[0], dict) else [{"params": params}]
        self.param_groups = [{"lr": lr, **group} for group in groups]
    def zero_grad(self):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(group["lr"] * weight.grad)
        return loss

class OneRate(Momentum):
    def add_param_group(self, group):
        super().add_param_group(group)
        if len({group["lr"] for group in self.param_groups}) > 1:
            self.param_groups.pop()
            raise ValueError("all groups must have one learning rate")

class Renamed(Momentum):
    def __init__(self, params, lr=0.1, decay_rate=0.0):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "decay_rate": decay_rate})
    def decay(self, group):
        return group["decay_rate"]

def made(params, lr=0.1):
    return Momentum(params, lr)

def renamed(params, lr=0.1, decay_rate=0.0):
    return Renamed(params, lr, decay_rate)

def target(name, place, **options):
    lacking = ("sparse", "maximize", "fused", "foreach", "decay", "rows", "eps_placement", "bias_correction")
    others = ("SGD", "*Adagrad", "Adam", "Partial*", "LAMB", "L*", "Ftrl", "AdamW", "OtherOptimizer")
    absent = (*(one for one in others if one != name), *(f"*.{one}" for one in lacking))
    return Implementation("odd", "odd", {name: place}, areas=("algorithms",), absent=absent, **options)

NAMES = {"option_names": {"OtherOptimizer.weight_decay": "decay_rate"}}
CLASS_OF_OTHER_NAMES = target("OtherOptimizer", "odd:Renamed", **NAMES)
FUNCTION_OF_OTHER_NAMES = target("OtherOptimizer", "odd:renamed", **NAMES)

BY_FUNCTION = target("OtherOptimizer", "odd:made")
IN_PARTS = target("AdamW", "odd:AdamW")
MISCOUNTING = target("Adam", "odd:Adam")
"""
#: What each of these does that no document forbids, and the clauses that nevertheless failed.
ODDITIES = {
    "Noisy": ("ALGO-050", "ALGO-051", "ALGO-072", "ALGO-081", "ALGO-082"),  # draws random numbers
    "Converting": ("ALGO-073",),  # its groups have another value than its constructor was given
    "Forgetful": ("ALGO-088",),  # fails only what its loads break
    "WithoutRate": ("ALGO-088",),
    "DecayingTogether": ("ALGO-082", "ALGO-083"),
    "OfFloat32": ("ALGO-072",),
    "GroupOfEach": ("ALGO-077",),
    "OneRate": ("ALGO-073", "ALGO-077", "ALGO-082", "ALGO-083"),
    "OfOwnBase": ("ALGO-031", "ALGO-041", "ALGO-050"),
    "NeedsGradients": ("ALGO-082", "ALGO-083"),  # fails only ALGO-031
    "IN_PARTS": ("ALGO-063",),  # its groups have betas under two names
    "MISCOUNTING": ("ALGO-073",),  # restores the options, and not the step count
    "BY_FUNCTION": ("ALGO-031", "ALGO-041", "ALGO-073", "ALGO-083"),  # a function without weight_decay
}


@pytest.mark.parametrize("name", ODDITIES)
def test_a_must_does_not_fail_for_what_no_document_forbids(tmp_path, name):
    (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
    expect_sound(checked(f"odd:{name}", *ODDITIES[name], path=tmp_path), -1)


def test_a_schedule_that_steps_ignore_fails_also_without_loads(tmp_path):
    (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
    result = checked("odd:ForgetfulAtFirstRate", "ALGO-072", "ALGO-088", path=tmp_path)
    failing = {clause for case in result.cases if case.outcome == "fail" for clause in case.clauses}
    assert failing == {"ALGO-072", "ALGO-088"}


def test_a_function_takes_the_names_of_options_that_its_adapter_says(tmp_path):
    (tmp_path / "odd.py").write_text(ODD, encoding="utf-8")
    clauses = ODDITIES["BY_FUNCTION"]
    by_class, by_function = (
        checked(f"odd:{kind}_OF_OTHER_NAMES", *clauses, path=tmp_path) for kind in ("CLASS", "FUNCTION")
    )
    expect_sound(by_class, len(clauses))
    assert [case.outcome for case in by_function.cases] == [case.outcome for case in by_class.cases]
