"""Hierarchical Memory Transformer (HMT): segment recurrence with memory recall around any causal LM.

He et al., "HMT: Hierarchical Memory Transformer for Long Context Language Processing", arXiv 2405.06067. A text is cut
into segments of L' new tokens. Every segment is one short pass of the backbone over

    [prompt, the last k tokens of the previous segment, the segment's tokens, prompt]

and the hidden state at the closing prompt becomes the segment's *memory embedding*. The prompt of a segment is
recalled from the memories so far: a *summary pass* over its first j tokens gives a query that attends to them. Cost
grows linearly with the text, and an `HMTState` of fixed size carries everything from segment to segment. Memories
beyond that size are dropped, or go to pages where a recall still finds them (`pages_hmt.py`).

Two ways to use the recall
--------------------------
`recall_mode="paper"` does what is written above. But a prompt that depends on the first j tokens then stands *before*
them: the model sees a summary of the very tokens it is asked to predict. Its scores on them are too good, and it
cannot generate them. `score_from=config.summary_length` leaves those tokens out of the loss.

`recall_mode="causal"` (default) uses each prompt only once its query is known. From token j on, a segment is read as
above: these logits, and all memories, are exactly the paper's. The first j tokens get their logits from a shorter pass

    [opening prompt, k sensory tokens, tokens 0..j-1]

whose opening prompt is recalled with the latest query that is complete when the segment begins, that of the previous
segment; the memories by then include the previous segment's own. So no position sees a later token, and nothing is
lost but what the beginning of a segment cannot know. The price is the extra pass. No memory comes out of the extra
pass, so those of several segments go through the backbone together, and a call that returns no logits before token j
(a prompt that is only read) runs none. Generation does the same step by step: after j tokens of a segment the recall
is made, and the segment is read again under its recalled prompt. Segments 0 and 1 have at most one memory and nothing
to choose from, so one pass serves all their tokens.

Padding: in the causal mode each row has segment borders of its own, and is read, scored and continued as if it stood
alone (`rows_hmt.py`). The paper mode reads padding where it stands: it keeps the memories of padding and shows padded
sensory tokens, as the official code does.
"""

from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput, cached_file
from transformers.utils.generic import can_return_tuple

from .backbone_hmt import Backbone
from .checks_hmt import check_generation, check_ids
from .configuration_hmt import HMTConfig, custom_model_class
from .memory_hmt import SIMILARITY_GAIN, HMTMemory, HMTState, pad_front, pick, recall_distance
from .pages_hmt import MemoryPages, PageFile
from .rows_hmt import Chunk, Rows, Span, align


