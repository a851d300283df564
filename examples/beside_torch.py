"""Use torch's LRScheduler, GradScaler and compiler beside fused tables."""

import torch
from torch.optim.lr_scheduler import LambdaLR

from keyedopt.fused import Adam, EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad


def batch(step: int) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Return the features and labels of a step."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 4, (16,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.randint(0, 100, (int(offsets[-1]),), generator=draw)
    return {"item": (values, offsets)}, torch.rand(16, 1, generator=draw)


def train(compiled: bool) -> tuple[list[float], torch.Tensor]:
    """Return the learning rates of the table in each step, and the table."""
    torch.manual_seed(0)
    table = EmbeddingBagConfig(100, 8, name="item", feature_names=["item"])
    bags = EmbeddingBagCollection([table], RowWiseAdagrad, {"lr": 0.1})
    tower = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    forward = torch.compile(tower, backend="aot_eager") if compiled else tower
    dense = Adam(tower.parameters(), lr=0.01)
    # The scheduler sets the learning rate that the next backward pass uses for the table.
    schedulers = [LambdaLR(each, lambda step: 0.5**step) for each in (bags.fused_optimizer, dense)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rates = []
    for step in range(3):
        features, labels = batch(step)
        rates.append(bags.fused_optimizer.param_groups[0]["lr"])
        dense.zero_grad()
        pooled = bags(features)["item"]
        # Tables are updated in the backward pass, before `scaler.step` can unscale their gradients: give the
        # tower the scaled loss, and the tables the unscaled gradient of their output.
        leaf = pooled.detach().requires_grad_()
        loss = torch.nn.functional.mse_loss(forward(leaf), labels)
        scaler.scale(loss).backward()
        pooled.backward(leaf.grad / scaler.get_scale())
        bags.fused_optimizer.step()  # has nothing left to do; a scheduler expects the call
        scaler.step(dense)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
    return rates, bags.embedding_bags["item"].weight.detach()


def main() -> None:
    """Train with and without the compiler, and compare."""
    rates, eager = train(compiled=False)
    assert rates == [0.1, 0.05, 0.025]
    _, compiled = train(compiled=True)
    torch.testing.assert_close(compiled, eager)
    print(f"learning rates of the table: {rates}; the compiled run agrees")


if __name__ == "__main__":
    main()
