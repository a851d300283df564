"""Train a small DLRM: fused tables, a clipped and warmed-up tower; save it, and resume it bit for bit.

Needs torchrec. The model, the input and the configurations are torchrec's.
"""

import tempfile
from pathlib import Path

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from keyedopt.fused import (
    Adam,
    CombinedOptimizer,
    EmbeddingBagCollection,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

FEATURES = ("user", "item", "shop")


def build() -> tuple[DLRM, CombinedOptimizer]:
    """Return the model, and one optimizer for all of it."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(num_embeddings=1000, embedding_dim=16, name=name, feature_names=[name])
        for name in FEATURES
    ]
    bags = EmbeddingBagCollection(tables, RowWiseAdagrad, {"lr": 0.05})
    model = DLRM(bags, 8, [32, 16], [32, 1])
    tower = {name: param for name, param in model.named_parameters() if "embedding_bags" not in name}
    dense = GradientClippingOptimizer(
        WarmupOptimizer(
            KeyedOptimizerWrapper(tower, lambda params: Adam(params, lr=0.01)),
            [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)],
            lr=0.01,
        ),
        clipping=GradientClipping.NORM,
        max_gradient=1.0,
    )
    return model, CombinedOptimizer([("tables", bags.fused_optimizer), ("tower", dense)])


def batch(step: int, size: int = 64) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Return the dense and sparse input and the labels of a step."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURES) * size,), generator=draw)
    values = torch.randint(0, 1000, (int(lengths.sum()),), generator=draw)
    dense = torch.rand(size, 8, generator=draw)
    labels = (dense.sum(dim=1, keepdim=True) > 4).float()
    return dense, KeyedJaggedTensor(list(FEATURES), values, lengths=lengths), labels


def train(model: DLRM, optimizer: CombinedOptimizer, steps: range) -> float:
    """Train, and return the last loss."""
    for step in steps:
        dense, sparse, labels = batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(dense, sparse), labels)
        loss.backward()  # updates the tables
        optimizer.step()  # updates the tower
    return loss.item()


def main() -> None:
    """Train, save, train on; resume from the checkpoint, and compare."""
    model, optimizer = build()
    first = train(model, optimizer, range(1))
    train(model, optimizer, range(1, 20))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        last = train(model, optimizer, range(20, 40))

        resumed, again = build()
        again.init_state()  # a fresh optimizer has no state to load into
        saved = torch.load(path, weights_only=False)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert train(resumed, again, range(20, 40)) == last
    for name, value in model.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    print(f"loss {first:.3f} to {last:.3f}; the resumed run has the same bits")


if __name__ == "__main__":
    main()
