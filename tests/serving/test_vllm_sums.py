"""Running sums and predecessors over steps of a paged cache, against those of each request by itself."""

import pytest
import torch

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
        return len(self.blocks) - 1

    def run(self, batch, padding=0):
        """Compute tokens [first, end) of each (request, first, end), and compare; the largest difference of c."""
        lengths = torch.tensor([0] + [end - first for _, first, end in batch])
        table = torch.zeros(len(batch), max(map(len, self.blocks)), dtype=torch.int32)
        for row, (request, _, _) in zip(table, batch):
            row[: len(self.blocks[request])] = torch.tensor(self.blocks[request])
        borders, ends = lengths.cumsum(0).int(), torch.tensor([end for _, _, end in batch]).int()
        n = int(borders[-1]) + padding
        slots = [
            self.blocks[request][i // BLOCK] * BLOCK + i % BLOCK
            for request, first, end in batch
            for i in range(first, end)
        ]
        slots = torch.tensor(slots + [-1] * padding)
        step = read_step(borders, ends, table, slots, BLOCK, self.tokens_per_state)
        log_f, tokens = (
            torch.cat(
                [x[request][first:end] for request, first, end in batch] + [x[0].new_zeros(padding, x[0].shape[1])]
            )
            for x in (self.log_f, self.tokens)
        )
        c, before = torch.full_like(log_f, torch.nan), torch.full_like(tokens, torch.nan)
        carry(step, self.states, log_f, tokens, c, before)
        expected = [self.log_f[request].double().cumsum(0)[first:end] for request, first, end in batch]
        previous = [self.tokens[request].roll(1, 0) for request, _, _ in batch]
        for x in previous:
            x[0] = 0
        previous = torch.cat([x[first:end] for x, (_, first, end) in zip(previous, batch)])
        shift_is_right = torch.equal(before[: n - padding], previous)
        worst = (c[: n - padding] - torch.cat(expected)).abs().nan_to_num(nan=torch.inf).max().item()
        return worst, shift_is_right


def exact(result):
    """But for the rounding of the sum to float32."""
    worst, shift_is_right = result
    return shift_is_right and worst < 1e-5


@pytest.mark.parametrize("tokens_per_state", [16, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_in_chunks_of_any_size(dtype, tokens_per_state):
    requests = Requests(dtype, tokens_per_state)
    lengths = [1, 15, 16, 17, 64, 100, 161]
    done = {requests.add(length): 0 for length in lengths}
    while any(done[r] < length for r, length in enumerate(lengths)):
        batch = []
        for request, length in enumerate(lengths):
            end = min(length, done[request] + int(torch.randint(0, 40, (), generator=requests.random)))
            if end > done[request]:
                batch.append((request, done[request], end))
                done[request] = end
        if batch:
            assert exact(requests.run(batch, padding=3))


def test_one_token_of_each_request():
    """Decode where one request continues from the token that another computes in the same step."""
    requests = Requests()
    first = requests.add(40)
    for length, prefix in ((50, None), (60, None), (33, first)):
        requests.add(length, prefix_of=prefix, prefix=32 if prefix == first else 0)
    requests.run([(0, 0, 31), (1, 0, 20), (2, 0, 1)])
    assert exact(requests.run([(0, 31, 32), (1, 20, 21), (2, 1, 2), (3, 32, 33)]))
    assert exact(requests.run([(0, 32, 33), (1, 21, 22), (2, 2, 3)]))


def chain(order):
    """Each request has the first 32 tokens more in common with the one before; all begin in one step."""
    requests = Requests()
    first = requests.add(40)
    for _ in range(4):
        requests.add(
            len(requests.log_f[-1]) + 32, prefix_of=len(requests.blocks) - 1, prefix=len(requests.blocks) * 32
        )
    assert first == 0
    batch = [(request, 32 * request, len(requests.log_f[request])) for request in range(5)]
    return requests, [batch[i] for i in order]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]], ids=str)
def test_requests_of_one_step_may_go_on_from_each_other(order):
    requests, batch = chain(order)
    assert exact(requests.run(batch))
    longer = [requests.add(len(requests.log_f[4]) + 7, prefix_of=4, prefix=160)]
    assert exact(requests.run([(longer[0], 160, 167)]))  # from what they have stored


def test_copies_of_a_prompt_go_on_from_the_first():
    requests = Requests()
    prompt = requests.add(70)
    copies = [requests.add(70, prefix_of=prompt, prefix=64) for _ in range(3)]
    assert exact(requests.run([(prompt, 0, 70), *((copy, 64, 70) for copy in copies)]))


@pytest.mark.parametrize("tokens_per_state, right", [(1, True), (16, False)])
def test_rejected_drafts_need_a_state_for_every_token(tokens_per_state, right):
    requests = Requests(tokens_per_state=tokens_per_state)
    requests.add(60)
    assert exact(requests.run([(0, 0, 40)]))
    assert exact(requests.run([(0, 40, 44)]))  # three of them are drafts, of which the last two are rejected
    assert exact(requests.run([(0, 42, 50)])) is right


def test_decoded_tokens_have_the_sum_of_a_prompt():
    """A float32 would stay where it is: half of its resolution is 0.004 there."""
    closed, opened = torch.full((600, GATES), -120.0), torch.full((600, GATES), -0.003)
    requests = Requests()
    requests.add(1200)
    requests.log_f[0] = torch.cat([closed, opened])
    requests.run([(0, 0, 600)])
    for i in range(600, 1200):
        worst, _ = requests.run([(0, i, i + 1)])
        assert worst <= 0.004
