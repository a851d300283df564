"""Programs of nested keyed optimizers, compared with optimizers that have only one of the parameters.

The tested optimizer is a tree: keyed optimizers, wrappers, clipping and warmup around them, and combinations.
For each parameter, a plain optimizer of the same class has only this parameter. It gets the gradient after
the clipping, and the learning rate of the warmup, that are around the parameter in the tree.
"""

import copy
import io
import math
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_equal
from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.inputs import _numbers, layouts, warmup_stages
from keyedopt.conformance.suite.support.programs import FIRST_LR, OTHER_LRS, Program

#: The learning rate that a warmup multiplies.
WARMUP_LR = 0.5
#: The stage of each warmup, and its multiplier in each iteration: value + (1 − value) · i / max_iters.
STAGE = {"policy": "LINEAR", "max_iters": 16, "value": 0.25}
RAMP = tuple(0.25 + 0.75 * iteration / 16 for iteration in range(17))
SHAPES_OF_PARAMETERS = ((3,), (2, 3), (5, 4), (1,), (17, 33), (1100,))

#: The operation that only programs with this part have.
OPERATION_OF = {"closures": "step with a closure", "copies": "copy"}
#: The operations, each with its relative frequency.
ALL = {
    "step": 6,
    "step with a closure": 2,
    "zero_grad": 1,
    "set the learning rate": 2,
    "save": 2,
    "load": 3,
    "copy": 1,
    "scale a parameter": 1,
}

#: Makes the inner optimizer of parameters or groups.
Make = Callable[[Any], Any]


@dataclass
class Node:
    """An optimizer of the tree.

    Args:
        kind: ``"keyed"``, ``"wrapper"``, ``"NORM"`` or ``"VALUE"`` (clipping), ``"warmup"``, ``"combined"``.
        parts: the optimizers inside, by key.
        params: the names of all parameters inside.
        bound: of clipping.
        iteration: of a warmup.
    """

    kind: str
    parts: list[tuple[str, "Node"]]
    params: list[str]
    bound: float = 0.0
    iteration: int = 0

    def nodes(self) -> Iterator["Node"]:
        """Return this optimizer and all inside, the outer before the inner."""
        yield self
        for _, part in self.parts:
            yield from part.nodes()

    def keys(self) -> dict[str, str]:
        """Return the key of each parameter."""
        if self.kind == "keyed":
            return {name: name for name in self.params}
        prefixes = {key: f"{key}." if self.kind == "combined" else "" for key, _ in self.parts}
        return {n: prefixes[key] + own for key, part in self.parts for n, own in part.keys().items()}

    def __str__(self) -> str:
        inside = ", ".join(str(part) for _, part in self.parts) or ", ".join(self.params)
        return f"{self.kind}{f' {self.bound}' if self.bound else ''}({inside})"


@dataclass
class OneParameter:
    """An optimizer with only one parameter."""

    make: Make
    param: torch.nn.Parameter
    lr: float = FIRST_LR
    history: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = self.make([self.param])

    def scale(self, factor: float) -> None:
        """Multiply the parameter in place."""
        self.history.append((OneParameter.scale, factor))
        with torch.no_grad():
            self.param.mul_(factor)

    def step(self, lr: float, grad: torch.Tensor) -> None:
        """Take a step with a learning rate and a gradient."""
        self.history.append((OneParameter.step, lr, grad))
        self.optimizer.param_groups[0]["lr"], self.param.grad = lr, grad.clone()
        self.optimizer.step()
        self.param.grad = None


@dataclass
class SavedOptimizers:
    """A checkpoint, with the history and the learning rate of each parameter, and the warmups' iterations."""

    values: dict[str, torch.Tensor]
    state: Any
    history: dict[str, list[Any]]
    lrs: dict[str, float]
    iterations: list[int]


