"""Random programs of an embedding module, and what they do to each of its tables alone.

A program is a list of operations in random order: lookups, reads, backward passes, changes of options, frozen
tables, loads and copies. The tested module runs it with all tables together. For each table a plain module of
the same implementation has only this table and one feature, and gets the sum of the gradients of each row
that was looked up. This sum is exact: weights, gradients and lengths of bags are small dyadic numbers, so
that no order of additions has a rounding error.
"""

import contextlib
import copy
import math
import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import exactly, expect, expect_raises
from keyedopt.conformance.suite.support.described import unwrapped
from keyedopt.conformance.suite.support.device import as_tensor, the_device
from keyedopt.conformance.suite.support.embedding import MADE, _filled, tables_of
from keyedopt.conformance.suite.support.embedding_inputs import Batch, Table, values_of
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.keyed_jagged import has_keyed_jagged_tensors
from keyedopt.conformance.suite.support.programs import FIRST_RATE, RATES_LATER, Program

POOLED, SEQUENCE = "EmbeddingBagCollection", "EmbeddingCollection"
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 33, 64)
ROW_COUNTS = (1, 2, 3, 7, 30)
#: Lengths of bags; a mean divides by them without rounding.
LENGTHS = (0, 1, 1, 2, 4)
FACTORS = (-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0)
#: Operations, and how often each occurs.
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
    #: The weights that need a gradient, and the exact gradient of each.
    weights: list[tuple[str, torch.Tensor, torch.Tensor]]


def _grad_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@dataclass
class SavedTables:
    """A checkpoint, and what had happened to each table."""

    module: Any
    optimizer: Any
    history: dict[str, list[Any]]
    rates: dict[str, float]


@dataclass
class TableAlone:
    """A table in a module of its own, which gets the gradient of each row."""

    module: Any
    history: list[Any] = field(default_factory=list)

    def apply(self, *event: Any) -> None:
        """Train, or scale the table, and remember it."""
        self.history.append(event)
        what, *given = event
        table = next(iter(tables_of(self.module).values()))
        if what == "scale":
            with torch.no_grad():
                table.mul_(given[0])
            return
        rate, rows, grads = given
        for group in self.module.fused_optimizer.param_groups:
            group["lr"] = rate
        places = list(range(len(rows) + 1)) if rows else [0, 0]
        features = {
            "alone": tuple(torch.tensor(one, dtype=torch.int64).to(the_device()) for one in (rows, places))
        }
        output = values_of(self.module(features)["alone"])
        grads = grads if rows else torch.zeros(output.shape)
        (output * as_tensor(grads).to(output.dtype)).sum().backward()


