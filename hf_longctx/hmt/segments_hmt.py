"""Reading one segment: what every layout shares."""

from dataclasses import replace
from typing import NamedTuple

import torch

from .memory_hmt import pad_front, recall_distance
from .rows_hmt import Chunk, Span


class Pass(NamedTuple):
    """A pass of the backbone: embeddings (B, P, d), and the tokens of the chunk whose logits are computed."""

    chunk: Chunk
    embeds: torch.Tensor
    span: Span

    @property
    def shape(self):
        """What passes must have in common to run together."""
        return self.embeds.shape[1], self.span.columns()


class Reading(NamedTuple):
    """What a pass over chunk n gives: logits of each row's tokens (n_b, V), or []; the summed loss, or the hidden
    states (n, d) and targets (n,) that it will be made of; and the recall."""

    n: int
    logits: list
    loss: torch.Tensor | None = None
    scored: tuple | None = None
    recall_scores: torch.Tensor | None = None
    recall_distance: torch.Tensor | None = None
    memory: torch.Tensor | None = None


class Segments:
    """Reads segments with the backbone and the memory of a model.

    Args:
        model: `HMTWrapper`.
    """

    def __init__(self, model):
        self.model, self.config, self.lm, self.memory = model, model.config, model.lm, model.memory

    def recall(self, state, query):
        """Recall from the bank and, if there are pages, from the best of them.

        Returns:
            prompt (B, 1, d), scores (B, c), distances (B,).
        """
        bank, valid, count = state.bank, state.valid, state.bank.shape[1]
        ages = torch.arange(count - 1, -1, -1, device=bank.device).expand(len(bank), -1)
        if state.pages is not None:
            looked_up = [pages.look_up(row) for pages, row in zip(state.pages, self.memory.direction(query))]
            width = max(len(paged_ages) for _, paged_ages in looked_up)
            paged = torch.stack([pad_front(x, width) for x, _ in looked_up])
            paged_ages = torch.stack([pad_front(x, width) for _, x in looked_up])
            counts = torch.tensor([len(x) for _, x in looked_up], device=bank.device)[:, None]
            paged_valid = torch.arange(width, device=bank.device) >= width - counts
            bank, valid = torch.cat([paged, bank], 1), torch.cat([paged_valid, valid], 1)
            ages = torch.cat([paged_ages + count, ages], 1)
        prompt, scores = self.memory.recall(query, bank, valid)
        return prompt, scores, recall_distance(scores, ages).masked_fill(~valid.any(1), 0)

    def close(self, state, chunk, memory, full):
        """The state after the segment of the `full` rows: its memory is in the bank, its last tokens are sensory."""
        config, pages = self.config, state.pages
        bank = torch.cat([state.bank, memory.to(state.bank)], 1)
        valid = torch.cat([state.valid, state.valid.new_ones(memory.shape[:2])], 1)
        kept = (config.memory_size or bank.shape[1]) if config.recall else config.memory_tokens
        if pages is not None:
            drops = [closes and segment >= kept for closes, segment in zip(full, chunk.segments)]
            # slice the *old* bank: a dropped memory must not keep this segment's autograd graph alive
            dropped = state.bank[:, :1]
            pages = tuple(row.append(x) if drop else row for row, x, drop in zip(pages, dropped, drops))
        sensory_ids = chunk.ids[:, config.segment_length - config.sensory_tokens :]
        closed = replace(
            state,
            pages=pages,
            bank=bank[:, -kept:],
            valid=valid[:, -kept:],
            sensory_ids=sensory_ids,
            sensory_mask=torch.ones_like(sensory_ids, dtype=torch.bool),
            opening_prompt=None,
            prompt=None,
        )
        state = closed.pick(full, state)
        if config.bptt_segments is not None:
            cut = [
                closes and (segment + 1) % config.bptt_segments == 0 for closes, segment in zip(full, chunk.segments)
            ]
            state = state.detach().pick(cut, state)
        return state

    def prompt(self, parameter, like):
        """A learned prompt (m, d) as embeddings for each row of `like` (B, ., d)."""
        return parameter.to(like).expand(len(like), -1, -1)

    def run_passes(self, passes, mask=None, kv_cache=None):
        """Run passes of one shape together: their `Reading`s, and the last hidden states (R, P, d)."""
        columns, targets = passes[0].span.columns(), None
        if passes[0].chunk.targets is not None:
            targets = torch.cat([one.span.gather(one.chunk.targets, columns) for one in passes])
        returned = [one.span.after(one.chunk.returned) for one in passes]
        kept = sorted({column for span in returned for column in span.columns()})
        embeds, scored = torch.cat([one.embeds for one in passes]), None
        if kept != columns and torch.is_grad_enabled() and self.lm.can_skip_logits(embeds.device):
            logits, hidden, loss = self.run(embeds, mask, kept, None, kv_cache)
            scored, columns = (hidden[:, columns].flatten(0, 1), targets.flatten()), kept
        else:
            logits, hidden, loss = self.run(embeds, mask, columns, targets, kv_cache, bool(kept))
        rows = [[]] * len(passes)
        if kept:
            rows = [span.rows(x, columns) for span, x in zip(returned, logits.chunk(len(passes)))]
        readings = [Reading(one.chunk.n, x) for one, x in zip(passes, rows)]
        return [readings[0]._replace(loss=loss, scored=scored), *readings[1:]], hidden

    def run(self, *arguments):
        """`_run_once`; with gradient checkpointing the backward pass computes it again."""
        if self.model.gradient_checkpointing and self.model.training and torch.is_grad_enabled():
            return self.model._gradient_checkpointing_func(self.run_once, *arguments)
        return self.run_once(*arguments)

    def run_once(self, embeds, mask=None, columns=(), targets=None, kv_cache=None, keep_logits=True):
        """Logits of `columns` (R, n, V) or None, last hidden state (R, P, d), summed loss over `targets` or None."""
        keep = torch.tensor(columns, device=embeds.device) if columns else None
        logits, hidden = self.lm.run(embeds, mask, keep, kv_cache, self.config.recall_mode == "causal")
        loss = None
        if columns and targets is not None:
            sizes = {"vocab_size": logits.shape[-1], "num_items_in_batch": 1}
            loss = self.model.loss_function(logits=logits, labels=None, shift_labels=targets, **sizes)
        return logits if keep_logits else None, hidden, loss

    def cached_positions(self, state, chunk):
        """Positions in the cache of the open segments; 0 where there is no usable cache, and they are read again.

        That is so after loading a state, when the same state is continued a second time (the first call has extended
        the cache), with gradients, with backbones that cannot continue, after a recall or a border in any row, and
        where the rows get unequal numbers of new tokens.
        """
        if torch.is_grad_enabled() or len({n - m for n, m in zip(chunk.counts, chunk.read)}) > 1:
            return 0
        unchanged = state.kv_cache is not None and state.kv_cache.get_seq_length() == state.kv_length
        return state.kv_length if unchanged else 0


__all__ = ["Pass", "Reading", "Segments"]
