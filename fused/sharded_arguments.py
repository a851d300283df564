"""The arguments of optimizers in the backward pass, as torchrec's `DistributedModelParallel` reads them."""

import importlib
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class ShardedArguments(dict[str, Any]):
    """The arguments of a keyedopt optimizer of one parameter.

    `DistributedModelParallel` knows only the classes of torch and torchrec. Before it looks up the class, it
    looks for FBGEMM's optimizer under the key ``optimizer`` of the arguments. When torchrec looks there, the
    arguments are replaced by those of FBGEMM's module for the same step; until then they are as given.

    Args:
        kind: the class of the optimizer.
        param: its parameter.
        given: its other arguments.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], param: Tensor, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._kind, self._param = kind, weakref.ref(param)

    def __contains__(self, key: object) -> bool:
        """Return whether an argument is there.

        Raises:
            ValueError: torchrec asks for FBGEMM's optimizer, and FBGEMM has no equal of the optimizer, or not
                on every device that is here; the message names `use_fbgemm_kernels`.
        """
        if key == "optimizer" and not super().__contains__(key) and "torchrec.distributed" in sys.modules:
            self._translate()
        return super().__contains__(key)

    def _translate(self) -> None:
        kernels = importlib.import_module("keyedopt.fused.torchrec_kernels")
        types = importlib.import_module("torchrec.distributed.utils")
        param = self._param()
        assert param is not None  # which is being sharded
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        try:
            found = [kernels.translated(self._kind, self, param, device) for device in devices]
        except ValueError as error:
            raise ValueError(
                f"DistributedModelParallel cannot take {self._kind.__name__} as it is: {error}. Call "
                "keyedopt.fused.use_fbgemm_kernels(model, device) first, where device is that of the tables"
            ) from error
        kind, options = found[-1]
        self.clear()
        self.update(options, optimizer=types.optimizer_type_to_emb_opt_type(kind))
