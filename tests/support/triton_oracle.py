"""What the Triton kernels are held to: tables, lookups, and the rules of the reference, with their errors."""

from collections.abc import Mapping
from typing import Any

import torch
from triton_orders import worst_of_orders

from keyedopt.fused.backends.interface import Lookup, Step, Table
from keyedopt.reference import rules

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}

#: The options of a step, and what else a case of it needs.
STEPS: dict[str, dict[str, Any]] = {
    "sgd": {"algorithm": "sgd"},
    "sgd_l2": {"algorithm": "sgd", "weight_decay": 0.1, "decay": "l2"},
    "sgd_decoupled_maximize": {
        "algorithm": "sgd",
        "weight_decay": 0.1,
        "decay": "decoupled",
        "maximize": True,
    },
    "sgd_momentum": {
        "algorithm": "sgd",
        "momentum": 0.9,
        "dampening": 0.2,
        "weight_decay": 0.1,
        "decay": "l2",
    },
    "sgd_nesterov": {"algorithm": "sgd", "momentum": 0.9, "nesterov": True},
    "adagrad": {"algorithm": "adagrad", "eps": 1e-8},
    "adagrad_lr_decay": {
        "algorithm": "adagrad",
        "eps": 1e-8,
        "lr_decay": 0.5,
        "weight_decay": 0.1,
        "decay": "decoupled",
    },
    "adagrad_no_eps": {"algorithm": "adagrad", "eps": 0.0, "weight_decay": 0.1, "decay": "l2"},
    "rowwise": {"algorithm": "rowwise_adagrad", "eps": 1e-8},
    "rowwise_l2_norm": {
        "algorithm": "rowwise_adagrad",
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay": "l2",
        "max_norm": 1.5,
    },
    "rowwise_decoupled": {
        "algorithm": "rowwise_adagrad",
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay": "decoupled",
        "lr_decay": 0.3,
    },
    "adam": {"algorithm": "adam", **ADAM},
    "adam_l2": {"algorithm": "adam", **ADAM, "weight_decay": 0.1, "decay": "l2", "maximize": True},
    "adamw_counted": {
        "algorithm": "adam",
        **ADAM,
        "weight_decay": 0.1,
        "decay": "decoupled",
        "counted": True,
    },
    "adam_before": {"algorithm": "adam", **ADAM, "eps_placement": "before_bias_correction"},
    "sparse_adam": {"algorithm": "sparse_adam", **ADAM, "eps_placement": "before_bias_correction"},
    "partial_adam": {
        "algorithm": "partial_rowwise_adam",
        **ADAM,
        "weight_decay": 0.1,
        "decay": "decoupled",
        "counted": True,
    },
    "lamb": {"algorithm": "lamb", **ADAM, "weight_decay": 0.1, "decay": "decoupled"},
    "partial_lamb": {"algorithm": "partial_rowwise_lamb", **ADAM, "weight_decay": 0.1, "decay": "l2"},
    "lars": {"algorithm": "lars_sgd", "momentum": 0.9, "eta": 0.02, "weight_decay": 0.1},
}
FULL, ROW = "full", "row"
STATES = {
    "adagrad": [FULL],
    "rowwise_adagrad": [ROW],
    "adam": [FULL, FULL],
    "sparse_adam": [FULL, FULL],
    "partial_rowwise_adam": [FULL, ROW],
    "lamb": [FULL, FULL],
    "partial_rowwise_lamb": [FULL, ROW],
    "lars_sgd": [FULL],
}
#: Names of the arguments of the rules that are names of options of a step, too.
TAKEN = {
    "sgd": ("momentum", "dampening", "nesterov", "first", "weight_decay", "decay", "maximize"),
    "adagrad": ("eps", "lr_decay", "weight_decay", "decay", "maximize"),
    "rowwise_adagrad": ("eps", "lr_decay", "weight_decay", "decay", "max_norm", "maximize"),
    "adam": ("betas", "eps", "weight_decay", "decay", "eps_placement", "maximize"),
    "sparse_adam": ("betas", "eps", "maximize"),
    "partial_rowwise_adam": ("betas", "eps", "weight_decay", "decay", "maximize"),
    "lamb": ("betas", "eps", "weight_decay", "decay", "maximize"),
    "partial_rowwise_lamb": ("betas", "eps", "weight_decay", "decay", "maximize"),
    "lars_sgd": ("momentum", "eta", "weight_decay", "maximize"),
}
ENUMS: dict[str, Any] = {"decay": rules.Decay, "eps_placement": rules.EpsPlacement}


