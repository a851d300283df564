"""Update the tables of torchrec's own collection in the backward pass, by keyedopt's row-wise Adagrad.

Needs torchrec. The module stays torchrec's; only the optimizer changes.
"""

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from keyedopt.fused import RowWiseAdagrad, apply_optimizer_in_backward


def main() -> None:
    """Take one backward pass, and compare with the optimizer's own step."""
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="item", feature_names=["item"])]
    bags, twin = EmbeddingBagCollection(tables), EmbeddingBagCollection(tables)
    twin.load_state_dict(bags.state_dict())
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})

    features = KeyedJaggedTensor(["item"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 1]))
    bags(features).values().square().sum().backward()  # updates the table
    assert all(param.grad is None for param in bags.parameters())

    optimizer = RowWiseAdagrad(twin.parameters(), lr=0.1)
    twin(features).values().square().sum().backward()
    optimizer.step()
    for mine, other in zip(bags.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)
    print("the backward pass did the optimizer's step")


if __name__ == "__main__":
    main()
