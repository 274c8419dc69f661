"""The running sum of log f, and the token before, for the requests of one step of vLLM all at once.

A step computes the next tokens of R requests, which lie one after another in a flat batch of N tokens. Each goes on
from its last computed token, whose state lies in a cache that has the block table of the keys: a row of float32 for
`tokens_per_state` tokens, of which it holds the last one that was written.

That token may also be in the same batch: prefix caching hands out a block as soon as another request is scheduled to
fill it. Such requests form chains, along which sums have to be added up before any of them is stored.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Step:
    """Which token goes on from which, the same for all layers. Indices are int64.

    Attributes:
        request: of each token, (N,).
        start: index of the first token of its request, (N,).
        writes: block and place in it of the state that a token leaves, (N,) each; 0, 0, in vLLM's null block, which
            nobody reads, where a later token leaves it.
        reads: block and place of the state that a request goes on from, (R,) each.
        in_cache, in_batch: whether a request goes on from a token in the cache, or in this batch, (R,) bool.
        parent: index of this token in the batch, (R,).
        chains: (R, R) float64, 1 for a request and those that it goes on from, one after another; None if no request
            goes on from another.
    """

    request: torch.Tensor
    start: torch.Tensor
    writes: tuple[torch.Tensor, torch.Tensor]
    reads: tuple[torch.Tensor, torch.Tensor]
    in_cache: torch.Tensor
    in_batch: torch.Tensor
    parent: torch.Tensor
    chains: torch.Tensor | None


def read_step(query_start, seq_lens, block_table, tokens: int, block_size: int, tokens_per_state: int) -> Step:
    """The `Step` of a batch; without waiting for a GPU, and with shapes that depend on R and N only.

    Args:
        query_start: index of each request's first token, and the number of all, (R + 1,).
        seq_lens: tokens of each request, computed ones and those of this batch, (R,).
        block_table: its blocks in the cache, (R, blocks).
        tokens: N, which may be larger than `query_start[-1]`: padding at the end belongs to no request.
        block_size: tokens of a block, a multiple of tokens_per_state.
    """
    borders, requests = query_start.long(), len(seq_lens)
    index = torch.arange(tokens, device=borders.device)
    is_padding = index >= borders[-1]
    request = (torch.bucketize(index, borders, right=True) - 1).clamp(max=requests - 1)
    start = borders[request]
    computed = seq_lens.long() - borders.diff()  # (R,)
    position = torch.where(is_padding, 0, computed[request] + index - start)
    last = (computed - 1).clamp(min=0)

    def slots(request, position):
        return block_table[request, position // block_size].long() * block_size + position % block_size

    def places(state):
        return state // (block_size // tokens_per_state), state % (block_size // tokens_per_state)

    slot = torch.where(is_padding, -1, slots(request, position))
    state = torch.where(is_padding, -1, slot // tokens_per_state)
    next_state = F.pad(state[1:], (0, 1), value=-2)
    last_slot = slots(torch.arange(requests, device=index.device), last)
    is_parent = (last_slot[:, None] == slot) & (computed > 0)[:, None]  # (R, N)
    in_batch, parent = is_parent.any(1), is_parent.int().argmax(1)
    chains = None
    if index.device.type != "cpu" or in_batch.any():  # a GPU would have to be waited for
        chains = ancestors(request[parent], in_batch)
    return Step(
        request,
        start,
        places(torch.where(state != next_state, state, 0).clamp(min=0)),
        places(last_slot // tokens_per_state),
        (computed > 0) & ~in_batch,
        in_batch,
        parent,
        chains,
    )


def ancestors(up, has_one):
    """(R, R) float64 with a 1 for each request and all its ancestors; `up` (R,) is the next one, if it `has_one`.

    Each round doubles how far up a row reaches.
    """
    rows = torch.eye(len(up), dtype=torch.float64, device=up.device)
    for _ in range((len(up) - 1).bit_length()):
        rows = rows + has_one[:, None] * rows[up]
        has_one, up = has_one & has_one[up], up[up]
    return rows


def carry(step: Step, states, log_f, tokens, c, before) -> None:
    """Sum up the gates, hand each token the one before it, and store what the next step goes on from.

    Args:
        states: the cache, (blocks, places, width) float32 with any strides.
        log_f: log of the forget gates, (M, G) fp32, M >= N.
        tokens: what the token shift keeps of each token, (M, S) of any dtype; S may be 0.
        c: the result, c_t = log f_1 + ... + log f_t of each token, (M, G) fp32.
        before: the result, `tokens` one token earlier, 0 where there is none, (M, S).

    The batch is summed in float64: its sum runs on over all requests, and the start of each is subtracted.
    """
    n, gates = len(step.request), log_f.shape[1]
    log_f, tokens, before = log_f[:n].double(), tokens[:n], before[:n]
    rows = states[step.reads]  # (R, width)
    total = log_f.cumsum(0)
    within = total - (total[step.start] - log_f[step.start])  # the sum since the request's first token here
    past = rows[:, :gates].double().masked_fill(~step.in_cache[:, None], 0.0)  # (R, G)
    if step.chains is not None:
        past = step.chains @ torch.where(step.in_batch[:, None], within[step.parent], past)
    c[:n] = within + past[step.request]
    left = c[:n]
    if tokens.shape[1]:
        kept = unpack(rows[:, gates:], tokens).masked_fill(~step.in_cache[:, None], 0.0)
        kept = torch.where(step.in_batch[:, None], tokens[step.parent], kept)
        is_first = torch.arange(n, device=tokens.device) == step.start
        before.copy_(torch.where(is_first[:, None], kept[step.request], tokens.roll(1, 0)))
        left = torch.cat([left, pack(tokens)], dim=1)
    states[step.writes] = left


def packed_width(values: int, dtype: torch.dtype) -> int:
    """float32 numbers that hold the bytes of so many values."""
    return -(-values * dtype.itemsize // 4)


def pack(x):
    """The bytes of (N, S) values of any dtype as float32, (N, `packed_width`)."""
    spare = packed_width(x.shape[1], x.dtype) * 4 // x.dtype.itemsize - x.shape[1]
    return F.pad(x, (0, spare)).contiguous().view(torch.float32)


def unpack(rows, like):
    """Inverse of `pack`: (R, width) float32 to (R, S), in width and dtype those of `like`."""
    return rows.contiguous().view(like.dtype)[:, : like.shape[1]]