@dataclass
class HMTOutput(ModelOutput):
    """Output of `HMTWrapper`.

    loss: scalar, with labels.
    logits: (B, T, V), or those of `logits_to_keep`; 0 on padding.
    state: `HMTState` after the last token, with `use_cache=True`.
    recall_scores: with `output_recall=True`, per segment the recall weights (B, c) over the memories, oldest first
        (those in the recalled pages, then the latest), 0 for a memory that a row does not have; None for a segment
        without a recall (the first one, or one whose query is not complete).
    recall_distance: with `output_recall=True`, (segments, B), long; 1 is the previous segment, 0 no recall.
    memories: with `output_recall=True`, the memory embeddings made in this call, each (B, m, d), 0 in a row without.
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    state: HMTState | None = None
    recall_scores: tuple | None = None
    recall_distance: torch.LongTensor | None = None
    memories: tuple | None = None


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


class HMTWrapper(PreTrainedModel, GenerationMixin):
    """A causal LM with sensory, short-term and long-term memory. Build one with `from_backbone`.

    Args:
        config: `HMTConfig`.
        backbone: a causal LM (or PEFT model around one); by default built, untrained, from `config.backbone_config`.

    Raises:
        ValueError: the backbone does not fit (`Backbone`), or the configuration does not fit it (`HMTConfig.check`).
    """

    config: HMTConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    reads_in_segments = True  # so the backbone's position limit is one for a segment, not for the input
    _is_stateful = True  # no assisted generation: a state cannot forget its last tokens
    _supports_sdpa = True  # the backbone checks its attention implementation itself
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: HMTConfig, backbone=None):
        built_here = backbone is None
        if built_here:
            if config.backbone_config is None:
                raise ValueError(
                    "HMTConfig has no backbone_config. Use HMTWrapper.from_backbone(model_or_name, config)."
                )
            config.check()
            custom = custom_model_class(config.backbone_config)
            build = custom._from_config if custom else AutoModelForCausalLM.from_config
            backbone = build(config.backbone_config)
        lm = Backbone(backbone)
        config.backbone_config = lm.model.config
        config.check()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(config.backbone_config, name, None))
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.gradient_checkpointing = False
        self.backbone = backbone
        self.lm = lm
        recall_dim = (config.recall_dim or lm.width) if config.recall else None
        self.memory = HMTMemory(lm.width, config.memory_tokens, recall_dim)
        self._versions = lm.versions()
        if not built_here:
            self.generation_config = deepcopy(lm.model.generation_config)
            for module in backbone.modules():  # loaded already, or set up by PEFT: not to be initialised again
                module._is_hf_initialized = True
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if not isinstance(module, HMTMemory):
            return super()._init_weights(module)
        std = self.lm.embedding_std()  # prompts stand among token embeddings, so they start at the same scale
        init.normal_(module.initial, std=std)
        if not self.config.recall:
            return
        if self.config.recall_init == "similarity":
            # Start at the prompt of a first segment: the summary of j tokens then equals the memory they would leave
            # as a segment.
            init.copy_(module.summary_prompt, module.initial)
            for projection in (module.wq, module.wk):
                init.copy_(projection, SIMILARITY_GAIN * torch.eye(*projection.shape))
        else:
            init.normal_(module.summary_prompt, std=std)
            bound = module.wq.shape[1] ** -0.5  # the start of nn.Linear
            for projection in (module.wq, module.wk):
                init.uniform_(projection, -bound, bound)

    # ------------------------------------------------------------------------------------------------ one forward

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        labels=None,
        state=None,
        use_cache=None,
        logits_to_keep=0,
        score_from=None,
        output_recall=False,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Read tokens, from the start of a text or from where `state` stopped.

        Args:
            input_ids: (B, T), long.
            attention_mask: (B, T), 0 on padding, which gets zeros as logits. In the causal mode padding may stand on
                either side, a row is read as if it stood alone, and with a state a row may have no token in a call. In
                the paper mode padding stands on the left.
            labels: (B, T), usually the input_ids, -100 where not scored; shifted here. The first token of a row in a
                call has no prediction.
            state: `HMTState` of an earlier call. In the causal mode any chunking gives the result of one piece; in the
                paper mode a chunk may not end within the first j tokens of a segment. If a backward pass has gone
                through the earlier call, give `state.detach()`: its graph is used up.
            use_cache: return the state. Default: True with a state, else False.
            logits_to_keep: only the last so many positions get logits; 0 is all. Or the positions, a long tensor (n,).
                The loss is that of all labels, whatever is kept: with 1, memory does not grow with T times the
                vocabulary, unless the head is no plain linear layer and training runs without gradient checkpointing.
            score_from: score only predictions made at this position of their segment or later.
            output_recall: return recall scores, distances and memories.
            num_items_in_batch: scored labels in the whole batch, over devices and accumulation steps (from `Trainer`).

        Returns:
            `HMTOutput`.

        Raises:
            ValueError: empty or badly shaped input, padding that cannot be handled exactly, a state of another model,
                an argument that is not used.
        """
        for name, value in kwargs.items():
            if value is not None and value is not False:
                raise ValueError(f"HMTWrapper does not use {name}; pass input_ids, attention_mask and labels.")
        use_cache = state is not None if use_cache is None else use_cache
        self._check_settings()
        self._check_loss_arguments(labels, logits_to_keep, score_from)
        state, mask = self._check_inputs(input_ids, attention_mask, labels, state, use_cache)
        tokens, length = input_ids.shape[1], self.config.segment_length
        first = self._first_position(logits_to_keep, tokens)
        targets, n_scored, n_labelled = self._targets(labels, mask, state, score_from)
        rows = Rows.of(state, input_ids, mask, targets, length)
        chunks = rows.chunks(length, first)

        late, early, first_halves = [], [], []
        group_size = max(1, self.config.summary_batch // len(input_ids))
        offload = self.config.offload_activations and torch.is_grad_enabled()
        with torch.autograd.graph.save_on_cpu() if offload else nullcontext():
            for chunk, query in zip(chunks, self._recall_queries(state, chunks)):
                state, reading, first_half = self._read_segment(state, chunk, query, use_cache)
                late.append(reading)
                first_halves += first_half
                if len(first_halves) == group_size or chunk is chunks[-1]:
                    early += self._read_first_halves(first_halves)
                    first_halves = []
        readings = sorted([*early, *late], key=lambda reading: reading.n)  # a stable order: before token j comes first
        pieces = [
            [x.logits[row] for x in readings if x.logits and len(x.logits[row])] for row in range(len(input_ids))
        ]
        del early
        logits = rows.restore(pieces, first, tokens, self.memory.initial.new_zeros(0, self.config.vocab_size))
        if isinstance(logits_to_keep, torch.Tensor):
            logits = logits[:, logits_to_keep.to(logits.device) - first]
        result = HMTOutput(logits=logits)
        if labels is not None:
            result.loss = self._loss(readings, n_scored, n_labelled, num_items_in_batch)
        if use_cache:
            open_ids, open_mask = rows.open(length)
            lengths = tuple(begun + n for begun, n in zip(rows.begun, rows.lengths))
            result.state = replace(state, open_ids=open_ids, open_mask=open_mask, lengths=lengths)
        if output_recall:
            no_recall = torch.zeros_like(input_ids[:, 0])
            distances = [no_recall if x.recall_distance is None else x.recall_distance for x in late]
            result.recall_scores = tuple(x.recall_scores for x in late)
            result.recall_distance = torch.stack(distances)
            result.memories = tuple(x.memory for x in late if x.memory is not None)
        return result

    def _recall_queries(self, state, chunks):
        """Yield the recall query of each chunk, (B, 1, d), or None for a chunk in which no row recalls.

        Summary passes see no memory, so those of several segments go through the backbone together.
        """
        j, queries = self.config.summary_length, {}
        group_size = max(1, self.config.summary_batch // len(state.bank))
        pending = [chunk.n for chunk in chunks if any(self._recalls(chunk))]
        for n in range(len(chunks)):
            if pending[:1] == [n]:
                group = [i for i in pending[:group_size] if i == n or chunks[i].ids.shape[1] >= j]
                del pending[: len(group)]
                ids = torch.cat([chunks[i].ids[:, :j] for i in group])
                mask = torch.cat([chunks[i].mask[:, :j] for i in group]) if state.padded else None
                queries.update(zip(group, self._summarize(ids, mask).chunk(len(group))))
            yield queries.pop(n, None)

    def _recalls(self, chunk):
        """Which rows make the recall of their segment in this call."""
        numbers = zip(chunk.segments, chunk.counts, chunk.read)
        return [self._has_recall(n, count) and not self._has_recall(n, read) for n, count, read in numbers]

    def _has_recall(self, segment, tokens):
        """Whether `segment` of a text makes a recall when its first `tokens` tokens are known."""
        if not self.config.recall or segment == 0:
            return False
        if self.config.recall_mode == "paper":
            return tokens > 0
        # Logits before token j do not need the recall. Only a full segment leaves a memory, which does.
        return tokens > self.config.summary_length or tokens == self.config.segment_length

    def _summarize(self, ids, mask=None):
        """H^sum (paper, sec. 3.2): the backbone on [H^T, E(ids), H^T], last position. (R, j) -> (R, 1, d)."""
        tokens = self.lm.embed(ids)
        prompt = self._prompt(self.memory.summary_prompt, tokens)
        if mask is not None:
            visible = mask.new_ones(len(ids), 1)
            mask = torch.cat([visible, mask, visible], 1)
        _, hidden, _ = self._run(torch.cat([prompt, tokens, prompt], 1), mask)
        return hidden[:, -1:].clone()

    def _read_segment(self, state, chunk, query, use_cache):
        """Read one segment of each row, or its tokens so far: sections 3.2 and 3.3 of the paper.

        Args:
            state: before this segment.
            chunk: the segment's tokens so far.
            query: (B, 1, d) or None.
            use_cache: whether a later call continues a segment that stays open.

        Returns:
            the state after it; the `Reading`; a list of the `Pass` that gives the logits before token j, or [].
        """
        config, j = self.config, self.config.summary_length
        scores, distance = None, None
        begins = [ongoing and not read for ongoing, read in zip(chunk.ongoing, chunk.read)]
        if any(begins):
            opening = self._opening_prompt(state)
            prompts = {name: pick(begins, opening, getattr(state, name)) for name in ("opening_prompt", "prompt")}
            state = replace(state, **prompts)
        if query is not None:
            rows = self._recalls(chunk)
            recalled, scores, distance = self._recall(state, query)
            scores, distance = (pick(rows, x[:, None], None)[:, 0] for x in (scores, distance))
            prompt, query = pick(rows, recalled, state.prompt), pick(rows, query, state.query)
            state = replace(state, prompt=prompt, query=query).without_kv_cache()

        first = chunk.returned if chunk.targets is None else chunk.read
        first_half = []
        if config.recall_mode == "causal":
            # segment 1 has one memory, so both prompts are equal: one pass is enough
            recalled = [n > 1 and self._has_recall(n, count) for n, count in zip(chunk.segments, chunk.counts)]
            stop = [max(a, min(j, n)) if late else a for a, n, late in zip(first, chunk.counts, recalled)]
            if stop != first:
                counts = [min(j, count) for count in chunk.counts]
                embeds, _, starts = self._layout(state, state.opening_prompt, chunk, counts)
                first_half.append(Pass(chunk, embeds, Span(first, stop, starts)))
            first = stop

        full = [count == config.segment_length for count in chunk.counts]
        stays_open = use_cache and not any(full)
        n_cached = self._cached_positions(state, chunk)
        if n_cached:
            kv_cache = state.kv_cache
            embeds, mask, starts = self._continue_layout(state, chunk, close=not stays_open)
        else:
            new_cache = stays_open and all(chunk.ongoing) and self.lm.continues and not torch.is_grad_enabled()
            kv_cache = DynamicCache(config=self.lm.model.config) if new_cache else None
            layout = (state, state.prompt, chunk, chunk.counts)
            embeds, mask, starts = self._layout(*layout, close=not stays_open, left=not new_cache)
        (reading,), hidden = self._run_passes([Pass(chunk, embeds, Span(first, chunk.counts, starts))], mask, kv_cache)

        memory = None
        if not stays_open:
            # indexing copies: a view would keep all hidden states alive
            end = torch.tensor([start + count for start, count in zip(starts, chunk.counts)], device=embeds.device)
            place = end[:, None] + torch.arange(config.memory_tokens, device=embeds.device)
            memory = hidden.gather(1, place[..., None].expand(-1, -1, hidden.shape[2]))
            memory = pick(full if use_cache else [count > 0 for count in chunk.counts], memory, None)
        if stays_open and kv_cache is not None:
            state = replace(state, kv_cache=kv_cache, kv_mask=mask, kv_length=n_cached + embeds.shape[1])
        else:
            state = state.without_kv_cache()
        if any(full):
            state = self._close(state, chunk, memory, full)
        return state, reading._replace(recall_scores=scores, recall_distance=distance, memory=memory), first_half

    def _recall(self, state, query):
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

    def _layout(self, state, prompt, chunk, counts, close=False, left=True):
        """[prompt, sensory tokens, tokens], and the prompt again with `close`.

        Args:
            state, prompt, chunk: of a segment, before it is read.
            counts: how many of its tokens each row reads.
            left: rows of unequal length stand at the left, where nothing sees the padding behind them; else at the
                right, so that a cache can grow.

        Returns:
            embeddings (B, P, d); mask (B, P), or None if no position sees padding; the column of each row's token 0.
        """
        config, width = self.config, max(counts)
        tokens, mask = self.lm.embed(chunk.ids[:, :width]), chunk.mask[:, :width]
        prompt, visible = prompt.to(tokens), mask.new_ones(len(tokens), config.memory_tokens)
        parts = 4 if close else 3
        embeds = torch.cat([prompt, self.lm.embed(state.sensory_ids), tokens, prompt][:parts], 1)
        mask = torch.cat([visible, state.sensory_mask, mask, visible][:parts], 1)
        starts = [config.memory_tokens + config.sensory_tokens * (segment > 0) for segment in chunk.segments]
        if state.padded:
            return embeds, mask, starts
        if set(counts) == {width} and set(starts) == {config.memory_tokens + state.sensory_ids.shape[1]}:
            return embeds, None, starts
        mask, embeds = align(mask, embeds, left=left)
        if left:
            return embeds, None, starts
        return embeds, mask, [embeds.shape[1] - count for count in counts]

    def _continue_layout(self, state, chunk, close):
        """As `_layout`, of the tokens behind those in the cache; the mask covers these too."""
        new_tokens = torch.arange(chunk.counts[0] - chunk.read[0], device=chunk.ids.device)
        place = torch.tensor(chunk.read, device=chunk.ids.device)[:, None] + new_tokens
        embeds, mask = self.lm.embed(chunk.ids.gather(1, place)), None
        if state.kv_mask is not None:
            mask = torch.cat([state.kv_mask, chunk.mask.gather(1, place)], 1)
        if close:
            prompt = state.prompt.to(embeds)
            embeds = torch.cat([embeds, prompt], 1)
            mask = None if mask is None else torch.cat([mask, mask.new_ones(prompt.shape[:2])], 1)
        return embeds, mask, [-n for n in chunk.read]

    def _read_first_halves(self, passes):
        """Run neighbouring passes of one shape together, and yield their `Reading`s."""
        for _, alike in groupby(passes, key=lambda one: one.shape):
            yield from self._run_passes(list(alike))[0]

    def _run_passes(self, passes, mask=None, kv_cache=None):
        """Run passes of one shape together: their `Reading`s, and the last hidden states (R, P, d)."""
        columns, targets = passes[0].span.columns(), None
        if passes[0].chunk.targets is not None:
            targets = torch.cat([one.span.gather(one.chunk.targets, columns) for one in passes])
        returned = [one.span.after(one.chunk.returned) for one in passes]
        kept = sorted({column for span in returned for column in span.columns()})
        embeds, scored = torch.cat([one.embeds for one in passes]), None
        if kept != columns and torch.is_grad_enabled() and self.lm.can_skip_logits(embeds.device):
            logits, hidden, loss = self._run(embeds, mask, kept, None, kv_cache)
            scored, columns = (hidden[:, columns].flatten(0, 1), targets.flatten()), kept
        else:
            logits, hidden, loss = self._run(embeds, mask, columns, targets, kv_cache, bool(kept))
        rows = [[]] * len(passes)
        if kept:
            rows = [span.rows(x, columns) for span, x in zip(returned, logits.chunk(len(passes)))]
        readings = [Reading(one.chunk.n, x) for one, x in zip(passes, rows)]
        return [readings[0]._replace(loss=loss, scored=scored), *readings[1:]], hidden

    def _opening_prompt(self, state):
        """The prompt that a segment opens with, before it has a recall of its own, (B, m, d)."""
        if state.bank.shape[1] == 0:
            return self._prompt(self.memory.initial, state.bank).clone()  # an optimizer step must not change a state
        if state.query is None:  # no recall at all, or one memory only: nothing to choose from
            return self.memory.or_initial(state.bank[:, -self.config.memory_tokens :], state.valid)
        return self._recall(state, state.query)[0]

    def _close(self, state, chunk, memory, full):
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

    def _prompt(self, parameter, like):
        """A learned prompt (m, d) as embeddings for each row of `like` (B, ., d)."""
        return parameter.to(like).expand(len(like), -1, -1)

    def _run(self, *arguments):
        """`_run_once`; with gradient checkpointing the backward pass computes it again."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(self._run_once, *arguments)
        return self._run_once(*arguments)

    def _run_once(self, embeds, mask=None, columns=(), targets=None, kv_cache=None, keep_logits=True):
        """Logits of `columns` (R, n, V) or None, last hidden state (R, P, d), summed loss over `targets` or None."""
        keep = torch.tensor(columns, device=embeds.device) if columns else None
        logits, hidden = self.lm.run(embeds, mask, keep, kv_cache, self.config.recall_mode == "causal")
        loss = None
        if columns and targets is not None:
            sizes = {"vocab_size": logits.shape[-1], "num_items_in_batch": 1}
            loss = self.loss_function(logits=logits, labels=None, shift_labels=targets, **sizes)
        return logits if keep_logits else None, hidden, loss

    def _cached_positions(self, state, chunk):
        """Positions in the cache of the open segments; 0 where there is no usable cache, and they are read again.

        That is so after loading a state, when the same state is continued a second time (the first call has extended
        the cache), with gradients, with backbones that cannot continue, after a recall or a border in any row, and
        where the rows get unequal numbers of new tokens.
        """
        if torch.is_grad_enabled() or len({n - m for n, m in zip(chunk.counts, chunk.read)}) > 1:
            return 0
        unchanged = state.kv_cache is not None and state.kv_cache.get_seq_length() == state.kv_length
        return state.kv_length if unchanged else 0

    def _targets(self, labels, mask, state, score_from):
        """What each position of the call predicts, (B, T), -100 where not scored; how many are scored and labelled."""
        if labels is None:
            return None, None, None
        length, real = self.config.segment_length, torch.ones_like(labels, dtype=torch.bool)
        if mask is not None and not state.padded:
            real = mask
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        both = real & torch.nn.functional.pad(real[:, 1:], (0, 1), value=False)
        targets = targets.masked_fill(~both, -100)
        n_labelled = (targets != -100).sum()
        if self.config.loss_scope == "last":
            to_the_end = real.flip(1).cumsum(1).flip(1)
            targets = targets.masked_fill(to_the_end > length + 1, -100)
        if score_from is not None:
            opened = torch.tensor([n % length for n in state.lengths], device=labels.device)
            place = (opened[:, None] + real.cumsum(1) - 1) % length  # in its segment
            targets = targets.masked_fill(place < score_from, -100)
        return targets, (targets != -100).sum(), n_labelled

    def _loss(self, readings, n_scored, n_labelled, num_items_in_batch):
        """Mean cross entropy of the scored labels; with `num_items_in_batch` this call's share of the batch's mean."""
        losses = [x.loss for x in readings if x.loss is not None]
        if scored := [x.scored for x in readings if x.scored is not None]:
            losses.append(self.lm.loss_without_logits(*map(torch.cat, zip(*scored))).float())
        loss = torch.stack(losses).sum()
        loss = loss / n_scored.clamp(min=1).to(loss)  # without any scored label the loss is 0, not nan
        if num_items_in_batch is not None:
            loss = loss * (n_labelled / num_items_in_batch).to(loss)
        if self.training and torch.distributed.is_available() and torch.distributed.is_initialized():
            # DDP needs a gradient of every parameter, and a text of one segment recalls nothing
            loss = loss + 0 * sum(p.sum() for p in self.memory.parameters())
        return loss

    def _check_inputs(self, input_ids, attention_mask, labels, state, use_cache):
        """The state to start from, and the mask as (B, T) bool or None if nothing is padding; or ValueError."""
        if input_ids is not None and not isinstance(input_ids, torch.Tensor):
            raise ValueError(
                f"input_ids is a {type(input_ids).__name__}; it must be a tensor: torch.tensor(input_ids)."
            )
        if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
            shape = None if input_ids is None else tuple(input_ids.shape)
            raise ValueError(f"input_ids has shape {shape}; it must be (batch, tokens) with at least one token.")
        for name, value in (("attention_mask", attention_mask), ("labels", labels)):
            if value is not None and value.shape != input_ids.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; it must be that of input_ids, {tuple(input_ids.shape)}, "
                    "the tokens of this call only."
                )
        vocab_size = len(self.get_input_embeddings().weight)
        if labels is not None:
            check_ids("labels", labels, vocab_size, ignored=-100)
        if state is None:
            state = self.new_state(len(input_ids), device=input_ids.device)
        else:
            self._check_state(state, len(input_ids))
        if attention_mask is None or attention_mask.all():
            check_ids("input_ids", input_ids, vocab_size)
            return state, None
        if not ((attention_mask == 0) | (attention_mask == 1)).all():
            raise ValueError(
                f"attention_mask holds {attention_mask.min()} to {attention_mask.max()}; it must be 1 on tokens and 0 "
                "on padding."
            )
        mask = attention_mask.bool()
        self._check_padding(mask, state, use_cache)
        check_ids("input_ids", input_ids[mask], vocab_size)
        return replace(state, padded=self.config.recall_mode == "paper"), mask

    def _check_settings(self):
        """Settings may have changed since the parameters were made."""
        self.config.check()
        if self.config.recall and not hasattr(self.memory, "wq"):
            raise ValueError(
                "config.recall is True, and this model was built without recall: it has no projections. Save it, and "
                "load it with HMTWrapper.from_pretrained(folder, recall=True)."
            )
        if self.config.memory_tokens != len(self.memory.initial):
            raise ValueError(
                f"config.memory_tokens is {self.config.memory_tokens}, and this model was built with "
                f"{len(self.memory.initial)}. Build a new model: HMTWrapper.from_backbone(model.backbone, config)."
            )

    def _check_loss_arguments(self, labels, logits_to_keep, score_from):
        if not isinstance(logits_to_keep, torch.Tensor) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep is {logits_to_keep}; it counts the last positions, 0 is all of them.")
        if labels is None and score_from is not None:
            raise ValueError(f"score_from is {score_from}, and it selects labels; pass labels, or leave it out.")
        last = self.config.segment_length - 1
        if score_from is not None and not 0 <= score_from <= last:
            raise ValueError(f"score_from is {score_from}; it is a position within a segment, 0 to {last}.")

    @staticmethod
    def _first_position(logits_to_keep, tokens):
        """The first of the call's `tokens` positions that gets logits; ValueError for a position outside the call."""
        if not isinstance(logits_to_keep, torch.Tensor):
            return max(0, tokens - logits_to_keep) if logits_to_keep else 0
        if logits_to_keep.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"logits_to_keep is a tensor of {logits_to_keep.dtype}; it must list positions as integers (of a mask "
                "over positions: mask.nonzero().squeeze(1))."
            )
        first, last = (-1, -1) if logits_to_keep.numel() == 0 else map(int, logits_to_keep.aminmax())
        if first < 0 or last >= tokens or logits_to_keep.dim() != 1:
            raise ValueError(
                f"logits_to_keep has shape {tuple(logits_to_keep.shape)} and reaches from {first} to {last}; as a "
                f"tensor it must be a list of positions of this call, 0 to {tokens - 1}."
            )
        return first

    def _check_state(self, state, rows):
        differing = {name: value for name, value in self._signature().items() if state.signature.get(name) != value}
        if differing:
            of_state = {name: state.signature.get(name) for name in differing}
            raise ValueError(
                f"The state belongs to another model or setting: it has {of_state}, this model {differing}. "
                "Its memories mean nothing here; start a new state."
            )
        if len(state.bank) != rows:
            raise ValueError(
                f"The state has {len(state.bank)} rows and input_ids {rows}; they must be the same texts."
            )
        config, open_tokens = self.config, state.position % self.config.segment_length
        incomplete_query = state.segment > 0 and 0 < open_tokens < config.summary_length
        if config.recall and config.recall_mode == "paper" and incomplete_query:
            raise ValueError(
                f"The state stops after {open_tokens} tokens of a segment, and recall_mode='paper' reads the first "
                f"{config.summary_length} before it predicts them: what was predicted so far would change. End chunks "
                "at multiples of segment_length, or use recall_mode='causal' (also to generate beyond a segment)."
            )

    def _check_padding(self, mask, state, use_cache):
        if not mask.any() or not (use_cache or mask.any(1).all()):
            raise ValueError("A row of attention_mask is all padding: there is nothing to read. Remove the row.")
        if (mask[:, 1:] > mask[:, :-1]).sum(1).add(mask[:, 0]).max() > 1:
            raise ValueError(
                "attention_mask has padding between tokens; padding must be on one side, best on the left."
            )
        if self.config.recall_mode == "causal":
            return
        if not self.lm.sees_padding:
            raise NotImplementedError(
                f"{type(self.lm.model).__name__} ignores the attention mask, so recall_mode='paper' would read padding "
                "as text. Use recall_mode='causal', rows of equal length, or batch size 1."
            )
        if not mask[:, -1].all() or (state.open_mask.any(1) & ~mask[:, 0]).any():
            raise ValueError(
                "The rows are padded on the right, and recall_mode='paper' would put padding into the query, the loss "
                "or the memory. Pad on the left: tokenizer.padding_side = 'left', or use recall_mode='causal'."
            )

    def new_state(self, batch_size=1, page_file=None, device=None):
        """The state before the first token. Calls without a state make it themselves.

        Args:
            batch_size: B.
            page_file: path of a file to keep the pages in, instead of CPU memory. It is overwritten.
            device: default that of the model.

        Raises:
            ValueError: a page file, but no pages.
        """
        config, device = self.config, self.device if device is None else device
        if page_file is not None and config.recalled_pages is None:
            raise ValueError(
                "page_file is where pages are kept, and this model has no pages; set config.recalled_pages, or leave "
                "page_file out."
            )
        dtype = self.lm.embed(torch.zeros(1, 1, dtype=torch.long, device=device)).dtype
        sizes, pages = (batch_size, self.lm.width, dtype, device), None
        if config.recalled_pages is not None:
            file = None if page_file is None else PageFile(page_file)
            pages = (MemoryPages.empty(*sizes[1:], config.page_size, config.recalled_pages, file),) * batch_size
        return HMTState.empty(*sizes, self._signature(), pages)

    def _signature(self):
        config = self.config
        names = ("segment_length", "sensory_tokens", "memory_size", "sum_fraction", "recall", "memory_tokens")
        return {
            "backbone": config.backbone_config.model_type,
            "vocab_size": config.vocab_size,
            "width": self.lm.width,
            "recall_mode": config.recall_mode,
            "pages": None if config.recalled_pages is None else [config.recalled_pages, config.page_size],
            **{name: getattr(config, name) for name in names},
        }

    # ---------------------------------------------------------------------------------------- generation, training

    def prepare_inputs_for_generation(
        self, input_ids, state=None, attention_mask=None, is_first_iteration=False, **kwargs
    ):
        """The whole prompt first (it may continue a `state`), then one new token at a time."""
        if is_first_iteration and attention_mask is not None:
            if not attention_mask.any(1).all():
                raise ValueError(
                    "A row of attention_mask is all padding: there is nothing to continue. Remove the row."
                )
            if not attention_mask[:, -1].all():
                raise ValueError(
                    "The rows are padded on the right, and generation would continue the padding. Pad on the left: "
                    "tokenizer.padding_side = 'left'."
                )
        if state is not None and not kwargs.get("use_cache", True):
            raise ValueError(
                "use_cache is False, and generation continues a state: only a state can hold the generated tokens. "
                "Leave use_cache at True, or generate from the whole text without a state."
            )
        if state is not None and not is_first_iteration:
            input_ids, attention_mask = input_ids[:, -1:], None
        options = {name: kwargs[name] for name in ("use_cache", "logits_to_keep") if name in kwargs}
        return {"input_ids": input_ids, "attention_mask": attention_mask, "state": state, **options}

    def _prepare_cache_for_generation(self, generation_config, *args, **kwargs):
        check_generation(generation_config)
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def generate(self, *args, **kwargs):
        """As in transformers. With `return_dict_in_generate=True` the output has the `HMTState` as `state`.

        It has read everything but the last token of the sequences, with which the next call begins. Rows that end
        before others read padding until all have ended: generate such rows one by one to go on from their states. A
        beam search has no `state`: its rows are beams, not the sequences.
        """
        output = super().generate(*args, **kwargs)
        if isinstance(output, GenerateDecoderOnlyOutput):
            output["state"] = output.past_key_values
        return output

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        """As in transformers, and also repeat the rows of a `state`."""
        state = model_kwargs.get("state")
        if expand_size > 1 and state is not None:
            index = torch.arange(len(state.bank)).repeat_interleave(expand_size)
            model_kwargs["state"] = state.select_rows(index)
        return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # the cache is an HMTState

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=checkpoint, every_n_layers=1):
        """Checkpoint whole segments. For the layers within them too, enable it on `model.backbone`."""
        if every_n_layers != 1:
            raise ValueError("HMTWrapper checkpoints segments, not layers; leave every_n_layers at 1.")
        self.gradient_checkpointing = enable
        self._gradient_checkpointing_func = gradient_checkpointing_func

    def get_input_embeddings(self):
        return self.lm.model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.lm.model.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.lm.model.get_output_embeddings()

    def set_output_embeddings(self, value):
        self.lm.model.set_output_embeddings(value)

    def resize_token_embeddings(self, *args, **kwargs):
        return self.lm.model.resize_token_embeddings(*args, **kwargs)

    # --------------------------------------------------------------------------------------------- building, saving

    @classmethod
    def from_backbone(cls, backbone, config=None, *, revision=None, **kwargs):
        """Wrap a causal LM; the memory parameters start untrained.

        Args:
            backbone: a model (which is used, not copied), or the name or path of one.
            config: `HMTConfig`, copied; default `HMTConfig()`.
            revision, kwargs: for `AutoModelForCausalLM.from_pretrained`, when a name or path is given.

        Raises:
            ValueError: kwargs beside a model; a backbone or a configuration that does not fit.
        """
        config = HMTConfig() if config is None else deepcopy(config)
        if isinstance(backbone, torch.nn.Module):
            if kwargs or revision is not None:
                raise ValueError(f"{sorted(kwargs) or 'revision'} only apply to a backbone given by name or path.")
        else:
            config.backbone_name_or_path = str(backbone)
            backbone = AutoModelForCausalLM.from_pretrained(backbone, revision=revision, **kwargs)
            config.backbone_revision = revision or getattr(backbone.config, "_commit_hash", None)
        model = cls(config, backbone=backbone)
        model.memory.to(model.get_input_embeddings().weight.device, model.lm.model.dtype)
        return model.train(backbone.training)

    def save_pretrained(self, save_directory, *args, state_dict=None, **kwargs):
        """Save configuration and weights; with `config.backbone_in_checkpoint=False` the memory's weights only.

        Raises:
            ValueError: the checkpoint would have to point to the backbone, and `config.backbone_name_or_path` is not
                set, or the backbone's weights have changed.
            NotImplementedError: the backbone is a PEFT model, whose adapters have their own format, or quantized.
        """
        weights = self.state_dict() if state_dict is None else state_dict
        if not self.config.backbone_in_checkpoint:
            if self.config.backbone_name_or_path is None:
                raise ValueError(
                    "backbone_in_checkpoint is False, and config.backbone_name_or_path does not say where the "
                    "backbone is. Set it, or set backbone_in_checkpoint=True."
                )
            changed = [n for n, version in self.lm.versions().items() if version > self._versions.get(n, 0)]
            if changed and self.lm.model is self.backbone:  # adapters of PEFT are saved apart
                raise ValueError(
                    f"backbone_in_checkpoint is False, and {len(changed)} parameters of the backbone, such as "
                    f"{changed[0]}, have changed since it was wrapped: the checkpoint would lose that. Set "
                    "config.backbone_in_checkpoint=True, or freeze the backbone: model.backbone.requires_grad_(False)."
                )
            weights = {name: value for name, value in weights.items() if name.startswith("memory.")}
        elif self.lm.model is not self.backbone:
            raise NotImplementedError(
                "The backbone is a PEFT model. Merge it (backbone.merge_and_unload()) before wrapping, wrap first and "
                "then call get_peft_model(wrapper, ...), or save its adapters apart and set "
                "config.backbone_in_checkpoint=False."
            )
        elif getattr(self.lm.model, "hf_quantizer", None) is not None:
            raise NotImplementedError(
                "The backbone is quantized, and its weights cannot be read back from a checkpoint of the wrapper. Set "
                "config.backbone_in_checkpoint=False: the memory is saved, and from_pretrained(..., "
                "quantization_config=...) loads the backbone from config.backbone_name_or_path."
            )
        super().save_pretrained(save_directory, *args, state_dict=weights, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path, *args, config=None, backbone_trust_remote_code=False, **kwargs
    ):
        """Load a checkpoint; one that points to its backbone loads that first. Arguments as in transformers.

        With `output_loading_info=True`, the loading info of a pointer is that of the backbone, under the backbone's
        own parameter names; the memory's weights must be complete. `trust_remote_code` holds for this checkpoint,
        where the code of a FoX is saved too; code in the repository of the backbone runs only with
        `backbone_trust_remote_code=True`.

        Raises:
            ValueError: settings beside a configuration object; not an HMT checkpoint; a backbone with code of its own.
        """
        path, hmt_config = pretrained_model_name_or_path, config
        hub_names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        hub = {name: kwargs[name] for name in hub_names if name in kwargs}
        settings = {k: v for k, v in kwargs.items() if k in HMTConfig.__dataclass_fields__ and k != "dtype"}
        if not isinstance(config, PreTrainedConfig):  # remote code has an HMTConfig of its own
            hmt_config = HMTConfig.from_pretrained(path if config is None else config, **hub, **settings)
        elif settings:
            raise ValueError(
                f"{sorted(settings)} came beside a config object. Set them in that config, or leave the config out: "
                "they then change the saved one."
            )
        if hmt_config.backbone_in_checkpoint:
            return super().from_pretrained(path, *args, config=config, **kwargs)
        # of this checkpoint: AutoModel hands on the commit and the adapter arguments too
        hmt_names = {"revision", "subfolder", "code_revision", "trust_remote_code", *settings}
        hmt_names |= {"adapter_kwargs", "_commit_hash"}
        backbone_kwargs = {name: value for name, value in kwargs.items() if name not in hmt_names}
        # AutoModel keeps its argument attn_implementation in the config
        backbone_kwargs.setdefault("attn_implementation", hmt_config._attn_implementation)
        backbone_kwargs |= {"revision": hmt_config.backbone_revision, "trust_remote_code": backbone_trust_remote_code}
        loader = custom_model_class(hmt_config.backbone_config) or AutoModelForCausalLM
        try:
            backbone = loader.from_pretrained(hmt_config.backbone_name_or_path, **backbone_kwargs)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(
                f"The backbone {hmt_config.backbone_name_or_path!r} has code of its own, and trust_remote_code holds "
                "for this checkpoint only. Read that code, then pass backbone_trust_remote_code=True."
            ) from error
        backbone, *loading_info = backbone if isinstance(backbone, tuple) else (backbone,)
        model = cls.from_backbone(backbone, hmt_config)
        weights = load_file(cached_file(path, "model.safetensors", **hub))
        model.memory.load_state_dict({name.removeprefix("memory."): value for name, value in weights.items()})
        with suppress(OSError):  # without a saved generation config the backbone's stays
            model.generation_config = GenerationConfig.from_pretrained(path, **hub)
        return (model.eval(), *loading_info) if loading_info else model.eval()


__all__ = ["HMTOutput", "HMTWrapper"]
