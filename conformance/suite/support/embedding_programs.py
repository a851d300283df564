"""Programs of an embedding module, compared with modules that have only one of its tables.

The operations are lookups, reads, backward passes, changes of options, frozen tables, loads and copies. The
tested module has several tables. For each of them, another module of the implementation has only this table
and one feature, and looks up each row once, with the sum of the row's gradients. This sum is exact: weights,
gradients and lengths of bags are small dyadic numbers, so no order of additions has a rounding error.
"""

import contextlib
import copy
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from keyedopt.conformance.suite.support.assertions import exactly, expect, expect_equal, expect_raises
from keyedopt.conformance.suite.support.described import unwrapped
from keyedopt.conformance.suite.support.device import as_tensor, the_device
from keyedopt.conformance.suite.support.embedding import _filled, collection, jagged, tables_of
from keyedopt.conformance.suite.support.embedding_inputs import (
    FACTORS,
    Batch,
    Table,
    draw_batch,
    draw_tables,
    values_of,
)
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.keyed_jagged import has_keyed_jagged_tensors
from keyedopt.conformance.suite.support.programs import FIRST_LR, OTHER_LRS, Program

POOLED, SEQUENCE = "EmbeddingBagCollection", "EmbeddingCollection"
#: The operations, each with its relative frequency.
OPERATIONS = {
    "train": 6,
    "look up": 3,
    "read": 1,
    "set the learning rate": 3,
    "freeze": 2,
    "save": 1,
    "load": 2,
    "copy": 1,
    "scale a table": 1,
    "step and zero_grad": 1,
    "look up an invalid row": 1,
    "clip": 1,
}


