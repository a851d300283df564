"""Train two tables and a tower with torchrec; `migrate_after.py` is the same script with keyedopt."""

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage


def train(steps: int = 5) -> dict[str, torch.Tensor]:
    """Return the weights after some steps."""
    tables = [
        EmbeddingBagConfig(num_embeddings=100, embedding_dim=8, name=name, feature_names=[name])
        for name in ("user", "item")
    ]
    bags = FusedEmbeddingBagCollection(tables, torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-8})
    tower = torch.nn.Linear(16, 1)
    dense = KeyedOptimizerWrapper(
        dict(tower.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.01)
    )
    dense = WarmupOptimizer(dense, [WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.1)], lr=0.01)
    dense = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=0.5)
    optimizer = CombinedOptimizer([bags.fused_optimizer(), ("tower", dense)])

    draw = torch.Generator().manual_seed(0)
    weights = {**bags.state_dict(), **tower.state_dict()}
    for weight in weights.values():
        weight.uniform_(-0.1, 0.1, generator=draw)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (64,), generator=draw)
        rows = torch.randint(0, 100, (int(lengths.sum()),), generator=draw)
        features = KeyedJaggedTensor(["user", "item"], rows, lengths=lengths)
        labels = torch.rand(32, 1, generator=draw)
        optimizer.zero_grad()
        logits = tower(bags(features).values())
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
    return weights


if __name__ == "__main__":
    print({name: float(weight.sum()) for name, weight in train().items()})
