"""How `generate` of transformers drives `HMTWrapper`: a state in place of a key/value cache."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from .checks_hmt import check_generation, same_state
from .compat_hmt import RENAMED
from .state_hmt import HMTState


class HMTGenerationMixin(GenerationMixin):
    """`GenerationMixin` whose cache is an `HMTState`."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        state: HMTState | None = None,
        cache: HMTState | None = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool = False,
        read_again: bool = False,
        **kwargs,
    ) -> dict[str, Any]:
        """Give the whole prompt first (it may continue a `state`), then one new token at a time.

        What a call returned comes back as `state`, and from transformers 5.24 on as `cache`.
        """
        state = state if cache is None else cache
        if is_first_iteration and state is not None and read_again:
            input_ids, attention_mask = unread(input_ids, attention_mask, state)
        if is_first_iteration and attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError(
                "A row of attention_mask ends with padding, and generation would continue it. Remove rows that are all "
                "padding, and pad on the left: tokenizer.padding_side = 'left'."
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

    def load_custom_generate(self, pretrained_model_name_or_path=None, trust_remote_code=None, **kwargs) -> Any:
        """Raise: a repository's code would replace `generate`, although only the code of this model is trusted."""
        raise OSError(
            f"HMT does not run custom_generate/generate.py of {pretrained_model_name_or_path}. Read it, and pass its "
            "function: model.generate(..., custom_generate=function)."
        )

    def init_continuous_batching(self, *args, **kwargs) -> Any:
        """Raise: pages of keys and values do not hold a memory."""
        raise NotImplementedError(
            "HMT does not support continuous batching: its memory is a state, and not pages of keys and values. Use "
            "generate() with a padded batch, and start servers without --continuous-batching."
        )

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args, **kwargs
    ) -> None:
        check_generation(generation_config)
        mixin: Any = super()
        return mixin._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def generate(
        self, *args, cache: HMTState | None = None, past_key_values: HMTState | None = None, **kwargs
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate as in transformers. With `return_dict_in_generate=True` the output has the `HMTState` as `state`.

        It has read everything but the last token of the sequences. Rows that end before others read padding until all
        have ended: generate such rows one by one to continue their states. A beam search does not return a `state`:
        its rows are beams, not the sequences.

        Args:
            args, kwargs: those of transformers, and `state`, an `HMTState` that the ids continue.
            cache: an `HMTState` that has read the beginning of each row of the ids, which is not read again.
            past_key_values: the former name of `cache`.

        Raises:
            ValueError: both a `state` and a `cache`, or ids without a new token.
            TypeError: `cache` is not an `HMTState`.
        """
        mixin: Any = super()  # transformers hides the type of its mixin
        cache = same_state(cache, past_key_values)
        if cache is not None:
            kwargs |= {"state": same_state(kwargs.get("state"), cache), "read_again": True}
        output = mixin.generate(*args, **kwargs)
        if isinstance(output, GenerateDecoderOnlyOutput):
            output["state"] = output["cache" if RENAMED else "past_key_values"]
            output["cache"] = output["state"]
        return output

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **model_kwargs
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Expand as in transformers, and also repeat the rows of a `state`."""
        state = model_kwargs.get("state")
        if expand_size > 1 and state is not None:
            index = torch.arange(len(state.lengths)).repeat_interleave(expand_size)
            model_kwargs["state"] = state.select_rows(index)
        mixin: Any = super()
        return mixin._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the cache is an HMTState


def unread(input_ids: Tensor, attention_mask: Tensor | None, state: HMTState) -> tuple[Tensor, Tensor | None]:
    """Cut from the tokens of whole texts, (B, T), what a state has read; ValueError if nothing is left of a row."""
    lengths = torch.tensor(state.lengths, device=input_ids.device)[:, None]
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    counted = torch.ones_like(mask) if state.open_mask is not None else mask
    new = mask * (counted.cumsum(1) > lengths) if mask.shape == input_ids.shape else torch.zeros_like(mask)
    if not new.any(1).all():
        raise ValueError(
            f"The cache has read {list(state.lengths)} tokens, and input_ids, of shape {tuple(input_ids.shape)}, holds "
            "no more. It must hold the whole text of each row; to give new tokens only, pass state= in its place."
        )
    first = int(new.argmax(1).min())
    return input_ids[:, first:], None if attention_mask is None and new[:, first:].all() else new[:, first:]


__all__ = ["HMTGenerationMixin"]