@dataclass
class Pending:
    """A loss whose backward pass has not run, with the exact gradient and the rows of each table."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    rows: dict[str, set[int]]
    #: The name of a feature, its weights, which need a gradient, and their exact gradient.
    weights: list[tuple[str, torch.Tensor, torch.Tensor]]


def _grad_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@dataclass
class SavedTables:
    """A checkpoint, with the history and the learning rate of each table."""

    module: Any
    optimizer: Any
    history: dict[str, list[Any]]
    lrs: dict[str, float]


@dataclass
class OneTable:
    """A module with only one table, which looks up each row once.

    Args:
        module: the module; it does not accumulate gradients.
        window: the number of steps whose gradients are summed for one update.
    """

    module: Any
    window: int = 1
    history: list[Any] = field(default_factory=list)
    _held: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)

    def scale(self, factor: float) -> None:
        """Multiply the table in place."""
        self.history.append((OneTable.scale, factor))
        with torch.no_grad():
            next(iter(tables_of(self.module).values())).mul_(factor)

    def train(self, lr: float, rows: list[int], grads: torch.Tensor) -> None:
        """Take a step on rows with the gradients of the table."""
        self.history.append((OneTable.train, lr, rows, grads))
        self._held.append((rows, grads))
        if len(self._held) < self.window:
            return
        listed = sorted({row for some, _ in self._held for row in some})
        total = torch.stack([one for _, one in self._held]).sum(0)[listed]
        self._held.clear()
        for group in self.module.fused_optimizer.param_groups:
            group["lr"] = lr
        output = values_of(self.module(jagged({"f": [[row] for row in listed] or [[]]}))["f"])
        total = total if listed else torch.zeros(output.shape)
        (output * as_tensor(total).to(output.dtype)).sum().backward()


class EmbeddingProgram(Program):
    """A program of an embedding module.

    Args:
        impl: the public names of the implementation.
        optimizers: the class and the options, other than ``lr``, of each table in turn. Several optimizers
            are applied to the tables of a module without an optimizer.
        seed: determines the tables and the operations.
        dtype: of the tables.
        without: operations that the program does not have.
    """

    #: The operations, each with its relative frequency.
    operations: ClassVar[Mapping[str, int]] = OPERATIONS
    #: How probably a loss depends on a table.
    share: ClassVar[float] = 0.75

    def __init__(
        self,
        impl: Any,
        optimizers: Sequence[tuple[str, Any]],
        seed: int,
        dtype: str,
        without: Collection[str] = (),
    ) -> None:
        operations = {name: often for name, often in self.operations.items() if name not in without}
        super().__init__(operations, seed, dtype)
        self._impl, self._accepts_keyed = impl, has_keyed_jagged_tensors(impl)
        self._of = dtype
        self._kind = self.choose.choice((POOLED, POOLED, POOLED, SEQUENCE))
        pooled = self._kind == POOLED
        self._weighted = pooled and self.choose.random() < 0.5
        self._optimizers = optimizers
        count = max(self.choose.choice((1, 2, 2, 3, 4, 7)), len(optimizers))
        shared = not impl.lacks(f"{POOLED}.shared_features")
        self._tables = draw_tables(self.choose, count, self._dtypes(), pooled, shared)
        self._each = {table.name: self._make_one(table) for table in self._tables}
        self._pending: list[Pending] = []
        self._saved: SavedTables | None = None
        self._batch: Batch | None = None
        self.done.append("; ".join(map(str, self._tables)) + (", weighted" if self._weighted else ""))
        self._start()

    def _dtypes(self) -> list[str]:
        """Return the dtypes of tables: beside float32, sometimes those that the target has."""
        more = [name for name in ("float64", "float16", "bfloat16") if name in self._impl.dtypes]
        return [self._of] * 6 + (more if self._of == "float32" else [])

    def _start(self) -> None:
        """Continue with a new module."""
        self._module = self._make()
        self._wrapper: Any = None
        #: The kind and the bound of each clipping in force, the outer one first.
        self._clipping = list[tuple[str, float]]()
        self._lrs = dict.fromkeys(self._each, FIRST_LR)
        self._frozen = set[str]()

    # --- modules ------------------------------------------------------------------------------------

    def _optimizer_of(self, table: Table) -> tuple[str, dict[str, Any]]:
        name, options = self._optimizers[self._tables.index(table) % len(self._optimizers)]
        return name, {"lr": FIRST_LR, **options}

    def _make(self) -> Any:
        """Make the module with all tables."""
        more: Any = {"tables": self._tables, "kind": self._kind, "weighted": self._weighted}
        if len(self._optimizers) == 1:
            return collection(self._impl, *self._optimizer_of(self._tables[0]), **more)
        module = collection(self._impl, None, **more)
        weights = {key.split(".")[-2]: weight for key, weight in module.named_parameters()}
        for table in self._tables:
            name, options = self._optimizer_of(table)
            kind, options = unwrapped(getattr(self._impl, name), options)
            apply_in_backward(self._impl, kind, [weights[table.name]], options)
        return module

    def _make_one(self, table: Table) -> OneTable:
        """Make a module with only this table, whose rows it does not weigh or divide."""
        single = table._replace(features=("f",), pooling="SUM")
        name, options = self._optimizer_of(table)
        window = options.get("accumulate_step", 1)
        if window > 1:
            options["use_accumulate"] = False
        module = collection(self._impl, name, options, tables=[single], kind=self._kind)
        _filled(self._tables.index(table))(tables_of(module)[table.name])
        return OneTable(module, window)

    def _output_names(self, table: Table) -> dict[str, str]:
        """Return the name of the output of each feature of a table."""
        counts = [feature for each in self._tables for feature in each.features]
        return {one: one if counts.count(one) == 1 else f"{one}@{table.name}" for one in table.features}

    # --- operations ---------------------------------------------------------------------------------

    def _draw_batch(self) -> Batch:
        self._batch = draw_batch(self.choose, self._tables, self._accepts_keyed, self._batch)
        return self._batch.again()

    def _expected(self, batch: Batch, table: Table, feature: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the output of a feature of a table."""
        bags = batch.bags[feature]
        found = weight[torch.tensor([row for rows in bags for row in rows], dtype=torch.int64)]
        if self._weighted:
            found = found * batch.exact[feature][:, None]
        lengths = torch.tensor([len(rows) for rows in bags])
        if self._kind == POOLED:
            bag_of = torch.arange(len(bags)).repeat_interleave(lengths)
            found = found.new_zeros(len(bags), table.width).index_add(0, bag_of, found)
            if table.pooling == "MEAN":
                found = found / lengths.clamp(min=1)[:, None]
        return found[torch.tensor(batch.inverse[feature])] if batch.inverse else found

    def _look(self, batch: Batch, module: Any, learn: bool = False) -> dict[str, torch.Tensor]:
        outputs = module(batch.features(self._weighted, self.dtype, self.choose, learn))
        names = [name for table in self._tables for name in self._output_names(table).values()]
        if batch.keyed and self._kind == POOLED:
            expect_equal(list(outputs.keys()), names, "keys of the output")
        return {name: values_of(outputs[name]) for name in names}

    def _look_up(self) -> None:
        """Look up, and store a loss that depends on some or all tables."""
        batch, tables = self._draw_batch(), self._tables
        learn = self._weighted and self.choose.random() < 0.25
        outputs = self._look(batch, self._module, learn)
        if not batch.keyed:  # the joined output of all tables has one gradient
            tables = [table for table in tables if self.choose.random() < self.share] or tables[:1]
        some = "" if tables is self._tables else " " + ", ".join(table.name for table in tables)
        self.note(f"{batch}, loss of{some or ' all tables'}")
        losses, exact, rows = [], [], {}
        weights = {name: exactly(one).requires_grad_() for name, one in tables_of(self._module).items()}
        for table in self._tables:
            for feature, name in self._output_names(table).items():
                wanted = self._expected(batch, table, feature, weights[table.name])
                self.expect_close(outputs[name], wanted, f"the output {name}")
                if table in tables:
                    drawn = self.choose.choices(FACTORS, k=wanted.numel())
                    factors = torch.tensor(drawn, dtype=torch.float64).reshape(wanted.shape)
                    losses.append(self._weigh(outputs[name], as_tensor(factors).to(outputs[name].dtype)))
                    exact.append((wanted * factors).sum())
            if table in tables:
                looked_up = (row for one in table.features for bag in batch.bags[one] for row in bag)
                rows[table.name] = set(looked_up)
        loss = torch.stack(losses).sum()
        if not loss.requires_grad:
            return  # all tables are frozen
        torch.stack(exact).sum().backward()
        grads = {name: _grad_of(weights[name]) for name in rows}
        learned = [(name, given, _grad_of(batch.exact[name])) for name, given in batch.given.items()]
        self._pending.append(Pending(loss, grads, rows, learned))

    def _weigh(self, output: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return a loss with this gradient, whose rows or columns are contiguous."""
        if self.choose.random() < 0.3:
            output, factors = output.t(), factors.t().contiguous()
        return (output * factors).sum().float()  # tables may have unlike dtypes

    def _train(self) -> None:
        """Look up if nothing was, and run the backward pass of one loss, or of the sum of all."""
        if not self._pending or self.choose.random() < 0.5:
            self._look_up()
        if not self._pending:
            return
        self.choose.shuffle(self._pending)
        count = self.choose.choice((1, 1, len(self._pending)))
        now, self._pending = self._pending[:count], self._pending[count:]
        self.note(f"then backward of {count}")
        torch.stack([one.loss for one in now]).sum().backward()
        for name, given, exact in (one for each in now for one in each.weights):
            self.expect_close(_grad_of(given), exact, f"the gradient of the weights of {name}")
        rows, grads = dict[str, set[int]](), dict[str, torch.Tensor]()
        for name in self._each:
            parts = [one for one in now if name in one.rows]
            if parts and name not in self._frozen:
                rows[name] = set[int]().union(*(one.rows[name] for one in parts))
                grads[name] = torch.stack([one.grads[name] for one in parts]).sum(0)
        self._learn(rows, grads)

    def _learn(self, rows: Mapping[str, set[int]], grads: Mapping[str, torch.Tensor]) -> None:
        """Update the modules with one table by the gradients of a backward pass, after the clipping."""
        clipped = self._clipped(grads)
        for name, listed in rows.items():
            self._each[name].train(self._lrs[name], sorted(listed), clipped[name])

    def _clipped(self, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the gradients as all clipping in force leaves them."""
        clipped = dict(grads)
        for kind, bound in self._clipping:
            norm = float(torch.cat([torch.zeros(1), *(grad.flatten() for grad in clipped.values())]).norm())
            for name, grad in clipped.items():
                scaled = grad * min(1.0, bound / (norm + 1e-6))
                clipped[name] = scaled if kind == "NORM" else grad.clamp(-bound, bound)
        return clipped

    def _read(self) -> None:
        """Look up without training."""
        how = self.choose.choice(("eval", "no_grad", "inference_mode"))
        batch = self._draw_batch()
        self.note(f"in {how} {batch}")
        self._module.train(how != "eval")
        context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(
            how, torch.enable_grad
        )
        with context():
            outputs = self._look(batch, self._module)
            for table in self._tables:
                weight = exactly(tables_of(self._module)[table.name])
                for feature, name in self._output_names(table).items():
                    wanted = self._expected(batch, table, feature, weight)
                    self.expect_close(outputs[name], wanted, f"the output {name}")
        self._module.train()

    def _set_the_learning_rate(self) -> None:
        """Set it in all groups of the optimizer, also between a lookup and its backward pass."""
        for group in self._module.fused_optimizer.param_groups:
            lr = self.choose.choice(OTHER_LRS)
            in_tensor = self.choose.random() < 0.25 and not self._impl.lacks(f"{POOLED}.tensor_rate")
            group["lr"] = torch.tensor(lr) if in_tensor else lr
            for name, table in tables_of(self._module).items():
                if any(param is table for param in group["params"]):
                    self._lrs[name] = lr
                    self.note(f"{lr} of {name}")

    def _clip(self) -> None:
        """Clip the gradients of all tables from now on, which may be refused."""
        if any(map(self._impl.lacks, ("GradientClippingOptimizer", "GradientClipping"))):
            return
        kind, bound = self.choose.choice(("NORM", "VALUE")), self.choose.choice((0.5, 2.0, 8.0))
        nested = self._wrapper is not None and self.choose.random() < 0.5
        self.note(f"by {kind} {bound}{' around the earlier clipping' if nested else ''}")
        inside = self._wrapper if nested else self._module.fused_optimizer
        with contextlib.suppress(ValueError):
            self._wrapper = self._impl.GradientClippingOptimizer(
                inside, getattr(self._impl.GradientClipping, kind), bound
            )
            self._clipping = [(kind, bound), *(self._clipping if nested else [])]

    def _freeze(self) -> None:
        """Freeze a table or all, or unfreeze it or them."""
        if self._pending or self._impl.lacks(f"{POOLED}.frozen_tables"):
            return
        name = self.choose.choice(self._tables).name
        freeze, every = name not in self._frozen, self.choose.random() < 0.3
        self.note(f"{'all' if every else name}{'' if freeze else ' no longer'}")
        for one in self._each if every else [name]:
            self._frozen = self._frozen | {one} if freeze else self._frozen - {one}
            tables_of(self._module)[one].requires_grad_(not freeze)

    def _save(self) -> None:
        """Make a checkpoint."""
        module, optimizer = self._module.state_dict(), self._module.fused_optimizer.state_dict()
        history = {name: list(one.history) for name, one in self._each.items()}
        self._saved = SavedTables(copy.deepcopy(module), copy.deepcopy(optimizer), history, dict(self._lrs))

    def _load(self) -> None:
        """Load the checkpoint into this module or a new one."""
        if self._pending or self._saved is None:
            return
        if self.choose.random() < 0.5:
            self.note("into a new module")
            self._start()
        self._module.load_state_dict(copy.deepcopy(self._saved.module))
        self._module.fused_optimizer.load_state_dict(copy.deepcopy(self._saved.optimizer))
        if "param_groups" in self._saved.optimizer:
            self._lrs = dict(self._saved.lrs)
        for table in self._tables:
            self._each[table.name] = one = self._make_one(table)
            for operation, *arguments in self._saved.history[table.name]:
                operation(one, *arguments)

    def _copy(self) -> None:
        """Copy the module, train the copy or the original, and continue with the other one."""
        if self._pending:
            return
        how = self.choose.choice(("deepcopy", "pickle"))
        whole = self._module, self._wrapper
        made = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
        (kept, self._wrapper), (left, wrapper) = self.choose.sample((whole, made), 2)
        self.note(f"by {how}, continue with the {'copy' if kept is made[0] else 'original'}")
        outputs = self._look(self._draw_batch(), left)
        total = torch.stack([output.sum() for output in outputs.values()]).sum()
        if total.requires_grad:
            total.backward()
        (wrapper or left.fused_optimizer).step()
        self._module = kept

    def _scale_a_table(self) -> None:
        """Change a table in place."""
        name = self.choose.choice(self._tables).name
        self.note(name)
        with torch.no_grad():
            tables_of(self._module)[name].mul_(0.5)
        self._each[name].scale(0.5)

    def _step_and_zero_grad(self) -> None:
        """Change nothing."""
        self._module.fused_optimizer.step()
        self._module.fused_optimizer.zero_grad()

    def _look_up_an_invalid_row(self) -> None:
        """Raise ValueError, and change nothing."""
        if the_device().type != "cpu":
            return  # the error may come late
        batch, table = self._draw_batch(), self.choose.choice(self._tables)
        batch.bags[table.features[0]][-1].append(table.rows)
        batch.weights[table.features[0]][-1].append(1.0)
        self.note(str(batch))
        features = batch.features(self._weighted, self.dtype, self.choose)
        expect_raises(lambda: self._module(features), ValueError, expected="ValueError: an invalid row")

    # --- comparison ---------------------------------------------------------------------------------

    def compare(self) -> None:
        """Expect the tables, their state and learning rates as in the modules with one table."""
        state = self._module.fused_optimizer.state_dict()["state"]
        for name, one in self._each.items():
            self.expect_close(tables_of(self._module)[name], tables_of(one.module)[name], f"table {name}")
            for key, entries in one.module.fused_optimizer.state_dict()["state"].items():
                expect(key in state, f"state of {key}", list(state))
                for entry, value in entries.items():
                    if isinstance(value, torch.Tensor):
                        self.expect_close(state[key][entry], value, f"state {entry}")
        for group in self._module.fused_optimizer.param_groups:
            for name, table in tables_of(self._module).items():
                if any(param is table for param in group["params"]):
                    wanted = self._lrs[name]
                    expect(float(group["lr"]) == wanted, f"lr {wanted} of table {name}", group["lr"])
