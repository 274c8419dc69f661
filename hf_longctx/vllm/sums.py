"""The running sum of log f, and the token before, for the requests of one step of vLLM all at once.

A step computes the next tokens of R requests, which lie one after another in a flat batch of N tokens. Each goes on
from its last computed token, whose state lies in a cache that has the block table of the keys: a row of float32 for
`tokens_per_state` tokens, of which it holds the last one that was written.

That token may also be in the same batch: prefix caching hands out a block as soon as another request is scheduled to
fill it. Such requests form chains, along which sums have to be added up before any of them is stored.

Sums are float64, also in the cache, and are rounded when they go to the keys. So a request that was decoded token by
token has the sum of one that reads them all at once, as it does after preemption: a float32 of -70000 does not change
by the 0.003 of an open gate, however often it is added.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


TOKENS_PER_STATE = 16  # the smallest block of vLLM's attention backends: prefixes are shared by whole blocks


@dataclass
class Step:
    """The token that each token goes on from, the same for all layers. Indices are int64.

    Attributes:
        request: of each token, (N,).
        first: index of each request's first token, (R,).
        writes: block and place in it of the state that a token leaves, (N,) each; 0, 0, in vLLM's null block, which
            nobody reads, where a later token leaves it.
        reads: block and place of the state that a request goes on from, (R,) each.
        begins: whether a request goes on from no token in the cache, (R, 1) bool.
        in_batch: whether it goes on from a token of this batch, (R, 1) bool.
        parent: index of this token in the batch, (R,).
        chains: (R, R) float64, 1 for a request and those that it goes on from, one after another; None if no request
            goes on from another.
    """

    request: torch.Tensor
    first: torch.Tensor
    writes: tuple[torch.Tensor, torch.Tensor]
    reads: tuple[torch.Tensor, torch.Tensor]
    begins: torch.Tensor
    in_batch: torch.Tensor
    parent: torch.Tensor
    chains: torch.Tensor | None


def read_step(query_start, seq_lens, block_table, slots, block_size: int, tokens_per_state: int) -> Step:
    """Describe a batch as a `Step`, without waiting for a GPU, and with shapes that depend on R and N only.

    Args:
        query_start: index of each request's first token, and the number of all, (R + 1,), strictly rising.
        seq_lens: tokens of each request, computed ones and those of this batch, (R,).
        block_table: its blocks in the cache, (R, blocks).
        slots: where each token goes in the cache, block * block_size + place, (N,); -1 for those that are not kept:
            padding at the end of the batch, and rejected drafts at the end of a request.
        block_size: tokens of a block, a multiple of tokens_per_state.
    """
    borders, slots = query_start.long(), slots.long()
    every = torch.arange(len(seq_lens), device=slots.device)
    request = torch.bucketize(torch.arange(len(slots), device=slots.device), borders, right=True) - 1
    request = request.clamp(max=len(every) - 1)
    computed = seq_lens.long() - borders.diff()  # (R,)
    last = (computed - 1).clamp(min=0)
    last_slot = block_table[every, last // block_size].long() * block_size + last % block_size

    def places(state):
        return state // (block_size // tokens_per_state), state % (block_size // tokens_per_state)

    state = slots // tokens_per_state
    next_state = F.pad(state[1:], (0, 1), value=-2)
    ascending, order = slots.sort()
    parent = order[torch.searchsorted(ascending, last_slot).clamp(max=len(slots) - 1)]
    in_batch = (slots[parent] == last_slot) & (computed > 0)
    chains = None
    if slots.device.type != "cpu" or in_batch.any():  # a GPU would have to be waited for
        chains = ancestors(request[parent], in_batch)
    return Step(
        request,
        borders[:-1],
        places(torch.where(state != next_state, state, 0).clamp(min=0)),
        places(last_slot // tokens_per_state),
        ((computed <= 0) | in_batch)[:, None],
        in_batch[:, None],
        parent,
        chains,
    )


def ancestors(up, has_one):
    """Return (R, R) float64 with a 1 for each request and all its ancestors; `up` (R,) is its parent, if it `has_one`.

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
        states: the cache, (blocks, places, `row_width`) float32 with any strides.
        log_f: log of the forget gates, (M, G) fp32, M >= N.
        tokens: what the token shift keeps of each token, (M, S) of any dtype; S may be 0.
        c: the result, c_t = log f_1 + ... + log f_t of each token, (M, G) fp32.
        before: the result, `tokens` one token earlier, 0 where there is none, (M, S).

    The sum over the batch runs on over all requests, and what precedes each of them is subtracted.
    """
    n, gates = len(step.request), log_f.shape[1]
    log_f, tokens, before = log_f[:n].double(), tokens[:n], before[:n]
    one_each = n == len(step.first)  # decoding, where every operation counts
    total = log_f if one_each else log_f.cumsum(0)
    others = total[:0] if one_each else (total - log_f)[step.first]  # (R, G), of the requests before
    rows = states[step.reads].masked_fill_(step.begins, 0.0)  # (R, width)
    past = rows[:, : 2 * gates].view(torch.float64)  # (R, G)
    if step.chains is not None:
        within = total[step.parent]
        within = within if one_each else within - others[step.request[step.parent]]
        past = step.chains @ torch.where(step.in_batch, within, past)
    sums = total + (past if one_each else (past - others)[step.request])
    c[:n] = sums
    left = sums.view(torch.float32)
    if tokens.shape[1]:
        kept = rows[:, 2 * gates : 2 * gates + tokens.shape[1] * tokens.itemsize // 4].view(tokens.dtype)
        if step.chains is not None:
            kept = torch.where(step.in_batch, tokens[step.parent], kept)
        if not one_each:
            before[1:] = tokens[:-1]
        before[step.first] = kept
        left = torch.cat([left, tokens.contiguous().view(torch.float32)], dim=1)
    states[..., : left.shape[1]][step.writes] = left


def row_width(gates: int, shifted: int, dtype: torch.dtype) -> int:
    """Count the float32 numbers of a row, an even number: sums in float64, then what the token shift keeps."""
    return 2 * gates + -(-shifted * dtype.itemsize // 8) * 2
