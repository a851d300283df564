"""What a rank sends in worlds of up to 1,000 ranks, which one process simulates."""

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keyedopt.conformance.suite.support.sharded import error_of

#: The numbers of ranks and of parameters.
WORLDS, PARAMETERS = (10, 100, 1000), (1, 100)


@pytest.mark.clause("SHARD-029")
@pytest.mark.cpu_only("its process group sends nothing")
@pytest.mark.needs("GradientClippingOptimizer", "KeyedOptimizerWrapper")
def test_traffic(impl: Any) -> dict[str, Any]:
    """Count the messages and bytes that a rank sends to clip and to load sharded parameters."""
    found: dict[str, Any] = {}
    for ranks in WORLDS:
        with Simulated(ranks):
            for count in PARAMETERS:
                optimizer = sharded(impl, ranks, count)
                load = functools.partial(optimizer.load_state_dict, optimizer.state_dict())
                for name, call in (("clip", optimizer.step), ("load", load)):
                    with Traffic() as sent:
                        problem = error_of(call)
                    at = f"{ranks} ranks, {count} parameters"
                    found.setdefault(name, {})[at] = problem or {
                        "messages": len(sent.sizes),
                        "bytes": sum(sent.sizes),
                    }
    return found


def sharded(impl: Any, ranks: int, count: int) -> Any:
    """Return a clipped optimizer of DTensors with one number on each rank, after one step."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", torch.arange(ranks))
    params = {}
    for number in range(count):
        param: Any = torch.nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
        param.grad = DTensor.from_local(torch.ones(1), mesh, [Shard(0)])
        params[f"p{number}"] = param
    keyed = impl.KeyedOptimizerWrapper(params, lambda given: torch.optim.Adagrad(given, lr=0.1))
    optimizer = impl.GradientClippingOptimizer(
        keyed,
        impl.GradientClipping.NORM,
        1.0,
        enable_global_grad_clip=True,
        param_to_pgs={param: [torch.distributed.group.WORLD] for param in params.values()},
    )
    optimizer.step()  # ranks may agree once
    return optimizer


class Simulated:
    """A default process group with these ranks; this process is the first, the others send what it sends."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed: Any = torch.distributed
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=self._ranks)

    def __exit__(self, *_: object) -> None:
        torch.distributed.destroy_process_group()


class Traffic(TorchDispatchMode):
    """Notes the bytes that this rank gives to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            given = [args[1], args[0]]  # of some collectives the outputs come first
            tensors = next(each for each in map(listed, given) if each)
            self.sizes.append(sum(tensor.nbytes for tensor in tensors))
        return func(*args, **(kwargs or {}))


def listed(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]
