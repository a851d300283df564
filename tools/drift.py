"""``python -m keyedopt.tools.drift`` prints how far tables drift from torchrec's, and torchrec from itself.

A model of users and items is trained three times on the same ratings: with torchrec's tables, with ours,
and with torchrec's whose weights begin one unit in the last place higher. The first two round sums in another
order; a training that amplifies this amplifies the third just as well.
"""

from typing import Any

import torch
import torchrec
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from keyedopt import fused

USERS, ITEMS, WIDTH, RATINGS, BATCH = 943, 1682, 16, 100_000, 640
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, fused.SGD, {"lr": 0.5}),
    "Adagrad": (torch.optim.Adagrad, fused.Adagrad, {"lr": 0.5}),
    "RowWiseAdagrad": (torchrec.optim.RowWiseAdagrad, fused.RowWiseAdagrad, {"lr": 0.5}),
}


def ratings() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return users, items, of which some are popular, and how each user rates each item."""
    draw = torch.Generator().manual_seed(0)
    users = torch.randint(USERS, (RATINGS,), generator=draw)
    items = (torch.rand(RATINGS, generator=draw).square() * ITEMS).long()
    tastes, kinds = (torch.randn(count, 8, generator=draw) for count in (USERS, ITEMS))
    return users, items, (tastes[users] * kinds[items]).sum(1) / 3 + torch.randn(RATINGS, generator=draw) / 2


def tables(module: Any) -> list[Any]:
    """Return the configurations of both tables, of torchrec or of keyedopt."""
    sizes = {"user": USERS, "item": ITEMS}
    return [
        module.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=WIDTH, name=name, feature_names=[name])
        for name, rows in sizes.items()
    ]


def train(bags: Any, steps: int, nudged: bool = False) -> torch.Tensor:
    """Train a tower with SGD above tables that are updated in the backward pass; return the tables."""
    torch.manual_seed(1)
    tower = torch.nn.Sequential(torch.nn.Linear(2 * WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    weights = [one for _, one in sorted(bags.state_dict().items())]
    with torch.no_grad():
        for one in weights:
            one.copy_(torch.randn(one.shape) * 0.3)
            if nudged:
                one.copy_(torch.nextafter(one, torch.full_like(one, torch.inf)))
    dense = torch.optim.SGD(tower.parameters(), lr=0.05)
    users, items, labels = ratings()
    for step in range(steps):
        now = slice(step * BATCH, (step + 1) * BATCH)
        values = torch.cat([users[now], items[now]])
        features = torchrec.KeyedJaggedTensor(["user", "item"], values, lengths=torch.ones_like(values))
        pooled = bags(features)
        dense.zero_grad()
        predicted = tower(torch.cat([pooled["user"], pooled["item"]], dim=1))[:, 0]
        torch.autograd.backward(torch.nn.functional.mse_loss(predicted, labels[now]))
        dense.step()
    return torch.cat([one.detach().flatten() for one in weights])


def drifts(name: str, steps: int = RATINGS // BATCH) -> tuple[float, float]:
    """Return the mean distances of the weights from torchrec's: keyedopt's, and those of the nudged one.

    The largest distance would be that of one weight: Adagrad divides its first gradient by itself, so a
    gradient that is nothing but rounding gives a step like any other.
    """
    theirs, ours, options = OPTIMIZERS[name]

    def upstream() -> Any:
        return FusedEmbeddingBagCollection(tables(torchrec), theirs, options, device=torch.device("cpu"))

    exact = train(upstream(), steps)
    other = train(fused.EmbeddingBagCollection(tables(fused), ours, options), steps)
    again = train(upstream(), steps, nudged=True)
    return float((other - exact).abs().mean()), float((again - exact).abs().mean())


def main() -> None:
    """Print both distances for each optimizer."""
    print("optimizer        keyedopt   torchrec, one unit away")
    for name in OPTIMIZERS:
        ours, theirs = drifts(name)
        print(f"{name:15}  {ours:8.1e}   {theirs:8.1e}")


if __name__ == "__main__":
    main()
