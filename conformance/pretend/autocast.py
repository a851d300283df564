"""Autocast on the pretend device: the operators that torch runs in half precision or in float32."""

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from keyedopt.conformance.pretend.devices import NAME

_KEY = "AutocastPrivateUse1"
_OTHERS = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
_HALF = "addbmm addmm addmv baddbmm bmm conv1d conv2d conv3d linear matmul mm mv"
_FLOAT32 = (
    "binary_cross_entropy_with_logits cosine_similarity cross_entropy_loss cumprod cumsum exp l1_loss "
    "layer_norm log log_softmax.int mse_loss nll_loss pow.Tensor_Scalar prod softmax.int sum sum.dim_IntList"
)


def register(library: torch.library.Library) -> None:
    """Register the operators that autocast changes in a library for aten."""
    for names, half in ((_HALF, True), (_FLOAT32, False)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(_cast, op, half), _KEY)


def _cast(op: Any, half: bool, *args: Any, **kwargs: Any) -> Any:
    """Run an operator with its numbers in the dtype of autocast, or in float32."""
    dtype = torch.get_autocast_dtype(NAME) if half else torch.float32

    def cast(value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if wide and value.device.type == NAME else value

    with torch._C._ExcludeDispatchKeyGuard(_OTHERS):
        return op(*tree_map(cast, args), **tree_map(cast, kwargs))
