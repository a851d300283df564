"""Accumulate micro-batches: two equal one batch of their sum, also through a checkpoint between them."""

import copy

import torch

from keyedopt.fused import AccumulateAdam, Adam, EmbeddingBagCollection, EmbeddingBagConfig

FIRST = {"item": (torch.tensor([0, 3]), torch.tensor([0, 1, 2]))}
SECOND = {"item": (torch.tensor([3, 4]), torch.tensor([0, 1, 2]))}
BOTH = {"item": (torch.tensor([0, 3, 3, 4]), torch.tensor([0, 1, 2, 3, 4]))}


def tables(**window: object) -> EmbeddingBagCollection:
    """Return one table; with a window its updates wait for the last micro-batch."""
    torch.manual_seed(0)
    table = EmbeddingBagConfig(5, 4, name="item", feature_names=["item"])
    return EmbeddingBagCollection([table], AccumulateAdam if window else Adam, {"lr": 0.1, **window})


def backward(bags: EmbeddingBagCollection, features: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run a backward pass."""
    bags(features)["item"].square().sum().backward()


def main() -> None:
    """Compare one large batch, two micro-batches, and two with a checkpoint between them."""
    large, small = tables(), tables(use_accumulate=True, accumulate_step=2)
    before = small.embedding_bags["item"].weight.detach().clone()
    backward(large, BOTH)
    backward(small, FIRST)
    assert torch.equal(small.embedding_bags["item"].weight, before)  # the window is not complete
    saved = copy.deepcopy((small.state_dict(), small.fused_optimizer.state_dict()))
    backward(small, SECOND)
    torch.testing.assert_close(small.state_dict(), large.state_dict())

    resumed = tables(use_accumulate=True, accumulate_step=2)
    resumed.load_state_dict(saved[0])
    resumed.fused_optimizer.load_state_dict(saved[1])
    backward(resumed, SECOND)
    assert torch.equal(resumed.embedding_bags["item"].weight, small.embedding_bags["item"].weight)
    print("two micro-batches equal one batch; the resumed window has the same bits")


if __name__ == "__main__":
    main()
