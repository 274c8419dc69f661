"""Rows of gates, shifts and norms of heads on the ranks of tensor parallelism."""

import pytest
import torch
from torch import nn

from hf_longctx.vllm.shards import sharded


@pytest.mark.parametrize(
    "rows, ranks, expected",
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),  # ranks share a key head
        (1, 2, [[0], [0]]),
        (6, 2, [[0, 1, 2], [3, 4, 5]]),  # a norm of heads: several rows of each
    ],
)
def test_ranks_load_the_rows_of_their_heads(rows, ranks, expected):
    loaded = torch.arange(float(rows))[:, None].expand(rows, 3)
    for rank, row_numbers in enumerate(expected):
        module = sharded(nn.Linear(3, len(row_numbers), bias=False), rank, ranks)
        module.weight.weight_loader(module.weight, loaded)
        assert module.weight[:, 0].tolist() == row_numbers
        assert not module.weight.requires_grad


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3, 3), (4, 3)])
def test_weights_of_other_shapes_are_refused(shape):
    module = sharded(nn.Linear(3, 2, bias=False), 0, 1)
    with pytest.raises(ValueError, match=r"config\.json requires"):
        module.weight.weight_loader(module.weight, torch.ones(shape))
