"""Calls of FBGEMM's lookup operators, whose backward pass is an update.

CPU and CUDA use the same lookup, except for the arguments that hold weights and states.
"""

import importlib
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.fbgemm.arguments import Arguments

SUM = 0  # FBGEMM's number of the pooling mode; a mean is a sum with weights
FLOAT32 = 0  # FBGEMM's number of the dtype of outputs
ON_DEVICE, ON_HOST = 0, 3  # FBGEMM's numbers of memory locations
_INVOKERS = "fbgemm_gpu.split_embedding_codegen_lookup_invokers"


@cache
def missing() -> str:
    """Return why FBGEMM's lookups cannot be used; empty if they can."""
    try:
        import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401  # registers them

        given = set(invoker("lookup_args").CommonArgs._fields)
    except (ImportError, OSError, AttributeError) as error:
        return f"FBGEMM cannot be imported ({error})"
    unknown = given - _COMMON
    return f"this version of FBGEMM has unknown arguments: {', '.join(sorted(unknown))}" * bool(unknown)


def invoker(name: str) -> Any:
    """Return FBGEMM's module that calls a lookup operator."""
    return importlib.import_module(f"{_INVOKERS}.{name}")


def look_up(weight: Tensor, values: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
    """Return the weighted sums of bags of rows, (B, D) float32.

    Args:
        weight: (R, D), contiguous.
        values: (N,) int64.
        offsets: (B + 1,) int64.
        factors: (N,) float32, or None for 1.
    """
    with torch.inference_mode(False), torch.no_grad():  # FBGEMM's operators have no inference mode on the CPU
        return _looked_up(weight, values, offsets, factors, Arguments("sgd", 0.0, 0, negate=False), ())


def update(
    weight: Tensor,
    states: Sequence[Tensor],
    values: Tensor,
    offsets: Tensor,
    factors: Tensor | None,
    grad: Tensor,
    asked: Arguments,
) -> None:
    """Update rows and states in place, by the gradient (B, D) of what `look_up` returns."""
    with torch.enable_grad():
        pooled = _looked_up(weight, values, offsets, factors, asked, states)
        torch.autograd.backward([pooled], [(-grad if asked.negate else grad).contiguous()])


#: The known fields of `CommonArgs`.
_COMMON = {
    *("placeholder_autograd_tensor", "dev_weights", "host_weights", "uvm_weights", "lxu_cache_weights"),
    *("weights_placements", "weights_offsets", "D_offsets", "total_D", "max_D", "hash_size_cumsum"),
    *("total_hash_size_bits", "indices", "offsets", "pooling_mode", "indice_weights"),
    *("feature_requires_grad", "lxu_cache_locations", "uvm_cache_stats", "output_dtype", "vbe_metadata"),
    *("is_experimental", "use_uniq_cache_locations_bwd", "use_homogeneous_placements"),
    *("learning_rate_tensor", "info_B_num_bits", "info_B_mask"),
}


def _looked_up(
    weight: Tensor,
    values: Tensor,
    offsets: Tensor,
    factors: Tensor | None,
    asked: Arguments,
    states: Sequence[Tensor],
) -> Tensor:
    args, device = invoker("lookup_args"), weight.device
    rows, width = weight.shape
    shape = _shape(rows, width, device)
    dev, host = _placed(weight)
    common = {
        **shape,
        "placeholder_autograd_tensor": torch.empty(0, device=device, requires_grad=True),
        "dev_weights": dev,
        "host_weights": host,
        "uvm_weights": weight.new_empty(0),
        "lxu_cache_weights": weight.new_empty(0, 0),
        "indices": values,
        "offsets": offsets,
        "indice_weights": factors,
        "learning_rate_tensor": torch.tensor(asked.rate, dtype=torch.float32),
        "vbe_metadata": args.VBEMetadata(None, None, None),
    }
    momenta = [_momentum(args, state, shape) for state in states]
    options = {name: kind() for name, kind in _kinds(args).items()} | dict(asked.options)
    more = {"iter": asked.iteration} if len(states) == 2 else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*marked as\\s+EXPERIMENTAL")
        found: Tensor = invoker(f"lookup_{asked.lookup}").invoke(
            args.CommonArgs(**{name: common[name] for name in args.CommonArgs._fields}),
            args.OptimizerArgs(**options),
            *momenta,
            mixed_D=False,
            **more,
        )
    return found


@cache
def _kinds(args: Any) -> dict[str, type]:
    """Return the types of optimizer arguments; a call without arguments returns the value for off."""
    return dict(args.OptimizerArgs.__annotations__)


def _placed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of a tensor as FBGEMM's arguments for device and host; one is empty."""
    flat = tensor.detach().view(-1)
    return (flat.new_empty(0), flat) if flat.is_cpu else (flat, torch.empty(0, dtype=flat.dtype))


def _momentum(args: Any, state: Tensor, shape: dict[str, Any]) -> Any:
    dev, host = _placed(state)
    places, begins = shape["weights_placements"], shape["weights_offsets"]
    return args.Momentum(dev=dev, host=host, uvm=dev.new_empty(0), offsets=begins, placements=places)


@lru_cache(maxsize=4096)
def _shape(rows: int, width: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments for a table with one feature; cached, because they are copied to CUDA."""
    place = ON_HOST if device.type == "cpu" else ON_DEVICE
    columns = torch.tensor([0, width], dtype=torch.int32, device=device)
    bits, mask = torch.ops.fbgemm.get_infos_metadata(columns, 1, 1)
    return {
        "weights_placements": torch.tensor([place], dtype=torch.int32, device=device),
        "weights_offsets": torch.zeros(1, dtype=torch.int64, device=device),
        "D_offsets": columns,
        "total_D": width,
        "max_D": width,
        "hash_size_cumsum": torch.tensor([0, rows], device=device),
        "total_hash_size_bits": rows.bit_length(),
        "lxu_cache_locations": torch.empty(0, dtype=torch.int32, device=device),
        "pooling_mode": SUM,
        "feature_requires_grad": None,
        "uvm_cache_stats": None,
        "output_dtype": FLOAT32,
        "is_experimental": False,
        "use_uniq_cache_locations_bwd": False,
        "use_homogeneous_placements": True,
        "info_B_num_bits": bits,
        "info_B_mask": mask,
    }
