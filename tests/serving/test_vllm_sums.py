"""Code that runs without vLLM. Sums and predecessors over steps of a paged cache equal those of each request alone."""

import random
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_longctx import vllm as plugin
from hf_longctx.vllm.shards import sharded
from hf_longctx.vllm.sums import carry, read_step, row_width


GATES, SHIFTED, BLOCK = 3, 6, 32


class Requests:
    """Requests that go through a cache of `BLOCK` tokens a block; each may begin with the blocks of another."""

    def __init__(self, dtype=torch.bfloat16, tokens_per_state=16, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.dtype, self.tokens_per_state = dtype, tokens_per_state
        width = row_width(GATES, SHIFTED, dtype)
        # a layer of several, as in a layout that keeps the layers of a block together
        self.states = torch.full((100, 2, BLOCK // tokens_per_state, width), torch.nan)[:, 1]
        self.free = iter(range(1, 100))
        self.log_f, self.tokens, self.blocks = [], [], []

    def add(self, length, prefix_of=None, prefix=0):
        log_f = -torch.rand(length - prefix, GATES, generator=self.random)
        tokens = torch.randn(length - prefix, SHIFTED, generator=self.random).to(self.dtype)
        shared = []
        if prefix_of is not None:
            log_f = torch.cat([self.log_f[prefix_of][:prefix], log_f])
            tokens = torch.cat([self.tokens[prefix_of][:prefix], tokens])
            shared = self.blocks[prefix_of][: prefix // BLOCK]
        self.log_f.append(log_f)
        self.tokens.append(tokens)
        self.blocks.append(shared + [next(self.free) for _ in range(-(-length // BLOCK) - len(shared))])

    def run(self, batch, padding=0):
        """Return the largest error of c in each (request, first, end), or inf if a token is wrong."""
        lengths = torch.tensor([0] + [end - first for _, first, end in batch])
        table = torch.zeros(len(batch), max(map(len, self.blocks)), dtype=torch.int32)
        for row, (request, _, _) in zip(table, batch):
            row[: len(self.blocks[request])] = torch.tensor(self.blocks[request])
        borders, ends = lengths.cumsum(0).int(), torch.tensor([end for _, _, end in batch]).int()

        def rows(x):
            return torch.cat([x[request][first:end] for request, first, end in batch])

        slots = [
            torch.arange(len(x)) % BLOCK + BLOCK * torch.tensor(y).repeat_interleave(BLOCK)[: len(x)]
            for x, y in zip(self.log_f, self.blocks)
        ]
        slots = F.pad(rows(slots), (0, padding), value=-1)
        step = read_step(borders, ends, table, slots, BLOCK, self.tokens_per_state)
        log_f, tokens = (F.pad(rows(x), (0, 0, 0, padding)) for x in (self.log_f, self.tokens))
        c, before = torch.full_like(log_f, torch.nan), torch.full_like(tokens, torch.nan)
        carry(step, self.states, log_f, tokens, c, before)
        sums = rows([x.double().cumsum(0) for x in self.log_f])
        previous = rows([F.pad(x, (0, 0, 1, -1)) for x in self.tokens])
        if not torch.equal(before[: len(previous)], previous):
            return torch.inf
        return (c[: len(sums)] - sums).abs().nan_to_num(nan=torch.inf).max().item()


EXACT = 1e-5  # up to the rounding of the sum to float32


@pytest.mark.parametrize("sizes", [[1], [0, 7, 200, 200]], ids=["decode", "chunks"])
@pytest.mark.parametrize("tokens_per_state", [16, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_of_any_schedule(dtype, tokens_per_state, sizes):
    """Requests arrive in any order and in chunks of any size. Most share their first blocks with another request."""
    pick = random.Random(f"{dtype} {tokens_per_state} {sizes}")
    requests, parents, done = Requests(dtype, tokens_per_state), [], []
    for i in range(10):
        parent = pick.choice([None, *range(i), *[i - 1] * i])
        shared = 0 if parent is None else len(requests.log_f[parent]) // BLOCK * BLOCK
        requests.add(shared + pick.choice([1, 17, 33, 40, 70]), parent, shared)
        parents.append((parent, shared))
        done.append(0)
    lengths, together = [len(x) for x in requests.log_f], 0
    while done != lengths:
        batch, before = [], list(done)
        for request, (parent, shared) in enumerate(parents):
            first = done[request] or shared
            last = min(lengths[request], first + pick.choice(sizes))
            if last > first and (parent is None or done[parent] >= shared):
                batch.append((request, first, last))
                done[request] = last
                together += parent is not None and before[parent] < first == shared
        pick.shuffle(batch)
        assert not batch or requests.run(batch, padding=pick.choice([0, 3])) < EXACT
    assert together


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 4, 5, 1, 3]], ids=str)
def test_requests_of_one_step_may_go_on_from_each_other(order):
    """Each begins with 32 tokens more of the one before."""
    requests = Requests()
    for i in range(6):
        requests.add(40 + 32 * i, *([i - 1, 32 * i] if i else []))
    assert requests.run([(i, 32 * i, 40 + 32 * i) for i in order]) < EXACT


@pytest.mark.parametrize("tokens_per_state, right", [(1, True), (16, False)])
def test_rejected_drafts_need_a_state_for_every_token(tokens_per_state, right):
    requests = Requests(tokens_per_state=tokens_per_state)
    requests.add(60)
    assert requests.run([(0, 0, 40)]) < EXACT
    assert requests.run([(0, 40, 44)]) < EXACT  # three of them are drafts, of which the last two are rejected
    assert (requests.run([(0, 42, 50)]) < EXACT) is right


def test_decoded_tokens_have_the_sum_of_a_prompt():
    """A float32 would stay where it is: half of its resolution is 0.004 there."""
    closed, opened = torch.full((600, GATES), -120.0), torch.full((600, GATES), -0.003)
    requests = Requests()
    requests.add(1200)
    requests.log_f[0] = torch.cat([closed, opened])
    requests.run([(0, 0, 600)])
    for i in range(600, 1200):
        assert requests.run([(0, i, i + 1)]) <= 0.004


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


# --- the plugin does not stop a vLLM that it does not support, which serves other models ---


@pytest.mark.parametrize(
    "release, found", [("0.32.0", "ModelRegistry"), ("0.41.2", "the installed version is vLLM 0.41"), ("dev", "dev")]
)
def test_another_vllm_is_a_warning(monkeypatch, caplog, release, found):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
    caplog.set_level("WARNING", plugin.logger.name)  # an engine of another test has set ERROR
    monkeypatch.setattr(plugin.logger, "handlers", [caplog.handler])  # vLLM's loggers do not propagate
    monkeypatch.setattr(plugin.logger, "propagate", False)
    plugin.register()
    (message,) = caplog.messages
    assert "requires vLLM 0.32 or 0.33" in message and found in message and "Other models are not affected" in message
