"""What a caller of `HMTWrapper` can get wrong, and what does not show in a shape."""

from dataclasses import replace
from numbers import Integral

import torch


def check_ids(name, ids, vocab_size, ignored=None):
    """Raise ValueError unless `ids` are integers of the vocabulary, or `ignored`.

    Values are looked at on a CPU only: elsewhere the processor would have to wait for them.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {ids.dtype}; token ids are integers, such as {name}.long().")
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    ids = ids if ignored is None else ids[ids != ignored]
    if ids.numel() and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(
            f"{name} holds ids from {ids.min()} to {ids.max()}; they must lie between 0 and {vocab_size - 1}, as the "
            f"backbone has {vocab_size} embeddings. Is the tokenizer that of this backbone? (-100 is for labels only.)"
        )


def check_generation(config):
    """Raise ValueError for settings of a `GenerationConfig` that HMTWrapper would ignore or fail on."""
    refused = {
        "output_hidden_states": (False, "a segment has several passes; call model.backbone for hidden states"),
        "output_attentions": (False, "a segment has several passes; call model.backbone for attentions"),
        "guidance_scale": (1, "the unconditional text would need a state of its own"),
        "cache_implementation": ("dynamic", "the cache is an HMTState, whose size is bounded already"),
    }
    for name, (neutral, reason) in refused.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(f"generate() of HMTWrapper cannot use {name}={value!r}: {reason}. Leave {name} out.")


def check_inputs(model, input_ids, attention_mask, labels, state, use_cache):
    """The state to start from, and the mask as (B, T) bool or None if nothing is padding; or ValueError."""
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask), ("labels", labels)):
        if value is not None and not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} is a {type(value).__name__}; it must be a tensor: torch.tensor({name}).")
    if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
        shape = None if input_ids is None else tuple(input_ids.shape)
        raise ValueError(f"input_ids has shape {shape}; it must be (batch, tokens) with at least one token.")
    for name, value in (("attention_mask", attention_mask), ("labels", labels)):
        if value is not None and value.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; it must be that of input_ids, {tuple(input_ids.shape)}, "
                "the tokens of this call only."
            )
    vocab_size = len(model.get_input_embeddings().weight)
    if labels is not None:
        check_ids("labels", labels, vocab_size, ignored=-100)
    if state is None:
        state = model.new_state(len(input_ids), device=input_ids.device)
    else:
        check_state(model, state, len(input_ids))
    if attention_mask is None or (attention_mask == 1).all():
        check_ids("input_ids", input_ids, vocab_size)
        return state, None
    mask = attention_mask == 1
    if not (mask | (attention_mask == 0)).all():
        raise ValueError(
            f"attention_mask holds {attention_mask.min()} to {attention_mask.max()}; it must be 1 on tokens and 0 "
            "on padding."
        )
    check_padding(model, mask, state, use_cache)
    check_ids("input_ids", input_ids[mask], vocab_size)
    return replace(state, padded=model.config.recall_mode == "paper"), mask


def check_settings(model):
    """Settings may have changed since the parameters were made."""
    if getattr(model, "_is_replica", False):
        raise NotImplementedError(
            "torch.nn.DataParallel copies HMTWrapper to other devices without what refers to its backbone. Start one "
            "process for each GPU (torchrun, accelerate launch), or let the program see one GPU: CUDA_VISIBLE_DEVICES=0."
        )
    model.config.check(model.lm.positions)
    if model.config.recall and not hasattr(model.memory, "wq"):
        raise ValueError(
            "config.recall is True, and this model was built without recall: it has no projections. Save it, and "
            "load it with HMTWrapper.from_pretrained(folder, recall=True)."
        )
    if model.memory.single_pass != (model.config.recall_mode == "single_pass"):
        raise ValueError(
            f"config.recall_mode is {model.config.recall_mode!r}, and this model was not built for it: 'single_pass' has other "
            "parameters. Build a new model: HMTWrapper.from_backbone(model.backbone, config)."
        )
    settle_mask(model)
    if model.config.memory_tokens != len(model.memory.initial):
        raise ValueError(
            f"config.memory_tokens is {model.config.memory_tokens}, and this model was built with "
            f"{len(model.memory.initial)}. Build a new model: HMTWrapper.from_backbone(model.backbone, config)."
        )


def settle_mask(model):
    """Set `recall_mask` of a single-pass mode that has none yet; ValueError if its backbone cannot follow the mask."""
    config = model.config
    if config.recall_mode != "single_pass" or config.recall_mask is False or model.device.type == "meta":
        return
    takes_masks = model.lm.takes_masks(config.positions_per_segment)
    if config.recall_mask is None:
        config.recall_mask = takes_masks
    elif not takes_masks:
        attention = getattr(model.lm.model.config, "_attn_implementation", None)
        raise ValueError(
            f"config.recall_mask is True, and {type(model.lm.model).__name__} cannot follow the mask of the single-pass mode: "
            f"its attention is {attention!r}, and a window must be wider than {config.positions_per_segment} positions. "
            "Load it with attn_implementation='sdpa' or 'eager'. Without the mask a model that was trained with it "
            "reads otherwise; for a new one, set recall_mask=None."
        )


def check_loss_arguments(config, labels, logits_to_keep, score_from):
    counts = isinstance(logits_to_keep, Integral) and not isinstance(logits_to_keep, bool) and logits_to_keep >= 0
    if not counts and not isinstance(logits_to_keep, torch.Tensor):
        raise ValueError(
            f"logits_to_keep is {logits_to_keep!r}; it counts the last positions, 0 is all of them, or it is a tensor "
            "that lists positions."
        )
    if labels is None and score_from is not None:
        raise ValueError(f"score_from is {score_from}, and it selects labels; pass labels, or leave it out.")
    last = config.segment_length - 1
    if score_from is not None and not 0 <= score_from <= last:
        raise ValueError(f"score_from is {score_from}; it is a position within a segment, 0 to {last}.")


def first_position(logits_to_keep, tokens):
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


def check_state(model, state, rows):
    if not hasattr(state, "signature"):  # not isinstance: a model of remote code has an HMTState of its own
        raise ValueError(f"state is a {type(state).__name__}; it must be the HMTState of an earlier call, out.state.")
    differing = {name: value for name, value in model._signature().items() if state.signature.get(name) != value}
    if differing:
        of_state = {name: state.signature.get(name) for name in differing}
        raise ValueError(
            f"The state belongs to another model or setting: it has {of_state}, this model {differing}. "
            "Its memories mean nothing here; start a new state."
        )
    if len(state.bank) != rows:
        raise ValueError(f"The state has {len(state.bank)} rows and input_ids {rows}; they must be the same texts.")
    config, open_tokens = model.config, state.position % model.config.segment_length
    incomplete_query = state.segment > 0 and 0 < open_tokens < config.summary_length
    if config.recall and config.recall_mode == "paper" and incomplete_query:
        raise ValueError(
            f"The state stops after {open_tokens} tokens of a segment, and recall_mode='paper' reads the first "
            f"{config.summary_length} before it predicts them: what was predicted so far would change. End chunks "
            "at multiples of segment_length, or use recall_mode='three_pass' (also to generate beyond a segment)."
        )


def check_padding(model, mask, state, use_cache):
    if not mask.any() or not (use_cache or mask.any(1).all()):
        raise ValueError("A row of attention_mask is all padding: there is nothing to read. Remove the row.")
    if (mask[:, 1:] > mask[:, :-1]).sum(1).add(mask[:, 0]).max() > 1:
        raise ValueError("attention_mask has padding between tokens; padding must be on one side, best on the left.")
    if model.config.recall_mode != "paper":
        return
    if not model.lm.sees_padding:
        raise NotImplementedError(
            f"{type(model.lm.model).__name__} ignores the attention mask, so recall_mode='paper' would read padding "
            "as text. Use recall_mode='three_pass', rows of equal length, or batch size 1."
        )
    if not mask[:, -1].all() or (state.open_mask.any(1) & ~mask[:, 0]).any():
        raise ValueError(
            "The rows are padded on the right, and recall_mode='paper' would put padding into the query, the loss "
            "or the memory. Pad on the left: tokenizer.padding_side = 'left', or use recall_mode='three_pass'."
        )


__all__ = [
    "check_generation",
    "check_inputs",
    "check_loss_arguments",
    "check_settings",
    "first_position",
    "settle_mask",
]