class OptimizerProgram(Program):
    """A program of a tree of optimizers.

    Args:
        impl: the public names of the implementation.
        make: makes the inner optimizers with the learning rate `FIRST_LR`.
        seed: determines the tree, the parameters and the operations.
        dtype: of the parameters.
        parts: what the program has beside keyed optimizers, wrappers, combinations and dense gradients:
            "clipping", "warmup", "closures", "copies", "missing gradients" and "sparse gradients".
        shapes: of parameters.
    """

    def __init__(
        self,
        impl: Any,
        make: Make,
        seed: int,
        dtype: str,
        parts: Collection[str],
        shapes: Sequence[tuple[int, ...]] = SHAPES_OF_PARAMETERS,
    ) -> None:
        self._impl, self._make, self._parts = impl, make, parts
        left_out = {operation for part, operation in OPERATION_OF.items() if part not in parts}
        operations = {name: often for name, often in ALL.items() if name not in left_out}
        super().__init__(operations, seed, dtype)
        count = self.choose.choice((1, 2, 3, 5, 9))
        self._shapes = {f"p{index}": self.choose.choice(shapes) for index in range(count)}
        layout = random.Random(seed)  # of its own: `self.choose` goes on with the same numbers
        self._layouts = {name: layout.randrange(3) for name in self._shapes}
        self._saves_groups = self.choose.random() < 0.5
        self._tree = self._draw(list(self._shapes), depth=2, warm=True)
        self._each = {name: OneParameter(make, self._new_param(name)) for name in self._shapes}
        self._saved: SavedOptimizers | None = None
        self.done.append(str(self._tree) + (", groups are saved" if self._saves_groups else ""))
        self._start()

    # --- the tree -----------------------------------------------------------------------------------

    def _draw(self, names: list[str], depth: int, warm: bool) -> Node:
        """Draw an optimizer of parameters; ``warm`` is whether it may have a warmup inside."""
        kinds = ["keyed"] * (depth < 2) + ["wrapper"] * (depth > 0)
        if depth and "clipping" in self._parts:
            kinds += ["NORM", "VALUE"]
        if depth and warm and "warmup" in self._parts:
            kinds += ["warmup"]
        kind = "combined" if depth == 2 and len(names) > 1 else self.choose.choice(kinds)
        if kind == "keyed":
            return Node(kind, [], names)
        if kind == "combined":
            cut = self.choose.randrange(1, len(names))
            shares = {"a": names[:cut], "b": names[cut:]}
            parts = [(key, self._draw(share, 1, warm)) for key, share in shares.items()]
            made = Node(kind, parts, names)
            return made if self.choose.random() < 0.5 else self._around(made)
        return self._around(self._draw(names, depth - 1, warm and kind != "warmup"), kind)

    def _around(self, inner: Node, kind: str = "") -> Node:
        kinds = ["wrapper", *(["NORM", "VALUE"] if "clipping" in self._parts else [])]
        kind = kind or self.choose.choice(kinds)
        bound = self.choose.choice((0.25, 0.5, 2.0)) if kind in ("NORM", "VALUE") else 0.0
        return Node(kind, [("", inner)], inner.params, bound)

    def _build(self, node: Node) -> Any:
        """Make the implementation's optimizer."""
        parts = [(key, self._build(part)) for key, part in node.parts]
        if node.kind == "keyed":
            params = {name: self._params[name] for name in node.params}
            return self._impl.KeyedOptimizerWrapper(params, self._make_groups)
        if node.kind == "combined":
            return self._impl.CombinedOptimizer(parts)
        ((_, inner),) = parts
        if node.kind == "wrapper":
            return self._impl.OptimizerWrapper(inner)
        if node.kind == "warmup":
            return self._impl.WarmupOptimizer(inner, warmup_stages(self._impl, [STAGE]), lr=WARMUP_LR)
        return self._impl.GradientClippingOptimizer(inner, self._impl.GradientClipping[node.kind], node.bound)

    def _make_groups(self, params: Any) -> Any:
        """Make an inner optimizer with two parameters in each group."""
        listed = list(params)
        return self._make([{"params": listed[first : first + 2]} for first in range(0, len(listed), 2)])

    def _new_param(self, name: str) -> torch.nn.Parameter:
        seed = list(self._shapes).index(name)
        return torch.nn.Parameter(_numbers(self._shapes[name], seed).to(the_device(), self.dtype))

    def _laid_out(self, name: str) -> torch.nn.Parameter:
        """Return a new parameter that is contiguous, transposed or spaced."""
        value = self._new_param(name).detach()
        forms = [value, *(one for _, one in layouts(value))]
        return torch.nn.Parameter(forms[self._layouts[name]])

    def _start(self) -> None:
        """Continue with new parameters and optimizers."""
        self._params = {name: self._laid_out(name) for name in self._shapes}
        self._optimizer = self._build(self._tree)
        self._optimizer.save_param_groups(self._saves_groups)
        for node in self._tree.nodes():
            node.iteration = 0
        for one in self._each.values():
            one.lr = FIRST_LR
        self._warm_up()

    def _warmed(self) -> dict[str, Node]:
        """Return the warmup around each parameter that has one."""
        return {name: one for one in self._tree.nodes() if one.kind == "warmup" for name in one.params}

    def _warm_up(self) -> None:
        """Set the learning rates that the warmups set in their present iterations."""
        for name, warmup in self._warmed().items():
            self._each[name].lr = WARMUP_LR * RAMP[min(warmup.iteration, len(RAMP) - 1)]

    # --- operations ---------------------------------------------------------------------------------

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Draw a gradient for each parameter, or for some; in the first step for all."""
        some = self._saved is not None and "missing gradients" in self._parts
        names = [name for name in self._params if not some or self.choose.random() < 0.8]
        self.note(f"on {', '.join(names)}" if len(names) < len(self._params) else "on all")
        return {name: self._gradient(self._shapes[name]) for name in names}

    def _gradient(self, shape: tuple[int, ...]) -> torch.Tensor:
        seed = self.choose.randrange(1, 1000)
        if "sparse gradients" not in self._parts or self.choose.random() < 0.5:
            return _numbers(shape, seed).to(self.dtype)
        rows = [self.choose.randrange(shape[0]) for _ in range(self.choose.choice((0, 1, 3)))]
        values = _numbers((len(rows), *shape[1:]), seed).to(self.dtype)
        return torch.sparse_coo_tensor(torch.tensor([rows]).long(), values, shape, check_invariants=True)

    def _set(self, grads: Mapping[str, torch.Tensor]) -> None:
        for name, param in self._params.items():
            param.grad = grads[name].clone().to(the_device()) if name in grads else None

    def _advance(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Take the same step in the optimizers with one parameter."""
        found = {name: grad if grad.is_sparse else grad.double() for name, grad in grads.items()}
        for node in self._tree.nodes():
            inside = {name: found[name] for name in node.params if name in found}
            if node.kind == "NORM" and inside:
                norm = float(torch.cat([grad.flatten() for grad in inside.values()]).norm())
                found |= {name: grad * min(1.0, node.bound / (norm + 1e-6)) for name, grad in inside.items()}
            if node.kind == "VALUE":
                found |= {name: grad.clamp(-node.bound, node.bound) for name, grad in inside.items()}
        for name, grad in found.items():
            one = self._each[name]
            one.step(one.lr, grad.to(the_device(), self.dtype))
        for node in self._tree.nodes():
            node.iteration += 1
        self._warm_up()

    def _step(self) -> None:
        grads = self._gradients()
        self._set(grads)
        self._optimizer.step()
        self._advance(grads)
        if self._saved is None:
            self._keep()

    def _step_with_a_closure(self) -> None:
        if self._saved is None:
            return
        grads = self._gradients()

        def closure() -> torch.Tensor:
            self._set(grads)
            return torch.zeros(())

        self._optimizer.step(closure)
        self._advance(grads)

    def _zero_grad(self) -> None:
        """Set all gradients to None."""
        self._set(self._gradients())
        self._optimizer.zero_grad(set_to_none=True)
        for name, param in self._params.items():
            expect(param.grad is None, f"no gradient of {name}", param.grad)

    def _set_the_learning_rate(self) -> None:
        """Set the learning rate of each group that has no warmup around it."""
        warmed = set(self._warmed())
        for group in self._optimizer.param_groups:
            inside = [n for n, param in self._params.items() if any(param is one for one in group["params"])]
            if inside and not warmed.intersection(inside):
                group["lr"] = lr = self.choose.choice(OTHER_LRS)
                self.note(f"{lr} of {', '.join(inside)}")
                for name in inside:
                    self._each[name].lr = lr

    def _save(self) -> None:
        """Make a checkpoint; there is none before the first step, which creates the state."""
        if self._saved is not None:
            self._keep()

    def _keep(self) -> None:
        buffer = io.BytesIO()
        torch.save(self._optimizer.state_dict(), buffer)
        self._saved = SavedOptimizers(
            {name: param.detach().clone() for name, param in self._params.items()},
            buffer.getvalue(),
            {name: list(one.history) for name, one in self._each.items()},
            {name: one.lr for name, one in self._each.items()},
            [node.iteration for node in self._tree.nodes()],
        )

    def _load(self) -> None:
        """Load the checkpoint into these optimizers, or into new ones."""
        if self._saved is None:
            return
        if self.choose.random() < 0.5:
            self.note("into new optimizers")
            self._start()
            self._optimizer.init_state()
        with torch.no_grad():
            for name, param in self._params.items():
                param.copy_(self._saved.values[name])
        self._optimizer.load_state_dict(torch.load(io.BytesIO(self._saved.state), weights_only=False))
        for node, iteration in zip(self._tree.nodes(), self._saved.iterations, strict=True):
            node.iteration = iteration
        for name, before in list(self._each.items()):
            lr = self._saved.lrs[name] if self._saves_groups else before.lr
            self._each[name] = one = OneParameter(self._make, self._new_param(name), lr)
            for operation, *arguments in self._saved.history[name]:
                operation(one, *arguments)
        self._warm_up()

    def _copy(self) -> None:
        """Copy parameters and optimizers, step with the copy or the original, continue with the other one."""
        how, whole = self.choose.choice(("deepcopy", "pickle")), (self._params, self._optimizer)
        made = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
        kept, left = self.choose.sample((whole, made), 2)
        self.note(f"by {how}, continue with the {'copy' if kept is made else 'original'}")
        for index, param in enumerate(left[0].values()):
            param.grad = _numbers(param.shape, 1001 + index).to(the_device(), self.dtype)
        left[1].step()
        self._params, self._optimizer = kept

    def _scale_a_parameter(self) -> None:
        """Change a parameter in place."""
        name = self.choose.choice(list(self._params))
        self.note(name)
        with torch.no_grad():
            self._params[name].mul_(0.5)
        self._each[name].scale(0.5)

    # --- comparison ---------------------------------------------------------------------------------

    def compare(self) -> None:
        """Expect parameters, state and learning rates as in the optimizers with one parameter."""
        state = self._optimizer.state_dict()["state"]
        for name, key in self._tree.keys().items():
            one = self._each[name]
            self.expect_close(self._params[name], one.param, f"parameter {name}")
            expect_equal(key in state, one.param in one.optimizer.state, f"whether {key} has state")
            for entry, value in one.optimizer.state.get(one.param, {}).items():
                if isinstance(value, torch.Tensor):
                    self.expect_close(state[key][entry], value, f"{entry} of {key}")
        for group in self._optimizer.param_groups:
            for name, param in self._params.items():
                if any(param is one for one in group["params"]):
                    seen, wanted = float(group["lr"]), self._each[name].lr
                    expect(math.isclose(seen, wanted), f"lr of {name} == {wanted}", seen)