class EmbeddingProgram(Program):
    """Run a random program on a module of an implementation, and compare after each operation.

    Args:
        impl: the public names of the implementation.
        optimizers: the class and the options, other than ``lr``, of each table in turn. If there are several,
            they are applied to the tables of a module without an optimizer.
        without: operations that are left out.
        seed: chooses the tables and the operations.
        dtype: of the tables.
    """

    def __init__(
        self,
        impl: Any,
        optimizers: Sequence[tuple[str, Any]],
        seed: int,
        dtype: str,
        without: Collection[str] = (),
    ) -> None:
        MADE[0] = True
        operations = {name: often for name, often in OPERATIONS.items() if name not in without}
        super().__init__(operations, seed, dtype)
        self._impl = impl
        self._kind = self.choose.choice((POOLED, POOLED, POOLED, SEQUENCE))
        self._weighted = self._kind == POOLED and self.choose.random() < 0.4
        self._optimizers = optimizers
        self._tables = self._draw_tables()
        self._alone = {table.name: TableAlone(self._make_alone(table)) for table in self._tables}
        self._pending: list[Pending] = []
        self._saved: SavedTables | None = None
        self.done.append("; ".join(map(str, self._tables)) + (", weighted" if self._weighted else ""))
        self._start(self._make(self._tables))

    def _start(self, module: Any) -> None:
        """Go on with a new module."""
        self._module, self._wrapper, self._clipping = module, None, ("", math.inf)
        self._rates = dict.fromkeys(self._alone, FIRST_RATE)
        self._frozen = set[str]()

    # --- modules ------------------------------------------------------------------------------------

    def _draw_tables(self) -> list[Table]:
        choose, width, tables = self.choose, self.choose.choice(WIDTHS), list[Table]()
        for index in range(max(choose.choice((1, 2, 2, 3, 4, 7)), len(self._optimizers))):
            features = [f"f{index}{place}" for place in range(choose.choice((1, 1, 2)))]
            tables.append(
                Table(
                    f"t{index}",
                    choose.choice(ROW_COUNTS),
                    width if self._kind == SEQUENCE else choose.choice(WIDTHS),
                    tuple(features),
                    choose.choice(("SUM", "MEAN")) if self._kind == POOLED else "NONE",
                )
            )
        if len(tables) > 1 and choose.random() < 0.25 and not self._impl.lacks(f"{POOLED}.shared_features"):
            first, second = tables[0], tables[1]
            tables[1] = Table(
                second.name, second.rows, second.width, (*second.features, first.features[0]), second.pooling
            )
        return tables

    def _make(self, tables: Sequence[Table], weighted: bool | None = None) -> Any:
        config = getattr(self._impl, self._kind.replace("Collection", "Config"))
        configs = []
        for seed, table in enumerate(tables):
            more = {} if self._kind == SEQUENCE else {"pooling": self._impl.PoolingType[table.pooling]}
            configs.append(
                config(
                    num_embeddings=table.rows,
                    embedding_dim=table.width,
                    name=table.name,
                    feature_names=list(table.features),
                    data_type=self.dtype,
                    init_fn=_filled(seed),
                    **more,
                )
            )
        kinds = [self._optimizers[seed % len(self._optimizers)] for seed in range(len(tables))]
        chosen = [
            unwrapped(getattr(self._impl, name), {"lr": FIRST_RATE, **options}) for name, options in kinds
        ]
        given = {"is_weighted": self._weighted if weighted is None else weighted, "device": the_device()}
        if all(kind == kinds[0] for kind in kinds):
            return getattr(self._impl, self._kind)(configs, *chosen[0], **given)
        module = getattr(self._impl, self._kind)(configs, **given)
        weights = {key.split(".")[-2]: weight for key, weight in module.named_parameters()}
        for table, (kind, options) in zip(tables, chosen, strict=True):
            apply_in_backward(self._impl, kind, [weights[table.name]], options)
        return module

    def _make_alone(self, table: Table) -> Any:
        pooling = "SUM" if self._kind == POOLED else "NONE"
        index, outside = self._tables.index(table), self._optimizers
        self._optimizers = [outside[index % len(outside)]]
        module = self._make([Table(table.name, table.rows, table.width, ("alone",), pooling)], weighted=False)
        self._optimizers = outside
        _filled(index)(tables_of(module)[table.name])
        return module

    def _features(self) -> list[str]:
        return list(dict.fromkeys(feature for table in self._tables for feature in table.features))

    def _output_names(self, table: Table) -> dict[str, str]:
        """Return the name of the output of each feature of a table."""
        counts = [feature for each in self._tables for feature in each.features]
        return {one: one if counts.count(one) == 1 else f"{one}@{table.name}" for one in table.features}

    # --- operations ---------------------------------------------------------------------------------

    def _draw_batch(self) -> Batch:
        choose, size = self.choose, self.choose.choice((1, 2, 3, 5, 40))
        bags, weights = {}, {}
        for feature in self._features():
            rows = min(table.rows for table in self._tables if feature in table.features)
            lengths = [choose.choice(LENGTHS) for _ in range(size)]
            bags[feature] = [[choose.randrange(rows) for _ in range(length)] for length in lengths]
            weights[feature] = [[choose.choice(FACTORS) for _ in range(length)] for length in lengths]
        keyed = choose.random() < 0.5 and has_keyed_jagged_tensors(self._impl)
        return Batch(bags, weights, keyed)

    def _expected(self, batch: Batch, table: Table, feature: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the output of a feature of a table."""
        outputs = []
        first = 0
        for rows in batch.bags[feature]:
            found = weight[torch.tensor(rows, dtype=torch.int64)]
            if self._weighted:
                found = found * batch.exact[feature][first : first + len(rows), None]
            first += len(rows)
            if self._kind == SEQUENCE:
                outputs.append(found)
            else:
                outputs.append(
                    found.sum(0, keepdim=True) / (len(rows) or 1 if table.pooling == "MEAN" else 1)
                )
        return torch.cat(outputs)

    def _look(self, batch: Batch, module: Any, learn: bool = False) -> dict[str, torch.Tensor]:
        outputs = module(batch.features(self._weighted, self.dtype, self.choose, learn))
        names = [name for table in self._tables for name in self._output_names(table).values()]
        return {name: values_of(outputs[name]) for name in names}

    def _look_up(self) -> None:
        """Look up, and keep a loss of some or all tables."""
        batch, tables = self._draw_batch(), self._tables
        learn = self._weighted and self.choose.random() < 0.25
        outputs = self._look(batch, self._module, learn)
        if not batch.keyed:  # the joined output of all tables has one gradient
            tables = [table for table in tables if self.choose.random() < 0.75] or tables[:1]
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
        return (output * factors).sum()

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
        updates = {}
        for name in self._alone:
            parts = [one for one in now if name in one.rows]
            if parts and name not in self._frozen:
                rows = sorted(set[int]().union(*(one.rows[name] for one in parts)))
                updates[name] = rows, torch.stack([one.grads[name] for one in parts]).sum(0)[rows]
        kind, bound = self._clipping
        norm = float(torch.cat([torch.zeros(1), *(grads.flatten() for _, grads in updates.values())]).norm())
        for name, (rows, grads) in updates.items():
            if kind == "NORM":
                grads = grads * min(1.0, bound / (norm + 1e-6))
            self._alone[name].apply("train", self._rates[name], rows, grads.clamp(-bound, bound))

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
            rate = self.choose.choice(RATES_LATER)
            in_tensor = self.choose.random() < 0.25 and not self._impl.lacks(f"{POOLED}.tensor_rate")
            group["lr"] = torch.tensor(rate) if in_tensor else rate
            for name, table in tables_of(self._module).items():
                if any(param is table for param in group["params"]):
                    self._rates[name] = rate
                    self.note(f"{rate} of {name}")

    def _clip(self) -> None:
        """Clip the gradients of all tables from now on, which may be refused."""
        if any(map(self._impl.lacks, ("GradientClippingOptimizer", "GradientClipping"))):
            return
        kind, bound = self.choose.choice(("NORM", "VALUE")), self.choose.choice((0.5, 2.0, 8.0))
        self.note(f"by {kind} {bound}")
        with contextlib.suppress(ValueError):
            self._wrapper = self._impl.GradientClippingOptimizer(
                self._module.fused_optimizer, getattr(self._impl.GradientClipping, kind), bound
            )
            self._clipping = kind, bound

    def _freeze(self) -> None:
        """Freeze a table, or train it again."""
        if self._pending or self._impl.lacks(f"{POOLED}.frozen_tables"):
            return
        name = self.choose.choice(self._tables).name
        self._frozen ^= {name}
        self.note(f"{name}: {name in self._frozen}")
        tables_of(self._module)[name].requires_grad_(name not in self._frozen)

    def _save(self) -> None:
        """Make a checkpoint."""
        module, optimizer = self._module.state_dict(), self._module.fused_optimizer.state_dict()
        history = {name: list(alone.history) for name, alone in self._alone.items()}
        self._saved = SavedTables(copy.deepcopy(module), copy.deepcopy(optimizer), history, dict(self._rates))

    def _load(self) -> None:
        """Load the checkpoint into this module or a new one."""
        if self._pending or self._saved is None:
            return
        if self.choose.random() < 0.5:
            self.note("into a new module")
            self._start(self._make(self._tables))
        self._module.load_state_dict(copy.deepcopy(self._saved.module))
        self._module.fused_optimizer.load_state_dict(copy.deepcopy(self._saved.optimizer))
        if "param_groups" in self._saved.optimizer:
            self._rates = dict(self._saved.rates)
        for table in self._tables:
            self._alone[table.name] = alone = TableAlone(self._make_alone(table))
            for event in self._saved.history[table.name]:
                alone.apply(*event)

    def _copy(self) -> None:
        """Copy the module, and train on with one of the two after the other has been trained."""
        if self._pending:
            return
        how = self.choose.choice(("deepcopy", "pickle"))
        whole = self._module, self._wrapper
        made = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
        (kept, self._wrapper), (left, _) = self.choose.sample((whole, made), 2)
        self.note(f"by {how}, train the {'copy' if kept is made[0] else 'original'}")
        outputs = self._look(self._draw_batch(), left)
        total = torch.stack([output.sum() for output in outputs.values()]).sum()
        if total.requires_grad:
            total.backward()
        self._module = kept

    def _scale_a_table(self) -> None:
        """Change a table in place."""
        name = self.choose.choice(self._tables).name
        self.note(name)
        with torch.no_grad():
            tables_of(self._module)[name].mul_(0.5)
        self._alone[name].apply("scale", 0.5)

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
        """Expect tables, state and options as each table alone has them."""
        state = self._module.fused_optimizer.state_dict()["state"]
        for name, alone in self._alone.items():
            self.expect_close(tables_of(self._module)[name], tables_of(alone.module)[name], f"table {name}")
            wanted = alone.module.fused_optimizer.state_dict()["state"]
            for key, entry in wanted.items():
                for entry_name, value in entry.items():
                    if isinstance(value, torch.Tensor) and key in state:
                        self.expect_close(state[key][entry_name], value, f"state {entry_name}")
        for group in self._module.fused_optimizer.param_groups:
            for name, table in tables_of(self._module).items():
                if any(param is table for param in group["params"]):
                    expect(float(group["lr"]) == self._rates[name], f"lr of table {name}", group["lr"])
