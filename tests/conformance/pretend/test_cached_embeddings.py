"""Tables on the host with a cache of rows on another device."""

import pytest
import torch

import keyedopt.conformance.pretend  # noqa: F401 - registers npu
from keyedopt import fused, reference


@pytest.mark.parametrize("library", [reference, fused], ids=["reference", "fused"])
def test_rows_go_to_the_device_and_come_back(library):
    config = library.EmbeddingBagConfig(50, 4, "t", torch.float32, ["f"])
    arguments = library.RowWiseAdagrad, {"lr": 0.1}
    torch.manual_seed(0)
    plain = library.EmbeddingBagCollection([config], *arguments)
    torch.manual_seed(0)
    cached = library.CachedEmbeddings(library.EmbeddingBagCollection, [config], 8, *arguments, device="npu")
    for _ in range(8):
        values, offsets = torch.randperm(50)[:6], torch.tensor([0, 2, 6])
        plain({"f": (values, offsets)})["f"].square().sum().backward()
        found = cached({"f": (values.to("npu"), offsets.to("npu"))})["f"]
        assert found.device.type == "npu"
        found.square().sum().backward()
    with pytest.raises(ValueError, match="must be where the cache is, on npu:0, not on cpu"):
        cached({"f": (values, offsets)})
    for one, other in ((plain, cached), (plain.fused_optimizer, cached.fused_optimizer)):
        torch.testing.assert_close(one.state_dict(), other.state_dict())
    state = cached.fused_optimizer.state_dict()["state"]["t.weight"]
    assert {cached.embedding_bags["t"].weight.device.type, state["t.momentum1"].device.type} == {"cpu"}
