"""Compute the cumulative sum of log f and look up the previous token, for all requests of one vLLM step.

A step computes the next tokens of R requests. They are concatenated to a flat batch of N tokens. Each request
continues from the state of its last computed token. The states are in a cache that uses the block table of the keys.
Each group of `tokens_per_state` tokens has one float32 row. The row stores the last state that was written to it.

A request can also continue from a token that another request computes in the same step. This happens with prefix
caching: as soon as vLLM schedules a request that fills a block, other requests can share this block. Requests form a
chain if each continues from the one before. We add up the sums along each chain.

The sums are float64, also in the cache, and are rounded when they are folded into the keys. Token-by-token decoding
therefore gives the same sum as a single prefill, for example after preemption. In float32, adding the -0.003 of an
open gate to a sum of -70000 would not change the sum.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


TOKENS_PER_STATE = 16  # the smallest block size of vLLM's attention backends; requests share whole blocks only


@dataclass
class Step:
    """Indices (int64) of each token's predecessor and cache position. They are the same for all layers.

    Attributes:
        request: index of each token's request, (N,).
        first: index (0..N-1) of each request's first token, (R,).
        writes: block and row for each token's state, (N,) each. If a later token writes to the same row, the block
            and row of the earlier token are 0. Block 0 is vLLM's unused null block.
        reads: block and row of the state from which each request continues, (R,) each.
        begins: whether each request starts without a cached token, (R, 1) bool.
        in_batch: whether each request continues from a token of this batch, (R, 1) bool.
        parent: index (0..N-1) of the token from which each request continues, (R,); arbitrary if not in_batch.
        chains: (R, R) float64, see `ancestors`; may be None if no request continues from this batch.
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
    """Describe a batch as a `Step` without GPU synchronization. Shapes depend only on R and N.

    Args:
        query_start: cumulative query lengths, starting at 0, (R + 1,), strictly ascending.
        seq_lens: number of tokens of each request, including those in this batch, (R,).
        block_table: indices of the cache blocks of each request, (R, blocks).
        slots: slot of each token in the cache, (N,). A slot is block * block_size + offset in the block. Tokens that
            are not cached have the slot -1: padding at the end of the batch, and rejected drafts at the end of a
            request.
        block_size: number of tokens per block, a multiple of tokens_per_state.
        tokens_per_state: number of tokens that share a row of the state.
    """
    boundaries, slots = query_start.long(), slots.long()
    every = torch.arange(len(seq_lens), device=slots.device)
    request = torch.bucketize(torch.arange(len(slots), device=slots.device), boundaries, right=True) - 1
    request = request.clamp(max=len(every) - 1)
    computed = seq_lens.long() - boundaries.diff()  # (R,)
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
    if slots.device.type != "cpu" or in_batch.any():  # on a GPU, in_batch.any() would synchronize
        chains = ancestors(request[parent], in_batch)
    return Step(
        request,
        boundaries[:-1],
        places(torch.where(state != next_state, state, 0).clamp(min=0)),
        places(last_slot // tokens_per_state),
        ((computed <= 0) | in_batch)[:, None],
        in_batch[:, None],
        parent,
        chains,
    )


def ancestors(up, has_one):
    """Return (R, R) float64. Entry [i, j] is 1 if request j is i or an ancestor of i, else 0.

    `up`, (R,), is the index of each request's parent. `has_one`, (R,), is True if the request has a parent. Each
    iteration doubles the number of levels of ancestors that a row includes.
    """
    rows = torch.eye(len(up), dtype=torch.float64, device=up.device)
    for _ in range((len(up) - 1).bit_length()):
        rows = rows + has_one[:, None] * rows[up]
        has_one, up = has_one & has_one[up], up[up]
    return rows


def carry(step: Step, states, log_f, tokens, c, before) -> None:
    """Add up the gates, look up the previous tokens, and store the states for the next step.

    Args:
        step: indices of the predecessors and cache positions, from `read_step`.
        states: state cache, (blocks, rows per block, `row_width`) float32 with any strides; updated in place.
        log_f: log of the forget gates, (M, G) fp32, M >= N.
        tokens: keys and values of each token for the token shift, (M, S) of any dtype; S may be 0.
        c: output for the cumulative sum of each token, c_t = log f_1 + ... + log f_t, (M, G) fp32.
        before: output for the keys and values of the previous token, (M, S); zeros for the first token of a sequence.

    We compute one cumulative sum over the whole batch. For each request, we subtract the sum over earlier requests.
    """
    n, gates = len(step.request), log_f.shape[1]
    log_f, tokens, before = log_f[:n].double(), tokens[:n], before[:n]
    one_each = n == len(step.first)  # one token per request, as in decoding; decoding is launch-bound
    total = log_f if one_each else log_f.cumsum(0)
    others = total[:0] if one_each else (total - log_f)[step.first]  # (R, G), sum over earlier requests
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
    """Return the number of float32 elements in a row of the state. The number is even.

    A row contains the float64 sums, followed by the keys and values of a token.
    """
    return 2 * gates + -(-shifted * dtype.itemsize // 8) * 2
