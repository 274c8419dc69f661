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

Padding: in the causal mode a segment without any real token leaves no memory in that row, padding among the sensory
tokens is masked, and positions count real tokens only, so a row padded on the left by whole segments is read as if it
stood alone (but for recurrent and convolutional backbones and sliding windows shorter than a segment, which run over
padding, and MPT, whose position bias counts it). The paper mode keeps the memories of padding and shows padded sensory
tokens, as the official code does.
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
from transformers.utils import ModelOutput, cached_file

from .backbone_hmt import Backbone
from .configuration_hmt import HMTConfig
from .memory_hmt import SIMILARITY_GAIN, HMTMemory, HMTState, recall_distance
from .pages_hmt import MemoryPages, PageFile


@dataclass
class HMTOutput(ModelOutput):
    """Output of `HMTWrapper`.

    loss: scalar, with labels.
    logits: (B, T, V), or those of `logits_to_keep`.
    state: `HMTState` after the last token, with `use_cache=True`.
    recall_scores: with `output_recall=True`, per segment the recall weights (B, c) over the memories, oldest first
        (those in the recalled pages, then the latest), 0 for a memory that a row does not have; None for a segment
        without a recall (the first one, or one whose query is not complete).
    recall_distance: with `output_recall=True`, (segments, B), long; 1 is the previous segment, 0 no recall.
    memories: with `output_recall=True`, the memory embeddings made in this call, each (B, m, d).
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    state: HMTState | None = None
    recall_scores: tuple | None = None
    recall_distance: torch.LongTensor | None = None
    memories: tuple | None = None


class Pass(NamedTuple):
    """One pass of the backbone that is still to run, for its logits only."""

    segment: int  # index within the call
    embeds: torch.Tensor  # (B, P, d)
    mask: torch.Tensor | None  # (B, P), bool
    n_logits: int  # of the last positions

    @property
    def shape(self):
        """What passes must have in common to run together."""
        return self.embeds.shape[1], self.n_logits


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
            backbone = AutoModelForCausalLM.from_config(config.backbone_config)
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
            attention_mask: (B, T), 0 on padding. Padding stands on the left. Padding on the right is accepted in the
                causal mode with `loss_scope="all"` and without a state to return: there it changes no real token's
                logits.
            labels: (B, T), usually the input_ids, -100 where not scored; shifted here. The first token of a call has
                no prediction.
            state: `HMTState` of an earlier call. In the causal mode any chunking gives the result of one piece; in the
                paper mode a chunk may not end within the first j tokens of a segment.
            use_cache: return the state. Default: True with a state, else False.
            logits_to_keep: only the last so many positions get logits; 0 is all. Or the positions, a long tensor (n,).
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
            if value is not None and value is not False and name != "return_dict":
                raise ValueError(f"HMTWrapper does not use {name}; pass input_ids, attention_mask and labels.")
        use_cache = state is not None if use_cache is None else use_cache
        self._check_loss_arguments(labels, logits_to_keep, score_from)
        state, mask = self._check_inputs(input_ids, attention_mask, labels, state, use_cache)
        first = self._first_position(logits_to_keep, input_ids.shape[1])

        open_tokens = state.open_ids.shape[1]  # earlier calls returned the logits of these tokens
        ids, mask = torch.cat([state.open_ids, input_ids], 1), torch.cat([state.open_mask, mask], 1)
        total, length = ids.shape[1], self.config.segment_length
        segments = [(ids[:, a : a + length], mask[:, a : a + length]) for a in range(0, total, length)]

        late, first_halves, scores, distances, memories = [], [], [], [], []
        offload = self.config.offload_activations and torch.is_grad_enabled()
        with torch.autograd.graph.save_on_cpu() if offload else nullcontext():
            for n, (segment, query) in enumerate(zip(segments, self._recall_queries(state, segments))):
                n_logits = min(total, (n + 1) * length) - max(n * length, open_tokens + first)
                state, output, first_half = self._read_segment(state, n, *segment, query, n_logits, use_cache)
                late.append(output.logits)
                scores.append(output.recall_scores)
                distances.append(output.recall_distance)
                memories.append(output.memories)
                if first_half is not None:
                    first_halves.append(first_half)
            early = dict(self._read_first_halves(first_halves))  # segment -> logits before token j

        logits = torch.cat([x for n in range(len(late)) for x in (early.get(n), late[n]) if x is not None], 1)
        del early, late, first_halves  # logits are large, and the loss makes another copy
        if isinstance(logits_to_keep, torch.Tensor):
            logits = logits[:, logits_to_keep.to(logits.device) - first]
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, open_tokens, score_from, num_items_in_batch)
        result = HMTOutput(loss=loss, logits=logits, state=state if use_cache else None)
        if output_recall:
            no_recall = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
            result.recall_scores = tuple(scores)
            result.recall_distance = torch.stack([no_recall if d is None else d for d in distances])
            result.memories = tuple(memory for memory in memories if memory is not None)
        return result

    def _recall_queries(self, state, segments):
        """Yield the recall query of each segment, (B, 1, d), or None for a segment without a recall.

        Summary passes see no memory, so those of several segments go through the backbone together.
        """
        j, queries = self.config.summary_length, {}
        group_size = max(1, self.config.summary_batch // len(state.bank))
        pending = [n for n, (ids, _) in enumerate(segments) if self._has_recall(state.segment + n, ids.shape[1])]
        if state.recalled_prompt is not None and pending[:1] == [0]:
            del pending[0]  # an earlier call made the recall of the open segment
        for n in range(len(segments)):
            if pending[:1] == [n]:
                group = [i for i in pending[:group_size] if i == n or segments[i][0].shape[1] >= j]
                del pending[: len(group)]
                ids, masks = (torch.cat([segments[i][part][:, :j] for i in group]) for part in (0, 1))
                queries.update(zip(group, self._summarize(ids, masks, state.padded).chunk(len(group))))
            yield queries.pop(n, None)

    def _has_recall(self, segment, tokens):
        """Whether `segment` of the stream makes a recall when its first `tokens` tokens are known."""
        if not self.config.recall or segment == 0:
            return False
        if self.config.recall_mode == "paper":
            return True
        # Logits before token j do not need the recall. Only a full segment leaves a memory, which does.
        return tokens > self.config.summary_length or tokens == self.config.segment_length

    def _summarize(self, ids, mask, padded):
        """H^sum (paper, sec. 3.2): the backbone on [H^T, E(ids), H^T], last position. (R, j) -> (R, 1, d)."""
        tokens = self.lm.embed(ids)
        prompt = self._prompt(self.memory.summary_prompt, tokens)
        visible = mask.new_ones(len(ids), 1)
        full_mask = torch.cat([visible, mask, visible], 1) if padded else None
        _, hidden = self._run(torch.cat([prompt, tokens, prompt], 1), full_mask, None)
        return hidden[:, -1:].clone()

    def _read_segment(self, state, n, ids, mask, query, n_logits, use_cache):
        """Read one segment, or its tokens so far: sections 3.2 and 3.3 of the paper.

        Args:
            state: before this call; `state.open_ids` are the first tokens of this segment.
            n: index of the segment within the call.
            ids, mask: all tokens of the segment so far, (B, l).
            query: (B, 1, d) or None.
            n_logits: how many of its last tokens get logits; none if <= 0.
            use_cache: whether a later call continues a segment that stays open.

        Returns:
            the state after it; `HMTOutput` with logits, recall scores, distances and memory; the `Pass` that gives the
            logits before token j, or None.
        """
        config, tokens = self.config, ids.shape[1]
        scores, distance, first_half = None, None, None
        if state.open_ids.shape[1] == 0:
            state = replace(state, opening_prompt=self._opening_prompt(state), recalled_prompt=None)
        if query is not None:
            recalled, scores, distance = self._recall(state, query)
            state = replace(state, recalled_prompt=recalled, query=query, kv_cache=None)

        # segment 1 has one memory, so both prompts are equal: one pass is enough
        if config.recall_mode == "causal" and state.recalled_prompt is not None and state.segment > 1:
            j = config.summary_length
            n_early = min(j, tokens) - (tokens - n_logits)
            if n_early > 0:
                layout = self._layout(state, state.opening_prompt, ids[:, :j], mask[:, :j], close=False)
                first_half = Pass(n, *layout, n_early)
                n_logits -= n_early

        full = tokens == config.segment_length
        close = full or not use_cache  # the paper closes a last, short segment too
        prompt = state.opening_prompt if state.recalled_prompt is None else state.recalled_prompt
        embeds, layout_mask = self._layout(state, prompt, ids, mask, close)
        kv_cache, cached = self._kv_cache(state, close)
        keep = None
        if n_logits > 0:
            end = config.memory_tokens + state.sensory_ids.shape[1] + tokens - cached
            keep = torch.arange(end - n_logits, end, device=ids.device)
        logits, hidden = self._run(embeds[:, cached:], layout_mask, keep, kv_cache)

        # a view would keep all hidden states alive
        memory = hidden[:, -config.memory_tokens :].clone() if close else None
        position = state.position + tokens - state.open_ids.shape[1]
        state = replace(state, open_ids=ids, open_mask=mask, position=position)
        state = replace(state, kv_cache=kv_cache, kv_length=embeds.shape[1])
        if full:
            state = self._close(state, memory)
        output = HMTOutput(logits=logits, recall_scores=scores, recall_distance=distance, memories=memory)
        return state, output, first_half

    def _recall(self, state, query):
        """Recall from the bank and, if there are pages, from the best of them.

        Returns:
            prompt (B, 1, d), scores (B, c), distances (B,).
        """
        bank, valid, count = state.bank, state.valid, state.bank.shape[1]
        ages = torch.arange(count - 1, -1, -1, device=bank.device).expand(len(bank), -1)
        if state.pages is not None and len(state.pages):
            paged, paged_valid, paged_ages = state.pages.look_up(self.memory.direction(query))
            bank, valid = torch.cat([paged, bank], 1), torch.cat([paged_valid, valid], 1)
            ages = torch.cat([paged_ages + count, ages], 1)
        prompt, scores = self.memory.recall(query, bank, valid)
        return prompt, scores, recall_distance(scores, ages).masked_fill(~valid.any(1), 0)

    def _layout(self, state, prompt, ids, mask, close):
        """[prompt, sensory tokens, tokens], and the prompt again with `close`.

        Returns:
            embeddings (B, P, d), mask (B, P) or None if nothing is padding.
        """
        tokens = self.lm.embed(ids)
        prompt, visible = prompt.to(tokens), mask.new_ones(len(ids), self.config.memory_tokens)
        embeds = [prompt, self.lm.embed(state.sensory_ids), tokens, prompt]
        masks = [visible, state.sensory_mask, mask, visible]
        parts = 4 if close else 3
        return torch.cat(embeds[:parts], 1), torch.cat(masks[:parts], 1) if state.padded else None

    def _read_first_halves(self, passes):
        """Run neighbouring passes of one shape together, and yield (segment, logits)."""
        for (length, n_logits), alike in groupby(passes, key=lambda one: one.shape):
            alike = list(alike)
            group_size = max(1, self.config.summary_batch // len(alike[0].embeds))
            for start in range(0, len(alike), group_size):
                segments, embeds, masks, _ = zip(*alike[start : start + group_size])
                mask = None if masks[0] is None else torch.cat(masks)
                keep = torch.arange(length - n_logits, length, device=embeds[0].device)
                logits, _ = self._run(torch.cat(embeds), mask, keep)
                yield from zip(segments, logits.chunk(len(segments)))

    def _opening_prompt(self, state):
        """The prompt that a segment opens with, before it has a recall of its own, (B, m, d)."""
        if state.segment == 0:
            return self._prompt(self.memory.initial, state.bank)
        if state.query is None:  # no recall at all, or one memory only: nothing to choose from
            return self.memory.or_initial(state.bank[:, -self.config.memory_tokens :], state.valid)
        return self._recall(state, state.query)[0]

    def _close(self, state, memory):
        """The state after a full segment: its memory joins the bank, its last tokens become sensory tokens."""
        config = self.config
        valid = torch.ones_like(state.open_mask[:, :1])
        sensory_mask = torch.ones_like(state.open_mask)
        if config.recall_mode == "causal":
            valid, sensory_mask = state.open_mask.any(1, keepdim=True), state.open_mask
        bank = torch.cat([state.bank, memory.to(state.bank)], 1)
        valid = torch.cat([state.valid, valid.expand(-1, config.memory_tokens)], 1)
        kept = (config.memory_size or bank.shape[1]) if config.recall else config.memory_tokens
        pages, dropped = state.pages, bank.shape[1] - kept
        if pages is not None and dropped > 0:
            # slice the *old* bank: a dropped memory must not keep this segment's autograd graph alive
            pages = pages.append(state.bank[:, :dropped], state.valid[:, :dropped])
        first_sensory = config.segment_length - config.sensory_tokens
        state = replace(
            state,
            pages=pages,
            bank=bank[:, -kept:],
            valid=valid[:, -kept:],
            sensory_ids=state.open_ids[:, first_sensory:],
            sensory_mask=sensory_mask[:, first_sensory:],
            open_ids=state.open_ids[:, :0],
            open_mask=state.open_mask[:, :0],
            opening_prompt=None,
            recalled_prompt=None,
            segment=state.segment + 1,
            kv_cache=None,
            kv_length=0,
        )
        if config.bptt_segments is not None and state.segment % config.bptt_segments == 0:
            state = state.detach()
        return state

    def _prompt(self, parameter, like):
        """A learned prompt (m, d) as embeddings for each row of `like` (B, ., d)."""
        return parameter.to(like).expand(len(like), -1, -1)

    def _run(self, embeds, mask, keep, kv_cache=None):
        """`Backbone.run`; with gradient checkpointing the backward pass computes it again."""
        skip_padding = self.config.recall_mode == "causal"
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(self.lm.run, embeds, mask, keep, None, skip_padding)
        return self.lm.run(embeds, mask, keep, kv_cache, skip_padding)

    def _kv_cache(self, state, close):
        """Cache of the open segment and the positions in it, or a new one if the segment stays open, or (None, 0).

        Without a usable cache the segment is read again: after loading a state, when the same state is continued a
        second time (the first call has extended the cache), with gradients, and with backbones that cannot continue.
        """
        if torch.is_grad_enabled():
            return None, 0
        if state.kv_cache is not None and state.kv_cache.get_seq_length() == state.kv_length:
            return state.kv_cache, state.kv_length
        if close or not self.lm.continues:
            return None, 0
        return DynamicCache(config=self.lm.model.config), 0

    def _loss(self, logits, labels, open_tokens, score_from, num_items_in_batch):
        """Mean cross entropy of the scored labels; with `num_items_in_batch` this call's share of the batch's mean."""
        length, tokens = self.config.segment_length, labels.shape[1]
        labelled_tokens = (labels[:, 1:] != -100).sum()
        column = torch.arange(tokens, device=labels.device)
        scored = labels
        if self.config.loss_scope == "last":
            scored = scored.masked_fill(column < tokens - min(length, tokens - 1), -100)
        if score_from is not None:
            predicted_at = (column + open_tokens - 1) % length  # place in its segment where a label is predicted
            scored = scored.masked_fill(predicted_at < score_from, -100)
        count = (scored[:, 1:] != -100).sum().clamp(min=1)  # without any scored label the loss is 0, not nan
        loss = self.loss_function(
            logits=logits, labels=scored, vocab_size=logits.shape[-1], num_items_in_batch=count.to(logits.device)
        )
        if num_items_in_batch is not None:
            loss = loss * (labelled_tokens / num_items_in_batch).to(loss)
        if self.training and torch.distributed.is_available() and torch.distributed.is_initialized():
            # DDP needs a gradient of every parameter, and a text of one segment recalls nothing
            loss = loss + 0 * sum(p.sum() for p in self.memory.parameters())
        return loss

    def _check_inputs(self, input_ids, attention_mask, labels, state, use_cache):
        """The state to start from and the mask as (B, T) bool, or ValueError."""
        if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
            shape = None if input_ids is None else tuple(input_ids.shape)
            raise ValueError(f"input_ids has shape {shape}; it must be (batch, tokens) with at least one token.")
        for name, value in (("attention_mask", attention_mask), ("labels", labels)):
            if value is not None and value.shape != input_ids.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; it must be that of input_ids, {tuple(input_ids.shape)}, "
                    "the tokens of this call only."
                )
        if state is None:
            state = self.new_state(len(input_ids), device=input_ids.device)
        else:
            self._check_state(state, len(input_ids))
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None and not attention_mask.all():
            mask = attention_mask.bool()
            self._check_padding(mask, state, use_cache)
            state = replace(state, padded=True)
        return state, mask

    def _check_loss_arguments(self, labels, logits_to_keep, score_from):
        if labels is not None and (isinstance(logits_to_keep, torch.Tensor) or logits_to_keep):
            raise ValueError("labels need all logits; leave logits_to_keep at 0.")
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
        config, open_tokens = self.config, state.open_ids.shape[1]
        incomplete_query = state.segment > 0 and 0 < open_tokens < config.summary_length
        if config.recall and config.recall_mode == "paper" and incomplete_query:
            raise ValueError(
                f"The state stops after {open_tokens} tokens of a segment, and recall_mode='paper' reads the first "
                f"{config.summary_length} before it predicts them: what was predicted so far would change. End chunks "
                "at multiples of segment_length, or use recall_mode='causal' (also to generate beyond a segment)."
            )

    def _check_padding(self, mask, state, use_cache):
        config = self.config
        if not self.lm.sees_padding:
            raise NotImplementedError(
                f"{type(self.lm.model).__name__} ignores the attention mask, so padding would be read as text. "
                "Use rows of equal length, or batch size 1."
            )
        started = state.open_mask.any(1) | (state.valid.any(1) & (config.recall_mode == "causal"))
        if not use_cache and not mask.any(1).all():
            raise ValueError("A row of attention_mask is all padding: there is nothing to read. Remove the row.")
        no_padding_after_a_token = (mask[:, 1:] >= mask[:, :-1]).all(1)
        left = no_padding_after_a_token & (mask.all(1) | ~started)
        right = (mask[:, 1:] <= mask[:, :-1]).all(1) & mask[:, 0]
        if not (left | right).all():
            raise ValueError(
                "attention_mask has padding between tokens; padding must be on one side, best on the left."
            )
        exact_on_the_right = config.recall_mode == "causal" and config.loss_scope == "all" and not use_cache
        if not (left.all() or exact_on_the_right):
            raise ValueError(
                "The rows are padded on the right. That is exact only with recall_mode='causal', loss_scope='all' and "
                "no state to return; here it would put padding into the query, the loss or the memory. Pad on the "
                "left: tokenizer.padding_side = 'left'."
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
            pages = MemoryPages.empty(*sizes, config.page_size, config.recalled_pages, file)
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
        if is_first_iteration and attention_mask is not None and not attention_mask.any(1).all():
            raise ValueError("A row of attention_mask is all padding: there is nothing to continue. Remove the row.")
        if state is not None and not kwargs.get("use_cache", True):
            raise ValueError(
                "use_cache is False, and generation continues a state: only a state can hold the generated tokens. "
                "Leave use_cache at True, or generate from the whole text without a state."
            )
        if state is not None and not is_first_iteration:
            input_ids, attention_mask = input_ids[:, -1:], None
        options = {name: kwargs[name] for name in ("use_cache", "logits_to_keep") if name in kwargs}
        return {"input_ids": input_ids, "attention_mask": attention_mask, "state": state, **options}

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        """As in transformers, and also repeat the rows of a `state`."""
        if expand_size > 1 and model_kwargs.get("state") is not None:
            model_kwargs["state"] = model_kwargs["state"].map(lambda x: x.repeat_interleave(expand_size, dim=0))
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
            config.backbone_name_or_path, config.backbone_revision = str(backbone), revision
            backbone = AutoModelForCausalLM.from_pretrained(backbone, revision=revision, **kwargs)
        model = cls(config, backbone=backbone)
        model.memory.to(model.get_input_embeddings().weight.device, model.lm.model.dtype)
        return model.train(backbone.training)

    def save_pretrained(self, save_directory, *args, state_dict=None, **kwargs):
        """Save configuration and weights; with `config.backbone_in_checkpoint=False` the memory's weights only.

        Raises:
            ValueError: `config.backbone_name_or_path` is not set, and the checkpoint would have to point to it.
            NotImplementedError: the backbone is a PEFT model, whose adapters have their own format, or quantized.
        """
        weights = self.state_dict() if state_dict is None else state_dict
        if not self.config.backbone_in_checkpoint:
            if self.config.backbone_name_or_path is None:
                raise ValueError(
                    "backbone_in_checkpoint is False, and config.backbone_name_or_path does not say where the "
                    "backbone is. Set it, or set backbone_in_checkpoint=True."
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
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """Load a checkpoint; one that points to its backbone loads that first. Arguments as in transformers.

        With `output_loading_info=True`, the loading info of a pointer is that of the backbone, under the backbone's
        own parameter names; the memory's weights must be complete.

        Raises:
            ValueError: settings beside a configuration object.
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
        hmt_names = {"revision", "subfolder", *settings}
        backbone_kwargs = {name: value for name, value in kwargs.items() if name not in hmt_names}
        # AutoModel keeps its argument attn_implementation in the config
        backbone_kwargs.setdefault("attn_implementation", hmt_config._attn_implementation)
        backbone = AutoModelForCausalLM.from_pretrained(
            hmt_config.backbone_name_or_path, revision=hmt_config.backbone_revision, **backbone_kwargs
        )
        backbone, *loading_info = backbone if isinstance(backbone, tuple) else (backbone,)
        model = cls.from_backbone(backbone, hmt_config)
        weights = load_file(cached_file(path, "model.safetensors", **hub))
        model.memory.load_state_dict({name.removeprefix("memory."): value for name, value in weights.items()})
        with suppress(OSError):  # without a saved generation config the backbone's stays
            model.generation_config = GenerationConfig.from_pretrained(path, **hub)
        return (model.eval(), *loading_info) if loading_info else model.eval()


__all__ = ["HMTOutput", "HMTWrapper"]