# --- what is looked up ----------------------------------------------------------------------------


def tables_of(sizes: Any, options: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> list[Table]:
    """Make tables of these rows and widths, with state that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    kinds = STATES.get(options["algorithm"], [FULL] if options.get("momentum") else [])
    tables = []
    for rows, width in sizes:
        shapes = [(rows, width) if kind == FULL else (rows,) for kind in kinds]
        states = tuple(torch.rand(shape, generator=generator) for shape in shapes)
        counter = torch.randint(0, 5, (rows,), generator=generator) if options.get("counted") else None
        tables.append(Table(torch.randn(rows, width, generator=generator).to(dtype), states, counter))
    return tables


def step_of(options: Mapping[str, Any], **numbers: Any) -> Step:
    """Return a step with these options, other than whether rows count, and these numbers."""
    return Step(lr=0.1, **{key: value for key, value in options.items() if key != "counted"}, **numbers)


def lookup_of(
    table: int, weight: torch.Tensor, lengths: list[int], seed: int, hot: int = 0, **kind: Any
) -> Lookup:
    """Look up bags of these lengths, the first `hot` values all of row 3, and give them a gradient."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = weight.shape
    values = torch.randint(0, rows, (sum(lengths),), generator=generator)
    values[:hot] = min(3, rows - 1)
    bags = len(values) if kind.get("unpooled") else len(lengths)
    offsets = None if kind.get("unpooled") else torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.rand(len(values), generator=generator) + 0.5 if kind.get("weighted") else None
    grad = torch.randn(bags, width, generator=generator)
    return Lookup(table, values, offsets, weights, kind.get("mean", False), grad)


def spread(lookup: Lookup, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of every value of a lookup."""
    assert lookup.grad is not None
    grad = lookup.grad.to(dtype)
    if lookup.offsets is not None:
        lengths = lookup.offsets.diff()
        if lookup.mean:
            grad = grad / lengths.clamp(min=1)[:, None]
        grad = grad.repeat_interleave(lengths, 0)
    return grad if lookup.weights is None else grad * lookup.weights.to(dtype)[:, None]


def summed(lookups: list[Lookup], table: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a table that are looked up, and their gradients in float64."""
    mine = [lookup for lookup in lookups if lookup.table == table]
    return rules.coalesce(
        torch.cat([lookup.values for lookup in mine]),
        torch.cat([spread(lookup, torch.float64) for lookup in mine]),
    )


def expected(
    tables: list[Table], lookups: list[Lookup], step: Step, options: Mapping[str, Any], dtype: torch.dtype
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Return weight and states of each table after the rule of the reference, computed in this dtype."""
    results = []
    for number, table in enumerate(tables):
        mine = [lookup for lookup in lookups if lookup.table == number]
        weight = table.weight.to(dtype, copy=True)
        states = [state.to(dtype, copy=True) for state in table.states]
        if mine and any(len(lookup.values) for lookup in mine):
            rows, grads = summed(lookups, number)
            name = options["algorithm"]
            given = {key: getattr(step, key) for key in TAKEN[name]}
            given = {key: ENUMS[key](value) if key in ENUMS else value for key, value in given.items()}
            if name not in ("sgd", "lars_sgd"):
                counter = table.row_counter
                given["step"] = float(step.count) if counter is None else counter[rows].double() + 1
            rules.update_rows(
                getattr(rules, name), weight, states, rows, grads.to(dtype), lr=float(step.lr), **given
            )
        results.append((weight, states))
    return results


# --- how right it is ------------------------------------------------------------------------------


def units_of(exact: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the unit in the last place of each element, of the larger of both tensors."""
    info = torch.finfo(old.dtype)
    size = torch.maximum(exact.abs(), old.double().abs()).clamp(min=info.tiny)
    return 2.0 ** size.log2().floor() * info.eps


def check_update(
    backend: Any, tables: list[Table], lookups: list[Lookup], step: Step, options: Mapping[str, Any]
) -> None:
    """Update the tables, and compare all of them with the rule, in float64.

    The error is at most 2 ULP, or twice the worst of 32 orders of the formula in float32. These are computed
    only for the row with the largest error, and only if that is more than twice the error of the reference.
    """
    exact = expected(tables, lookups, step, options, torch.float64)
    plain = expected(tables, lookups, step, options, torch.float32)
    old = [[table.weight.clone(), *(state.clone() for state in table.states)] for table in tables]
    counters = [None if table.row_counter is None else table.row_counter.clone() for table in tables]
    backend.update(tables, lookups, step)
    for number, table in enumerate(tables):
        seen = [table.weight, *table.states]
        values = [lookup.values for lookup in lookups if lookup.table == number]
        rest = torch.ones(len(table.weight), dtype=torch.bool)
        rest[torch.cat(values) if values else []] = False
        for index, tensor in enumerate(seen):
            assert torch.equal(tensor[rest], old[number][index][rest]), "an untouched row was written"
        right = [exact[number][0], *exact[number][1]]
        mine = [plain[number][0], *plain[number][1]]
        units = [units_of(*pair) for pair in zip(right, old[number], strict=True)]
        for index, tensor in enumerate(seen):
            error = (tensor.double() - right[index]).abs() / units[index]
            own = (mine[index].to(tensor.dtype).double() - right[index]).abs() / units[index]
            most, worst = error.max().item(), own.max().item()
            if not most <= max(2.0, 2 * worst):
                row = int(error.reshape(len(error), -1).amax(1).argmax())
                rows, grads = summed(lookups, number)
                (place,) = (rows == row).nonzero()[:, 0].tolist()
                counter = counters[number]
                count = int(step.count) if counter is None else int(counter[row]) + 1
                of_row = [[one[row] for one in each] for each in (old[number], right, units)]
                orders = worst_of_orders(of_row[0], grads[place], count, step, *of_row[1:])
                worst = max(worst, orders[index])
            what = f"table {number}, tensor {index}"
            assert most <= max(2.0, 2 * worst), f"{what}: {most:.2f} ULP, the worst order has {worst:.2f}"
        counter = counters[number]
        if table.row_counter is not None and counter is not None:
            assert torch.equal(table.row_counter - counter, (~rest).long())


def check_output(backend: Any, tables: list[Table], lookups: list[Lookup]) -> None:
    """Expect what is looked up, pooled or not, in float64."""
    for lookup, seen in zip(lookups, backend.look_up(tables, lookups), strict=True):
        rows = tables[lookup.table].weight.double()[lookup.values]
        if lookup.weights is not None:
            rows = rows * lookup.weights.double()[:, None]
        if lookup.offsets is not None:
            lengths = lookup.offsets.diff()
            bags = torch.arange(len(lengths)).repeat_interleave(lengths)
            rows = torch.zeros(len(lengths), rows.shape[1], dtype=torch.float64).index_add_(0, bags, rows)
            if lookup.mean:
                rows /= lengths.clamp(min=1)[:, None]
        torch.testing.assert_close(seen.double(), rows, rtol=1e-6, atol=1e-6)
        assert seen.shape == rows.shape
