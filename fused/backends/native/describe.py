"""Tables and steps as the numbers and addresses that the C++ kernels take."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyedopt.fused.backends.interface import ALGORITHMS, ROW_STATE, Step, Table, Tables, misfit
from keyedopt.fused.bulk import places
from keyedopt.reference.memory import PLAIN, check_memory

#: The numbers of kernels.h. SparseAdam is Adam with another placement of eps.
ALGORITHM_NUMBERS = {
    "sgd": 0,
    "adagrad": 1,
    "rowwise_adagrad": 2,
    "adam": 3,
    "sparse_adam": 3,
    "partial_rowwise_adam": 4,
    "lamb": 5,
    "partial_rowwise_lamb": 6,
    "lars_sgd": 7,
    "ftrl": 8,
}
DTYPE_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DECAY_NUMBERS = {"none": 0, "l2": 1, "decoupled": 2}


def refused_table(table: Table) -> str:
    """Return why the kernels do not support a table; empty if they do."""
    weight = table.weight
    if weight.dtype not in DTYPE_NUMBERS:
        return f"weights must be float32, float16 or bfloat16, not {weight.dtype}"
    if weight.dim() != 2 or not weight.shape[1]:
        return f"tables must have at least one column, not shape {tuple(weight.shape)}"
    for tensor in table.tensors:
        if tensor.device.type != "cpu" or type(tensor) not in PLAIN:
            return f"tensors must be plain tensors on the CPU, not {type(tensor).__name__} on {tensor.device}"
        if not tensor.is_contiguous():
            return "tensors must be contiguous"
    for state in table.states:
        if state.dtype is not torch.float32:
            return f"states must be float32, not {state.dtype}"
    return misfit(table)


def describe_table(table: Table, step: Step | None = None) -> tuple[int, ...]:
    """Return addresses and sizes.

    Args:
        table: the table.
        step: the step; None for a call that only reads.

    Raises:
        ValueError: the kernels do not support the table, or it does not have the states of the algorithm.
        RuntimeError: the memory of a tensor has been freed.
    """
    weight = table.weight
    number = DTYPE_NUMBERS.get(weight.dtype)
    # A call may have many small tables, so the common case is checked in little Python.
    if number is None or not (weight.is_cpu and weight.is_contiguous() and type(weight) in PLAIN):
        _refuse(table)
    shape = weight.shape
    if len(shape) != 2 or not shape[1]:
        _refuse(table)
    rows, dim = shape
    check_memory(weight)
    if step is None:
        return (weight.data_ptr(), rows, dim, number or 0, 0, 0, 0, 0, 0)
    states: list[int] = []
    for width, state in zip(state_widths(step.algorithm, dim, len(table.states)), table.states, strict=True):
        if state.dtype is not torch.float32 or not (
            state.is_cpu and state.is_contiguous() and type(state) in PLAIN
        ):
            _refuse(table)
        if state.numel() != rows * width or state.shape[:1] != shape[:1]:
            raise ValueError(
                f"a state of {step.algorithm} has {width} numbers a row, not {tuple(state.shape)}"
            )
        check_memory(state)
        states += (state.data_ptr(), width)
    while len(states) < 4:
        states.append(0)
    if table.row_counter is None:
        return (weight.data_ptr(), rows, dim, number or 0, *states, 0)
    _refuse(table)
    check_memory(table.row_counter)
    return (weight.data_ptr(), rows, dim, number or 0, *states, table.row_counter.data_ptr())


def described_tables(tables: Sequence[Table], step: Step | None, kernels: Any) -> Any:
    """Return described tables; those of `Tables` from their cache, or anew if their memory has changed.

    Raises:
        ValueError: as `describe_table`.
    """
    if type(tables) is not Tables:
        return [describe_table(table, step) for table in tables]
    key = "" if step is None else step.algorithm
    tensors, memory, described = tables.cache.get(key, ([], None, None))
    if described is None or places(tensors) != memory:
        tensors = [one for table in tables for one in ([table.weight] if step is None else table.tensors)]
        described = kernels.parse_tables([describe_table(table, step) for table in tables])
        tables.cache[key] = tensors, places(tensors), described
    return described


def _refuse(table: Table) -> None:
    """Raise ValueError if the kernels do not support a table."""
    why = refused_table(table)
    if why:
        raise ValueError(f"the native backend cannot do this: {why}")


def state_widths(algorithm: str, dim: int, given: int) -> tuple[int, ...]:
    """Return how many numbers each state has in a row.

    Raises:
        ValueError: the number of states is not that of the algorithm.
    """
    row_state = ROW_STATE.get(algorithm)
    count = min(given, 1) if algorithm == "sgd" else len(ALGORITHMS[algorithm])
    widths = tuple(1 if index == row_state else dim for index in range(count))
    if given != len(widths):
        raise ValueError(f"{algorithm} must have {len(widths)} states, not {given}")
    return widths


def describe_rule(step: Step) -> tuple[Any, ...]:
    """Return the numbers of a step, as the kernels' `Rule` has them."""
    options = vars(step)
    return describe_options(step.algorithm, options, float(step.lr), int(step.count), step.first, step.seed)


def describe_options(
    algorithm: str,
    options: Mapping[str, Any],
    lr: float,
    count: int,
    first: bool = False,
    seed: int | None = None,
) -> tuple[Any, ...]:
    """Return the numbers of a step with these options; a missing option has the default of `Step`."""
    get, sparse_adam = options.get, algorithm == "sparse_adam"
    weight_decay, max_norm = get("weight_decay", 0.0), get("max_norm")
    decay = 0 if sparse_adam or not weight_decay else DECAY_NUMBERS[get("decay", "none")]
    before = sparse_adam or get("eps_placement") == "before_bias_correction"
    return (
        ALGORITHM_NUMBERS[algorithm],
        decay,
        get("nesterov", False),
        first,
        before,
        seed is not None,
        lr,
        lr / (1 + (count - 1) * get("lr_decay", 0.0)),
        get("eps", 0.0),
        -1.0 if get("maximize") else 1.0,
        weight_decay,
        get("momentum", 0.0),
        get("dampening", 0.0),
        get("eta", 0.0),
        *get("betas", (0.9, 0.999)),
        -1.0 if max_norm is None else max_norm,
        count,
        get("l1", 0.0),
        get("l2", 0.0),
        get("l2_shrinkage", 0.0),
        get("beta", 0.0),
        (seed or 0) & 0xFFFFFFFFFFFFFFFF,
    )
