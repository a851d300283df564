"""Tables that torchrec would leave unquantized."""

from collections.abc import Mapping
from typing import Any


def refuse_quantization(spec: Any) -> None:
    """Raise a ValueError if a specification of `quantize_dynamic` asks for collections of tables.

    torchrec's quantization replaces modules of torchrec's classes, and ignores modules of other classes. Of
    all modules of a model it sets ``qconfig``, also if only dense layers are quantized; so whether tables are
    to be quantized shows only in the specification of the function that sets the attribute.

    Args:
        spec: its ``qconfig_dict``, by type of module; anything else is ignored.

    Raises:
        ValueError: a type is a collection of tables.
    """
    kinds = [key for key in spec if isinstance(key, type)] if isinstance(spec, Mapping) else []
    if any(hasattr(kind, "embedding_bag_configs") or hasattr(kind, "embedding_configs") for kind in kinds):
        raise ValueError(
            "torchrec quantizes only its own collections, so these tables would stay unquantized: quantize "
            "keyedopt.fused.as_torchrec(model) instead"
        )
