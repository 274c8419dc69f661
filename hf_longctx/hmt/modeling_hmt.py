"""Hierarchical Memory Transformer (HMT): segment recurrence with memory recall around any causal LM.

He et al., "HMT: Hierarchical Memory Transformer for Long Context Language Processing", arXiv 2405.06067. A text is cut
into segments of L' new tokens. Every segment is one short pass of the backbone over

    [prompt, the last k tokens of the previous segment, the segment's tokens, prompt]

and the hidden state at the closing prompt becomes the segment's *memory embedding*. The prompt of a segment is
recalled from the memories so far: a *summary pass* over its first j tokens gives a query that attends to them. Cost
grows linearly with the text, and what is carried from segment to segment is an `HMTState` of fixed size. Memories beyond
that size are dropped, or go to pages where a recall still finds them (`pages_hmt.py`).

Two ways to use the recall
--------------------------
`recall_mode="paper"` does what is written above. But a prompt that depends on the first j tokens then stands *before*
them: the model sees a summary of the very tokens it is asked to predict. Its scores on them are too good, and it
cannot generate them. `score_from=config.summary_length` leaves those tokens out of the loss.

`recall_mode="causal"` (default) uses each prompt from where it is known. From token j on, a segment is read as above:
these logits, and all memories, are exactly the paper's. The first j tokens get their logits from a shorter pass

    [front, k sensory tokens, tokens 0..j-1]

where `front` is the recall for the latest query that is complete when the segment begins, that of the previous
segment; its memories by then include the previous segment itself. So no position sees a later token, and nothing is
lost but what the beginning of a segment cannot know. The price is the extra pass. No memory comes out of it, so those
of several segments go through the backbone together, and where no logits before token j are wanted (a prompt that is
only read) there is none. Generation does the same step by step: after j tokens of a segment the recall is made, and
the segment is read again below its new prompt. In segments 0 and 1 there is nothing to choose from, so one pass serves
all tokens.

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


RETRIEVAL_LOSS_WEIGHT = 0.05  # of the official code


@dataclass
class HMTOutput(ModelOutput):
    """Output of `HMTWrapper`.

    loss: scalar, when labels were given.
    logits: (B, T, V), or those of `logits_to_keep`.
    state: `HMTState` after the last token, with `use_cache=True`.
    recall_scores: with `output_recall=True`, per segment the recall weights (B, c) over the memories, oldest first
        (those in the recalled pages, then the latest), 0 in a row for what it has not; None for a segment that
        recalled nothing (the first one, or one whose query is not complete).
    recall_distance: with `output_recall=True`, (segments, B), long; 1 is the previous segment, 0 no recall.
    memories: with `output_recall=True`, the memory embeddings made in this call, each (B, m, d).
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    state: HMTState | None = None
    recall_scores: tuple | None = None
    recall_distance: torch.LongTensor | None = None
    memories: tuple | None = None


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
    _supports_sdpa = True  # attention is the backbone's business, which checks for itself
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
        calls = Backbone(backbone)
        config.backbone_config = calls.model.config
        config.check()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(config.backbone_config, name, None))
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.gradient_checkpointing = False
        self.backbone = backbone
        self.calls = calls
        recall_dim = (config.recall_dim or calls.width) if config.recall else None
        self.memory = HMTMemory(calls.width, config.memory_tokens, recall_dim)
        if not built_here:
            self.generation_config = deepcopy(calls.model.generation_config)
            for module in backbone.modules():  # loaded already, or set up by PEFT: not to be initialised again
                module._is_hf_initialized = True
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if not isinstance(module, HMTMemory):
            return super()._init_weights(module)
        std = self.calls.embedding_std()  # prompts stand among token embeddings, so they start at their scale
        init.normal_(module.initial, std=std)
        if not self.config.recall:
            return
        if self.config.recall_init == "similarity":
            # read between the prompts of a first segment, a summary is the memory that its tokens alone would leave
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
        pos_mask=None,
        output_recall=False,
        num_items_in_batch=None,
        **kwargs,
    ):
        """Read tokens, from the start of a text or from where `state` stopped.

        Args:
            input_ids: (B, T), long.
            attention_mask: (B, T), 0 on padding. Padding stands on the left. On the right it is accepted in the causal
                mode with `loss_scope="all"` and without a state to return: there it changes no real token's logits.
            labels: (B, T), usually the input_ids, -100 where not scored; shifted here. The first token of a call has
                no prediction.
            state: `HMTState` of an earlier call. In the causal mode any chunking gives the result of one piece; in the
                paper mode a chunk may not end within the first j tokens of a segment.
            use_cache: return the state. Default: when one was given.
            logits_to_keep: only the last so many positions get logits; 0 is all. Or the positions, a long tensor (n,).
            score_from: score only predictions made at this position of their segment or later.
            pos_mask: (B, S), relevance of each segment; adds the official retrieval loss on the last segment's scores.
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
        self._check_loss_arguments(labels, logits_to_keep, score_from, pos_mask)
        state, mask = self._check_inputs(input_ids, attention_mask, labels, state, use_cache)
        new, positions = input_ids.shape[1], None
        if isinstance(logits_to_keep, torch.Tensor):
            positions, logits_to_keep = logits_to_keep.to(input_ids.device), new - self._first_of(logits_to_keep, new)

        seen = state.open_ids.shape[1]  # tokens of the open segment that had their logits before
        ids, mask = torch.cat([state.open_ids, input_ids], 1), torch.cat([state.open_mask, mask], 1)
        total, length = ids.shape[1], self.config.segment_length
        first_wanted = max(seen, total - logits_to_keep) if logits_to_keep else seen

        logits, first_halves, scores, distances, memories = [], [], [], [], []
        segments = [(ids[:, a : a + length], mask[:, a : a + length]) for a in range(0, total, length)]
        offload = self.config.offload_activations and torch.is_grad_enabled()
        with torch.autograd.graph.save_on_cpu() if offload else nullcontext():
            for n, (segment, query) in enumerate(zip(segments, self._queries(state, segments))):
                end = min(total, (n + 1) * length)
                wanted = min(end - n * length, end - first_wanted)
                state, out, first_half = self._segment(state, *segment, query, wanted, use_cache)
                logits += [None, out.logits]
                scores.append(out.recall_scores)
                distances.append(out.recall_distance)
                memories.append(out.memories)
                if first_half is not None:
                    first_halves.append((2 * n, *first_half))
            for place, early in self._read_first_halves(first_halves):
                logits[place] = early

        logits = torch.cat([x for x in logits if x is not None], 1)
        if positions is not None:
            logits = logits[:, positions - (new - logits_to_keep)]
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, seen, score_from, num_items_in_batch)
            if pos_mask is not None:
                loss = loss + RETRIEVAL_LOSS_WEIGHT * retrieval_loss(scores[-1], pos_mask)
        output = HMTOutput(loss=loss, logits=logits, state=state if use_cache else None)
        if output_recall:
            none = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
            output.recall_scores = tuple(scores)
            output.recall_distance = torch.stack([none if d is None else d for d in distances])
            output.memories = tuple(m for m in memories if m is not None)
        return output

    def _queries(self, state, segments):
        """Yield for each segment its recall query (B, 1, d), or None if it needs none.

        Summary passes see no memory, so those of several segments go through the backbone together.
        """
        j, queries = self.config.summary_length, {}
        group = max(1, self.config.summary_batch // len(state.bank))
        waiting = [n for n, (ids, _) in enumerate(segments) if self._recalls(state.segment + n, ids.shape[1])]
        if state.own is not None and waiting[:1] == [0]:
            del waiting[0]  # the open segment has its recall from an earlier call
        for n in range(len(segments)):
            if waiting[:1] == [n]:
                together = [i for i in waiting[:group] if i == n or len(segments[i][0][0]) >= j]
                del waiting[: len(together)]
                ids, masks = (torch.cat([segments[i][part][:, :j] for i in together]) for part in (0, 1))
                queries.update(zip(together, self._summarize(ids, masks, state.padded).chunk(len(together))))
            yield queries.pop(n, None)

    def _recalls(self, index, tokens):
        """Whether segment `index` of the stream has a recall of its own, with `tokens` of its tokens known."""
        if not self.config.recall or index == 0:
            return False
        if self.config.recall_mode == "paper":
            return True
        # no logits before token j need it, and only a full segment leaves a memory that does
        return tokens > self.config.summary_length or tokens == self.config.segment_length

    def _summarize(self, ids, mask, padded):
        """H^sum (paper, sec. 3.2): the backbone on [H^T, E(ids), H^T], last position. (R, j) -> (R, 1, d)."""
        tokens = self.calls.embed(ids)
        prompt = self._prompt(self.memory.summary_prompt, tokens)
        seen = mask.new_ones(len(ids), 1)
        full_mask = torch.cat([seen, mask, seen], 1) if padded else None
        _, hidden = self._run(torch.cat([prompt, tokens, prompt], 1), full_mask, None)
        return hidden[:, -1:].clone()

    def _segment(self, state, ids, mask, query, wanted, use_cache):
        """One segment, or what is known of it: sections 3.2 and 3.3 of the paper.

        Args:
            state: before this call; `state.open_ids` are the first tokens of this segment.
            ids, mask: all its tokens so far, (B, l).
            query: (B, 1, d) or None.
            wanted: logits for so many of its last tokens.
            use_cache: whether a segment that stays open will be continued.

        Returns:
            the state after it; `HMTOutput` with logits, recall scores, distances and memory; None, or the pass that
            gives the first of the wanted logits: its embeddings, its mask, and how many.
        """
        c, tokens = self.config, ids.shape[1]
        scores, distance, first_half = None, None, None
        if state.open_ids.shape[1] == 0:
            state = replace(state, front=self._front_prompt(state), own=None)
        if query is not None:
            own, scores, distance = self._recall(state, query)
            state = replace(state, own=own, query=query, kv_cache=None)

        # in segment 1 both prompts are its only memory
        if c.recall_mode == "causal" and state.own is not None and state.segment > 1:
            early = min(c.summary_length, tokens) - (tokens - wanted)
            if early > 0:
                cut = c.summary_length
                first_half = (*self._layout(state, state.front, ids[:, :cut], mask[:, :cut], close=False), early)
                wanted -= early

        full = tokens == c.segment_length
        close = full or not use_cache  # the paper closes a last, short segment too
        prompt = state.front if state.own is None else state.own
        embeds, layout_mask = self._layout(state, prompt, ids, mask, close)
        kv_cache, cached = self._kv_cache(state, close)
        keep = None
        if wanted > 0:
            last = c.memory_tokens + state.sensory_ids.shape[1] + tokens - cached
            keep = torch.arange(last - wanted, last, device=ids.device)
        logits, hidden = self._run(embeds[:, cached:], layout_mask, keep, kv_cache)

        memory = hidden[:, -c.memory_tokens :].clone() if close else None  # a view would keep all hidden states alive
        new = tokens - state.open_ids.shape[1]
        state = replace(state, open_ids=ids, open_mask=mask, position=state.position + new)
        state = replace(state, kv_cache=kv_cache, kv_length=embeds.shape[1])
        if full:
            state = self._close(state, memory)
        out = HMTOutput(logits=logits, recall_scores=scores, recall_distance=distance, memories=memory)
        return state, out, first_half

    def _recall(self, state, query):
        """Recall from the bank and, if there are pages, from the best of them.

        Returns:
            prompt (B, 1, d), scores (B, c), distances (B,).
        """
        bank, valid, count = state.bank, state.valid, state.bank.shape[1]
        ages = torch.arange(count - 1, -1, -1, device=bank.device).expand(len(bank), -1)
        if state.pages is not None and len(state.pages):
            found = state.pages.look_up(self.memory.direction(query))
            bank, valid, ages = (torch.cat(pair, 1) for pair in zip(found, (bank, valid, ages - count)))
            ages = ages + count
        prompt, scores = self.memory.recall(query, bank, valid)
        return prompt, scores, recall_distance(scores, ages).masked_fill(~valid.any(1), 0)

    def _layout(self, state, prompt, ids, mask, close):
        """[prompt, sensory tokens, tokens] and, to close it, the prompt again.

        Returns:
            embeddings (B, P, d), mask (B, P) or None if nothing is padding.
        """
        tokens = self.calls.embed(ids)
        prompt, visible = prompt.to(tokens), mask.new_ones(len(ids), self.config.memory_tokens)
        embeds = [prompt, self.calls.embed(state.sensory_ids), tokens, prompt]
        masks = [visible, state.sensory_mask, mask, visible]
        parts = 4 if close else 3
        return torch.cat(embeds[:parts], 1), torch.cat(masks[:parts], 1) if state.padded else None

    def _read_first_halves(self, first_halves):
        """Run the passes (place, embeddings, mask, wanted), several at a time, and yield (place, logits)."""
        for (wanted, length), alike in groupby(first_halves, key=lambda item: (item[3], item[1].shape[1])):
            alike = list(alike)
            group = max(1, self.config.summary_batch // len(alike[0][1]))
            for start in range(0, len(alike), group):
                places, embeds, masks, _ = zip(*alike[start : start + group])
                mask = None if masks[0] is None else torch.cat(masks)
                keep = torch.arange(length - wanted, length, device=embeds[0].device)
                logits, _ = self._run(torch.cat(embeds), mask, keep)
                yield from zip(places, logits.chunk(len(places)))

    def _front_prompt(self, state):
        """The prompt before a segment that has no recall of its own yet, (B, m, d)."""
        if state.segment == 0:
            return self._prompt(self.memory.initial, state.bank)
        if state.query is None:  # no recall at all, or one memory only: nothing to choose from
            return self.memory.or_initial(state.bank[:, -self.config.memory_tokens :], state.valid)
        return self._recall(state, state.query)[0]

    def _close(self, state, memory):
        """The state after a full segment: its memory joins the bank, its last tokens become sensory memory."""
        c = self.config
        valid = torch.ones_like(state.open_mask[:, :1])
        sensory_mask = torch.ones_like(state.open_mask)
        if c.recall_mode == "causal":
            valid, sensory_mask = state.open_mask.any(1, keepdim=True), state.open_mask
        bank = torch.cat([state.bank, memory.to(state.bank)], 1)
        valid = torch.cat([state.valid, valid.expand(-1, c.memory_tokens)], 1)
        kept = (c.memory_size or bank.shape[1]) if c.recall else c.memory_tokens
        pages, dropped = state.pages, bank.shape[1] - kept
        if pages is not None and dropped > 0:
            # sliced from the bank before this segment: what leaves it has no part in this segment's graph
            pages = pages.append(state.bank[:, :dropped], state.valid[:, :dropped])
        state = replace(
            state,
            pages=pages,
            bank=bank[:, -kept:],
            valid=valid[:, -kept:],
            sensory_ids=state.open_ids[:, c.segment_length - c.sensory_tokens :],
            sensory_mask=sensory_mask[:, c.segment_length - c.sensory_tokens :],
            open_ids=state.open_ids[:, :0],
            open_mask=state.open_mask[:, :0],
            front=None,
            own=None,
            segment=state.segment + 1,
            kv_cache=None,
            kv_length=0,
        )
        if c.bptt_segments is not None and state.segment % c.bptt_segments == 0:
            state = state.detach()
        return state

    def _prompt(self, parameter, like):
        """A learned prompt (m, d) as embeddings for each row of `like` (B, ., d)."""
        return parameter.to(like).expand(len(like), -1, -1)

    def _run(self, embeds, mask, keep, kv_cache=None):
        """`Backbone.run`, recomputed in the backward pass where checkpointing is on."""
        skip_padding = self.config.recall_mode == "causal"
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(self.calls.run, embeds, mask, keep, None, skip_padding)
        return self.calls.run(embeds, mask, keep, kv_cache, skip_padding)

    def _kv_cache(self, state, close):
        """Cache of the open segment and the positions in it, or a new one if the segment stays open, or (None, 0).

        Without a usable one the segment is read again: after loading a state, when the same state is continued a
        second time (the first call has extended the cache), with gradients, and with backbones that cannot continue.
        """
        if torch.is_grad_enabled():
            return None, 0
        if state.kv_cache is not None and state.kv_cache.get_seq_length() == state.kv_length:
            return state.kv_cache, state.kv_length
        if close or not self.calls.continues:
            return None, 0
        return DynamicCache(config=self.calls.model.config), 0

    def _loss(self, logits, labels, seen, score_from, num_items_in_batch):
        """Mean cross entropy of the scored labels; with `num_items_in_batch` this call's share of the batch's mean."""
        length, tokens = self.config.segment_length, labels.shape[1]
        given = (labels[:, 1:] != -100).sum()
        scored = labels
        if self.config.loss_scope == "last":
            column = torch.arange(tokens, device=labels.device)
            scored = scored.masked_fill(column < tokens - min(length, tokens - 1), -100)
        if score_from is not None:
            made_at = (torch.arange(tokens, device=labels.device) + seen - 1) % length  # where a label is predicted
            scored = scored.masked_fill(made_at < score_from, -100)
        count = (scored[:, 1:] != -100).sum().clamp(min=1)  # a row of nothing to score costs 0, not nan
        loss = self.loss_function(
            logits=logits, labels=scored, vocab_size=logits.shape[-1], num_items_in_batch=count.to(logits.device)
        )
        if num_items_in_batch is not None:
            loss = loss * (given / num_items_in_batch).to(loss)
        if self.training and torch.distributed.is_available() and torch.distributed.is_initialized():
            # a text of one segment recalls nothing, and DDP waits for every parameter
            loss = loss + 0 * sum(p.sum() for p in self.memory.parameters())
        return loss

    def _check_inputs(self, input_ids, attention_mask, labels, state, use_cache):
        """The state to start from and the mask as (B, T) bool, or ValueError."""
        if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
            got = None if input_ids is None else tuple(input_ids.shape)
            raise ValueError(f"input_ids has shape {got}; it must be (batch, tokens) with at least one token.")
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

    def _check_loss_arguments(self, labels, logits_to_keep, score_from, pos_mask):
        if labels is not None and (isinstance(logits_to_keep, torch.Tensor) or logits_to_keep):
            raise ValueError("labels need all logits; leave logits_to_keep at 0.")
        if not isinstance(logits_to_keep, torch.Tensor) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep is {logits_to_keep}; it counts the last positions, 0 is all of them.")
        if labels is None and (score_from is not None or pos_mask is not None):
            raise ValueError("score_from and pos_mask are about the loss, which needs labels.")
        last = self.config.segment_length - 1
        if score_from is not None and not 0 <= score_from <= last:
            raise ValueError(f"score_from is {score_from}; it is a position within a segment, 0 to {last}.")

    @staticmethod
    def _first_of(positions, tokens):
        if positions.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"logits_to_keep is a tensor of {positions.dtype}; it must list positions as integers (of a mask over "
                "positions: mask.nonzero().squeeze(1))."
            )
        first, last = (-1, -1) if positions.numel() == 0 else (positions.min().item(), positions.max().item())
        if first < 0 or last >= tokens or positions.dim() != 1:
            raise ValueError(
                f"logits_to_keep has shape {tuple(positions.shape)} and reaches from {first} to {last}; as a tensor "
                f"it must be a list of positions of this call, 0 to {tokens - 1}."
            )
        return first

    def _check_state(self, state, rows):
        differing = {k: v for k, v in self._signature().items() if state.signature.get(k) != v}
        if differing:
            theirs = {k: state.signature.get(k) for k in differing}
            raise ValueError(
                f"The state belongs to another model or setting: it has {theirs}, this model {differing}. "
                "Its memories mean nothing here; start a new state."
            )
        if len(state.bank) != rows:
            raise ValueError(
                f"The state has {len(state.bank)} rows and input_ids {rows}; they must be the same texts."
            )
        c, open_tokens = self.config, state.open_ids.shape[1]
        if c.recall and c.recall_mode == "paper" and state.segment and 0 < open_tokens < c.summary_length:
            raise ValueError(
                f"The state stops after {open_tokens} tokens of a segment, and recall_mode='paper' reads the first "
                f"{c.summary_length} before it predicts them: what was predicted so far would change. End chunks at "
                "multiples of segment_length, or use recall_mode='causal' (also to generate beyond a segment)."
            )

    def _check_padding(self, mask, state, use_cache):
        c = self.config
        if not self.calls.sees_padding:
            raise NotImplementedError(
                f"{type(self.calls.model).__name__} ignores the attention mask, so padding would be read as text. "
                "Use rows of equal length, or batch size 1."
            )
        started = state.open_mask.any(1) | (state.valid.any(1) & (c.recall_mode == "causal"))
        if not use_cache and not mask.any(1).all():
            raise ValueError("A row of attention_mask is all padding: there is nothing to read. Remove the row.")
        rises = mask[:, 1:] >= mask[:, :-1]  # no padding after a token
        left = rises.all(1) & (mask.all(1) | ~started)
        right = (mask[:, 1:] <= mask[:, :-1]).all(1) & mask[:, 0]
        if not (left | right).all():
            raise ValueError(
                "attention_mask has padding between tokens; padding must be on one side, best on the left."
            )
        exact = c.recall_mode == "causal" and c.loss_scope == "all" and not use_cache
        if not (left.all() or exact):
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
        c, device = self.config, self.device if device is None else device
        if page_file is not None and c.recalled_pages is None:
            raise ValueError("page_file is about pages, which this model has not; set config.recalled_pages.")
        dtype = self.calls.embed(torch.zeros(1, 1, dtype=torch.long, device=device)).dtype
        sizes, pages = (batch_size, self.calls.width, dtype, device), None
        if c.recalled_pages is not None:
            file = None if page_file is None else PageFile(page_file)
            pages = MemoryPages.empty(*sizes, c.page_size, c.recalled_pages, file)
        return HMTState.empty(*sizes, self._signature(), pages)

    def _signature(self):
        c = self.config
        names = ("segment_length", "sensory_tokens", "memory_size", "sum_fraction", "recall", "memory_tokens")
        return {
            "backbone": c.backbone_config.model_type,
            "vocab_size": c.vocab_size,
            "width": self.calls.width,
            "recall_mode": c.recall_mode,
            "pages": None if c.recalled_pages is None else [c.recalled_pages, c.page_size],
            **{name: getattr(c, name) for name in names},
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
                "use_cache is False, and generation continues a state: what is generated has no other place to go. "
                "Leave use_cache at True, or generate from the whole text without a state."
            )
        if state is not None and not is_first_iteration:
            input_ids, attention_mask = input_ids[:, -1:], None
        used = {name: kwargs[name] for name in ("use_cache", "logits_to_keep") if name in kwargs}
        return {"input_ids": input_ids, "attention_mask": attention_mask, "state": state, **used}

    def _expand_inputs_for_generation(self, expand_size=1, is_encoder_decoder=False, input_ids=None, **model_kwargs):
        """As in transformers, for the rows of a `state` too."""
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
        return self.calls.model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.calls.model.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.calls.model.get_output_embeddings()

    def set_output_embeddings(self, value):
        self.calls.model.set_output_embeddings(value)

    def resize_token_embeddings(self, *args, **kwargs):
        return self.calls.model.resize_token_embeddings(*args, **kwargs)

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
        model.memory.to(model.get_input_embeddings().weight.device, model.calls.model.dtype)
        return model.train(backbone.training)

    def save_pretrained(self, save_directory, *args, state_dict=None, **kwargs):
        """Save configuration and weights; of a model with `backbone_in_checkpoint=False` the memory's weights only.

        Raises:
            ValueError: there is no backbone to point to.
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
        elif self.calls.model is not self.backbone:
            raise NotImplementedError(
                "The backbone is a PEFT model. Merge it (backbone.merge_and_unload()) before wrapping, wrap first and "
                "then call get_peft_model(wrapper, ...), or save its adapters apart and set "
                "config.backbone_in_checkpoint=False."
            )
        elif getattr(self.calls.model, "hf_quantizer", None) is not None:
            raise NotImplementedError(
                "The backbone is quantized, and its weights cannot be read back from a checkpoint of the wrapper. Set "
                "config.backbone_in_checkpoint=False: the memory is saved, and from_pretrained(..., "
                "quantization_config=...) loads the backbone from where it came."
            )
        super().save_pretrained(save_directory, *args, state_dict=weights, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, config=None, **kwargs):
        """Load a checkpoint; one that points to its backbone loads that first. Arguments as in transformers.

        With `output_loading_info=True`, the second result of a pointer is about the backbone, under its own names; the
        memory's weights must all be there.

        Raises:
            ValueError: settings beside a configuration object.
        """
        path, found = pretrained_model_name_or_path, config
        hub_names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        hub = {name: kwargs[name] for name in hub_names if name in kwargs}
        settings = {k: v for k, v in kwargs.items() if k in HMTConfig.__dataclass_fields__ and k != "dtype"}
        if not isinstance(config, PreTrainedConfig):  # remote code has an HMTConfig of its own
            found = HMTConfig.from_pretrained(path if config is None else config, **hub, **settings)
        elif settings:
            raise ValueError(
                f"{sorted(settings)} and a config are both given. Set them in the config, or leave it out: then they "
                "change the saved one."
            )
        if found.backbone_in_checkpoint:
            return super().from_pretrained(path, *args, config=config, **kwargs)
        ours = {"revision", "subfolder", *settings}  # the rest is for loading the backbone
        rest = {name: value for name, value in kwargs.items() if name not in ours}
        rest.setdefault("attn_implementation", found._attn_implementation)  # where AutoModel puts its argument
        backbone = AutoModelForCausalLM.from_pretrained(
            found.backbone_name_or_path, revision=found.backbone_revision, **rest
        )
        backbone, *loading_info = backbone if isinstance(backbone, tuple) else (backbone,)
        model = cls.from_backbone(backbone, found)
        weights = load_file(cached_file(path, "model.safetensors", **hub))
        model.memory.load_state_dict({name.removeprefix("memory."): value for name, value in weights.items()})
        with suppress(OSError):  # none there: it stays that of the backbone
            model.generation_config = GenerationConfig.from_pretrained(path, **hub)
        return (model.eval(), *loading_info) if loading_info else model.eval()


def retrieval_loss(scores, pos_mask):
    """Cross entropy between recall weights and the relevance of past segments, as the official code computes it.

    The scores are already normalised and are normalised again here; kept for comparison.

    Args:
        scores: recall weights of the last segment, (B, S - 1), or None.
        pos_mask: relevance of all S segments, (B, S), not negative.

    Raises:
        ValueError: the last segment has no recall, or some segment is no longer remembered.
    """
    if scores is None or scores.shape[1] != pos_mask.shape[1] - 1:
        remembered = 0 if scores is None else scores.shape[1]
        raise ValueError(
            f"pos_mask is about {pos_mask.shape[1]} segments, and the last one recalls from {remembered} before it; "
            "these must be all others. Raise memory_size, or leave pos_mask out."
        )
    target = torch.nn.functional.normalize(pos_mask[:, :-1].to(scores), p=1, dim=1)
    return torch.nn.functional.cross_entropy(scores, target)


__all__ = ["HMTOutput", "HMTWrapper"]
