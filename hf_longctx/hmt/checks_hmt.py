"""Check the arguments of `HMTWrapper`, and raise errors for mistakes that would otherwise be silent."""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .reader_hmt import Reader
from .state_hmt import HMTState


# Unsupported fields of `GenerationConfig`, each with its only accepted value and the reason
_UNSUPPORTED = {
    "output_hidden_states": (False, "a segment has several passes; call model.backbone for hidden states"),
    "output_attentions": (False, "a segment has several passes; call model.backbone for attentions"),
    "guidance_scale": (1, "the unconditional sequence would need its own state"),
    "cache_implementation": ("dynamic", "the cache is an HMTState, and its size is bounded already"),
}
# Arguments that transformers and its clients pass to every model. HMTWrapper ignores them if they are None or False.
_FOR_OTHER_MODELS = {
    *("cache_position", "inputs_embeds", "output_attentions", "output_hidden_states", "position_ids", "return_dict"),
    *("return_loss", "token_type_ids"),
}


def check_generation(config: GenerationConfig) -> None:
    """Raise ValueError for generation settings that HMTWrapper does not support."""
    for name, (neutral, reason) in _UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(f"HMTWrapper.generate() does not support {name}={value!r}: {reason}. Omit {name}.")


def same_state(*states: object) -> HMTState | None:
    """Return the state passed as `state`, `cache` or `past_key_values`. If none is passed, return None."""
    given: list[Any] = [x for x in states if x is not None]
    if len(given) > 1:
        raise ValueError(
            "`state`, `cache` and `past_key_values` are three names of the same argument. Pass only one of them."
        )
    if given and not isinstance(given[0], HMTState):
        raise TypeError(
            f"`cache` must be the HMTState of an earlier call, got a {type(given[0]).__name__}. Pass the `state` that "
            "the earlier call returned. Prefix tuning of PEFT is not supported: use LoRA."
        )
    return given[0] if given else None


def check_call(
    reader: Reader,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    labels: Tensor | None,
    state: HMTState | None,
    use_cache: bool,
    logits_to_keep: int | Tensor,
    score_from: int | None,
    keywords: dict,
) -> Tensor | None:
    """Check the arguments of `HMTWrapper.forward`, and return `attention_mask` as bool. If nothing is padding, None.

    `keywords` are the arguments that `forward` does not have.
    """
    for name, value in keywords.items():
        if name not in _FOR_OTHER_MODELS or not (value is None or value is False):
            raise ValueError(
                f"HMTWrapper does not support the argument {name}. Pass input_ids, attention_mask and labels. Packed "
                "rows, the trainers of TRL, and prompt tuning of PEFT are not supported. Train with Trainer of "
                "transformers or with hf-longctx finetune --recipe hmt, and use LoRA."
            )
    if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
        shape = None if input_ids is None else tuple(input_ids.shape)
        raise ValueError(f"`input_ids` must have shape (batch, tokens) with at least one token, got {shape}.")
    for name, value in (("attention_mask", attention_mask), ("labels", labels)):
        if value is not None and value.shape != input_ids.shape:
            raise ValueError(
                f"`{name}` must have the same shape as input_ids, got {tuple(value.shape)} instead of "
                f"{tuple(input_ids.shape)}. Pass values only for the tokens of this call."
            )
    if score_from is not None and (labels is None or score_from not in range(reader.length)):
        raise ValueError(
            f"`score_from` must be a position from 0 to {reader.length - 1} within a segment, got {score_from!r}. "
            "`score_from` also requires labels."
        )
    if not isinstance(logits_to_keep, Tensor) and (not isinstance(logits_to_keep, Integral) or logits_to_keep < 0):
        raise ValueError(
            f"`logits_to_keep` must be a non-negative int or a tensor of positions, got {logits_to_keep!r}."
        )
    if state is not None:
        check_state(reader, state)
    mask = None if attention_mask is None or (attention_mask == 1).all() else attention_mask == 1
    if mask is not None:
        if not (mask | (attention_mask == 0)).all():
            raise ValueError("`attention_mask` must be 1 on tokens and 0 on padding, got other values.")
        check_padding(reader, mask, state, use_cache)
    return mask


def check_state(reader: Reader, state: HMTState) -> None:
    """Raise ValueError if the state is from another model, or if paper mode cannot continue from the state."""
    own, found = reader.signature, state.signature  # states of earlier versions can have more settings
    if own != found and (differing := [name for name in own | found if own.get(name) != found.get(name)]):
        raise ValueError(
            f"The state is from a model with other settings: { {name: found.get(name) for name in differing} }. This "
            f"model has { {name: own.get(name) for name in differing} }. Start a new state."
        )
    # FSDP replaces the weight with its own type, and casts it on use. The dtype of such a weight is not checked.
    if state.dtype not in (None, reader.dtype) and type(reader.embed.weight) is torch.nn.Parameter:
        raise ValueError(
            f"`state` must have the dtype {reader.dtype} of the model, got {state.dtype}. Save the state and load it "
            "with HMTState.load(path, model), or load the model in the state's dtype."
        )
    open_tokens = state.position % reader.length
    incomplete_query = state.segment > 0 and 0 < open_tokens < reader.j
    if not reader.single_pass and reader.config.recall and incomplete_query:
        raise ValueError(
            f"The state ends {open_tokens} tokens into a segment. recall_mode='paper' reads the first "
            f"{reader.j} tokens of a segment before predicting any of them. New tokens would change "
            "the predictions of an earlier call. End chunks at multiples of segment_length. To generate beyond a "
            "segment, train a model with recall_mode='single_pass'."
        )


def check_padding(reader: Reader, mask: Tensor, state: HMTState | None, use_cache: bool) -> None:
    """Raise an error for padding between tokens, all-padding rows, and padding that paper mode would read."""
    if not mask.any() or not (use_cache or mask.any(1).all()):
        raise ValueError(
            "Each row of `attention_mask` must contain a token, got a row that is all padding. Remove the row."
        )
    if (mask[:, 1:] > mask[:, :-1]).sum(1).add(mask[:, 0]).max() > 1:
        raise ValueError(
            "`attention_mask` must have padding on one side, got padding between tokens. Pad on the left."
        )
    if reader.single_pass:
        return
    if reader.lm.model.config.model_type == "rwkv":
        raise NotImplementedError(
            f"{type(reader.lm.model).__name__} ignores the attention mask, so recall_mode='paper' would read padding as "
            "tokens. Use rows of equal length, batch size 1, or recall_mode='single_pass'."
        )
    opened = state is not None and state.open_ids.shape[1] > 0 and not mask[:, 0].all()
    if opened and state is not None and state.open_mask is not None:
        opened = bool((state.open_mask.any(1) & ~mask[:, 0]).any())
    if opened or not mask[:, -1].all():
        raise ValueError(
            "The rows are padded on the right. With recall_mode='paper', this padding would change the query, the "
            "loss or the memory. Set tokenizer.padding_side = 'left', or use recall_mode='single_pass'."
        )
