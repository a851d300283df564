"""Where torchrec places tables: FBGEMM's `EmbeddingLocation`, by name."""

from typing import Any

import torch

#: What `EmbeddingLocation` calls the memory of the host, and that of the device.
HOST, DEVICE = "HOST", "DEVICE"


def check_location(location: Any, device: torch.device | str | None) -> None:
    """Check that tables are where `location` says.

    Args:
        location: FBGEMM's `EmbeddingLocation`, as torchrec's fused collections take it, or None.
        device: of the tables.

    Raises:
        ValueError: the location does not go with the device, or is not supported.
    """
    if location is None:
        return
    name = getattr(location, "name", location)
    kind = torch.device("cpu" if device is None else device).type
    if name not in (HOST, DEVICE):
        raise ValueError(
            f"location must be HOST or DEVICE, not {location!r}: CachedEmbeddings has tables on the host and "
            "a cache of their rows on a device"
        )
    if kind != "meta" and (kind == "cpu") != (name == HOST):
        wanted = "the device 'cpu'" if name == HOST else "an accelerator as the device"
        raise ValueError(f"location={name} requires {wanted}, not {device!r}")
