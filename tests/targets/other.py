"""Optimizers whose formula is none of the suite's: a sound one, and the same with one fault each."""

import copy

import torch


class Lion(torch.optim.Optimizer):
    """The sign of a running mean of gradients, with decoupled decay."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0, not {lr}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, group)
        return loss

    def update(self, weight, group):
        """Update one parameter."""
        first, second = group["betas"]
        state = self.state[weight]
        mean = state.setdefault("exp_avg", torch.zeros_like(weight))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] * torch.lerp(weight.grad, mean, first).sign())
        mean.lerp_(weight.grad, 1 - second)


class Estimating(Lion):
    """Steps by the norm of all gradients, so no parameter is trained independently of the others."""

    def update(self, weight, group):
        """Update one parameter."""
        grads = [weight.grad for group in self.param_groups for weight in group["params"]]
        norm = sum(float(grad.norm()) for grad in grads if grad is not None)
        super().update(weight, {**group, "lr": group["lr"] * norm})


class WithoutDecay(Lion):
    """Has the option lr only."""

    def __init__(self, params, lr=1e-4):
        super().__init__(params, lr)


class WithoutRate(Lion):
    """Has no option of the suite."""

    def __init__(self, params, betas=(0.9, 0.99)):
        super().__init__(params, 0.1, betas)


class LosesOption(Lion):
    """A load leaves the decay of the groups as it is."""

    def load_state_dict(self, state_dict):
        """Load the state."""
        mine = [group["weight_decay"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, value in zip(self.param_groups, mine, strict=True):
            group["weight_decay"] = value


class IgnoresClosure(Lion):
    """Evaluates no closure."""

    def step(self, closure=None):
        """Take a step."""
        super().step()


class CopySharesState(Lion):
    """A copy has the state of its original."""

    def __deepcopy__(self, memo):
        """Copy the optimizer."""
        groups = [{**one, "params": copy.deepcopy(one["params"], memo)} for one in self.param_groups]
        made = type(self)(groups)
        for group, other in zip(self.param_groups, made.param_groups, strict=True):
            for weight, copied in zip(group["params"], other["params"], strict=True):
                made.state[copied] = self.state[weight]
        return made


class StepsMissing(Lion):
    """Decays parameters without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        """Take a step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
        return super().step(closure)


class DecaysGradient(Lion):
    """Adds the decay to the gradient in place."""

    def update(self, weight, group):
        """Update one parameter."""
        weight.grad.add_(weight, alpha=group["weight_decay"])
        super().update(weight, {**group, "weight_decay": 0.0})


class GroupsShareTheFirst(Lion):
    """Uses the options of the first group."""

    def update(self, weight, group):
        """Update one parameter."""
        super().update(weight, self.param_groups[0])


class IgnoresRate(Lion):
    """Steps by one length, whatever the learning rate."""

    def update(self, weight, group):
        """Update one parameter."""
        super().update(weight, {**group, "lr": 0.1})


class TrainsFirstGroup(Lion):
    """Stops with an error at the parameters of another group."""

    def update(self, weight, group):
        """Update one parameter."""
        if group is not self.param_groups[0]:
            raise KeyError("the second group")
        super().update(weight, group)


class DividesByZero(Lion):
    """Divides by the norm of the gradient."""

    def update(self, weight, group):
        """Update one parameter."""
        super().update(weight, {**group, "lr": group["lr"] * 0.1 / weight.grad.norm()})


class StateByPosition(Lion):
    """Keeps its state outside of `state`, so no checkpoint has it."""

    def update(self, weight, group):
        """Update one parameter."""
        held = self.__dict__.setdefault("held", {})
        self.state[weight] = held.setdefault(weight, {})
        super().update(weight, group)
        self.state.pop(weight)


class Line(torch.optim.Optimizer):
    """Needs a closure in every step."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})

    def step(self, closure):
        """Take a step."""
        return closure()
