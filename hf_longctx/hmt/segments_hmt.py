"""Reading one segment: what every layout shares. The layouts are `multi_pass_hmt.py`, `single_pass_hmt.py` and
`no_recurrence_hmt.py`.

A layout has a method `read`. It takes a state and the `Chunk`s of a call (`packing_hmt.py`), lays out embeddings as
`Pass`es, runs them (`run_passes`), recalls prompts (`prompt_for`), puts memories into the state (`close`), and returns
the new state with a `Reading` for each pass. `HMTWrapper.forward` puts logits and loss together from the readings.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from .backbone_hmt import fork
from .memory_hmt import mean_memory, pad_front, where_rows
from .packing_hmt import Chunk, Span


class Pass(NamedTuple):
    """A pass of the backbone: embeddings (B, P, d), and the tokens of the chunk whose logits are computed."""

    chunk: Chunk
    embeds: torch.Tensor
    spans: tuple[Span, ...]

    @property
    def shape(self):
        """What passes must have in common to run together."""
        return self.embeds.shape[1], self.columns(self.spans)

    def columns(self, spans):
        return sorted({column for span in spans for column in span.columns()})

    def targets(self, columns):
        """What the tokens in `columns` predict, (B, n); -100 where a row has no token."""
        return torch.stack([span.gather(self.chunk.targets, columns) for span in self.spans]).amax(0)


class Recall(NamedTuple):
    """What a segment recalled: the weights (B, c); `ends` (B, c) of the memories, as in `HMTState`; the distance (B,)
    in segments to that with the largest weight, 0 in a row without a recall."""

    weights: torch.Tensor
    ends: torch.Tensor
    distance: torch.Tensor

    def of_rows(self, rows):
        return Recall(*(where_rows(rows, x[:, None], None)[:, 0] for x in self))


class Reading(NamedTuple):
    """What a pass over chunk n gives: for each row the logits of neighbouring tokens, (n, V) each, or [], or what they
    will be made of, hidden states (n, d); the summed loss, or what it will be made of, hidden states (n, d) and
    targets (n,); the recall; the memory."""

    n: int
    logits: list
    loss: torch.Tensor | None = None
    scored: tuple | None = None
    recall: Recall | None = None
    memory: torch.Tensor | None = None


class Segments:
    """Reads segments with the backbone and the memory of a model.

    Args:
        model: `HMTWrapper`.
        output_recall: whether readings hold a `Recall`; those of n segments have up to n * n / 2 weights.
        defer_head: whether readings hold last hidden states in place of logits.
    """

    def __init__(self, model, output_recall=False, defer_head=False):
        self.model, self.config, self.lm, self.memory = model, model.config, model.lm, model.memory
        self.output_recall, self.defer_head = output_recall, defer_head

    def at_once(self, state):
        """How many segments go through the backbone together, where they need no memory."""
        return max(1, self.config.summary_batch // len(state.bank))

    def prompt_for(self, state, chunk, query):
        """The prompt of a segment (B, m, d), and its `Recall` or None.

        Without memories it is `initial`, without a query the latest memory, and there is no recall. In a query (B, 1,
        d), zeros are a row that has none.
        """
        if state.bank.shape[1] == 0:
            # a copy: an optimizer step must not change a state
            return self.prompt(self.memory.initial, state.bank).clone(), None
        latest = self.memory.or_initial(*state.latest(self.config.memory_tokens))
        if query is None:
            return latest, None
        prompt, recall = self.recall(state, chunk, query)
        return torch.where(query.any(2, keepdim=True), prompt, latest), recall

    def recall(self, state, chunk, query):
        """Recall from the bank and, if there are pages, from the best of them: prompt (B, 1, d); `Recall` or None."""
        bank, ends, of_all = state.bank, state.ends, ()
        length = self.config.segment_length
        begins = length * torch.tensor(chunk.segments, device=bank.device)[:, None]
        if state.pages is not None:
            paged, numbers, of_all = self.look_up(state, query)
            bank, ends = torch.cat([paged, bank], 1), torch.cat([length * (numbers + 1), ends], 1)
        prompt, weights = self.memory.recall(query, bank, ends > 0, *of_all)
        if not self.output_recall:
            return prompt, None
        distance = 1 + (begins - ends.gather(1, weights.argmax(1, keepdim=True))).squeeze(1) // length
        return prompt, Recall(weights, ends, distance * (ends > 0).any(1))

    def look_up(self, state, query):
        """The embeddings of the best pages (B, c, d), the numbers of their segments (B, c), -1 where a row has fewer,
        and the origin and the number of all memories, as `HMTMemory.recall` takes them."""
        pages, bank = state.pages, state.bank.to(state.pages[0].sums.dtype)
        sums = torch.stack([row.sums.sum(0, keepdim=True) for row in pages])
        counts = torch.tensor([row.count for row in pages], device=bank.device)
        origin, count = mean_memory(bank, state.valid, sums, counts)

        def score(tags, i):
            row = slice(i, i + 1)
            return self.memory.scores(query[row], tags[None], origin[row], count[row]).squeeze(0)

        looked_up = [row.look_up(partial(score, i=i)) for i, row in enumerate(pages)]
        width = max(len(x) for x, _ in looked_up)
        embeddings = torch.stack([pad_front(x, width) for x, _ in looked_up])
        numbers = torch.stack([pad_front(x + 1, width) for _, x in looked_up]) - 1
        # the gradient of the origin reaches the embeddings that are attended to
        total = sums + (embeddings - embeddings.detach()).to(sums).sum(1, keepdim=True)
        return embeddings, numbers, mean_memory(bank, state.valid, total, counts)

    def close(self, state, chunk, memory, full):
        """The state after the segment of the `full` rows: its memory is in the bank, its last tokens are sensory."""
        config, pages = self.config, state.pages
        bank = torch.cat([state.bank, memory.to(state.bank)], 1)
        begins = torch.tensor(chunk.segments, device=bank.device)[:, None].expand(memory.shape[:2])
        ends = torch.cat([state.ends, (begins + 1) * config.segment_length], 1)
        kept = (config.memory_size or bank.shape[1]) if config.recall else config.memory_tokens
        if pages is not None:
            drops = [closes and segment >= kept for closes, segment in zip(full, chunk.segments)]
            # slice the *old* bank: a dropped memory must not keep this segment's autograd graph alive
            dropped = zip(state.bank[:, :1], state.valid[:, :1])
            pages = tuple(row.append(*x) if drop else row for row, x, drop in zip(pages, dropped, drops))
        sensory_ids = chunk.ids[:, config.segment_length - config.sensory_tokens :]
        closed = replace(
            state,
            pages=pages,
            bank=bank[:, -kept:],
            ends=ends[:, -kept:],
            sensory_ids=sensory_ids,
            sensory_mask=torch.ones_like(sensory_ids, dtype=torch.bool),
            opening_prompt=None,
            prompt=None,
        )
        state = closed.where_rows(full, state)
        if config.bptt_segments is not None:
            cut = [
                closes and (segment + 1) % config.bptt_segments == 0 for closes, segment in zip(full, chunk.segments)
            ]
            state = state.detach().where_rows(cut, state)
        return state

    def prompt(self, parameter, like):
        """A learned prompt (m, d) as embeddings for each row of `like` (B, ., d)."""
        return parameter.to(like).expand(len(like), -1, -1)

    def run_passes(self, passes, mask=None, kv_cache=None, visible=None):
        """Run passes of one shape together: their `Reading`s, the last hidden states (R, P, d), and the cache."""
        columns, targets = sorted({column for one in passes for column in one.columns(one.spans)}), None
        if passes[0].chunk.targets is not None:
            targets = torch.cat([one.targets(columns) for one in passes])
        returned = [[span.after(one.chunk.returned) for span in one.spans] for one in passes]
        kept = sorted({column for one, spans in zip(passes, returned) for column in one.columns(spans)})
        embeds, scored = torch.cat([one.embeds for one in passes]), None
        if kept != columns and torch.is_grad_enabled() and self.lm.can_skip_logits(embeds.device):
            logits, hidden, loss, kv_cache = self.run(embeds, mask, kept, None, kv_cache, visible)
            scored, columns = (hidden[:, columns].flatten(0, 1), targets.flatten()), kept
        elif self.defer_head:
            _, hidden, loss, kv_cache = self.run(embeds, mask, (), None, kv_cache, visible)
            logits = hidden[:, kept]
        else:
            logits, hidden, loss, kv_cache = self.run(embeds, mask, columns, targets, kv_cache, visible, bool(kept))
        rows = [[]] * len(passes)
        if kept:
            several = zip(returned, logits.chunk(len(passes)))
            rows = [[*zip(*(span.rows(x, columns) for span in spans))] for spans, x in several]
        readings = [Reading(one.chunk.n, x) for one, x in zip(passes, rows)]
        return [readings[0]._replace(loss=loss, scored=scored), *readings[1:]], hidden, kv_cache

    def run(self, *arguments):
        """`_run_once`; with gradient checkpointing the backward pass computes it again."""
        if self.model.gradient_checkpointing and self.model.training and torch.is_grad_enabled():
            return self.model._gradient_checkpointing_func(self.run_once, *arguments)
        return self.run_once(*arguments)

    def run_once(self, embeds, mask=None, columns=(), targets=None, kv_cache=None, visible=None, keep_logits=True):
        """Logits of `columns` (R, n, V) or None, last hidden state (R, P, d), summed loss over `targets` or None, and
        the continued cache or None; `kv_cache` itself stays as it is."""
        keep = torch.tensor(columns, device=embeds.device) if columns else None
        kv_cache = None if kv_cache is None else fork(kv_cache)
        skip_padding = self.config.recall_mode != "paper"
        logits, hidden = self.lm.run(embeds, mask, keep, kv_cache, skip_padding, visible)
        loss = None
        if columns and targets is not None:
            sizes = {"vocab_size": logits.shape[-1], "num_items_in_batch": 1}
            loss = self.model.loss_function(logits=logits, labels=None, shift_labels=targets, **sizes)
        return logits if keep_logits else None, hidden, loss, kv_cache


__all__ = ["Pass", "Reading", "Recall", "Segments"]
