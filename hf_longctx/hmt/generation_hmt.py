"""Generation with `HMTWrapper`: an `HMTState` replaces the key/value cache."""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from .checks_hmt import check_generation, same_state
from .state_hmt import HMTState


class HMTGenerationMixin(GenerationMixin):
    """A `GenerationMixin` whose cache is an `HMTState`."""

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
        """Return the inputs of a generation step.

        The first step continues from the `state`, if given, and reads the input. Each later step reads one new token.
        Before 5.24, transformers passes the state of the previous step as `state`. Since 5.24, it uses `cache`.
        """
        state = state if cache is None else cache
        if is_first_iteration and state is not None and read_again:
            input_ids, attention_mask = unread(input_ids, attention_mask, state)
        if is_first_iteration and attention_mask is not None and not attention_mask[:, -1].all():
            raise ValueError(
                "`attention_mask` must end with a token in each row, got padding. Remove rows that are all padding, "
                "and pad on the left: tokenizer.padding_side = 'left'."
            )
        if state is not None and not kwargs.get("use_cache", True):
            raise ValueError(
                "`use_cache` must be True to continue a state, got False. Leave use_cache at True, or generate from "
                "the whole sequence without a state."
            )
        if state is not None and not is_first_iteration:
            input_ids = input_ids[:, -1:]
            attention_mask = None
        options = {name: kwargs[name] for name in ("use_cache", "logits_to_keep") if name in kwargs}
        return {"input_ids": input_ids, "attention_mask": attention_mask, "state": state, **options}

    def load_custom_generate(self, pretrained_model_name_or_path=None, trust_remote_code=None, **kwargs) -> Any:
        """Raise OSError, because untrusted code of the repository would replace `generate`."""
        raise OSError(
            f"HMT does not run custom_generate/generate.py of {pretrained_model_name_or_path}. Read it, and "
            "pass its `generate` function: model.generate(..., custom_generate=generate)."
        )

    def init_continuous_batching(self, *args, **kwargs) -> Any:
        """Raise NotImplementedError, because a paged key/value cache cannot store the memory."""
        raise NotImplementedError(
            "HMT does not support continuous batching, because a paged key/value cache cannot store its "
            "memory. Use generate() with a padded batch, and start servers without --continuous-batching."
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
        """Generate as in transformers. With `return_dict_in_generate=True`, the output has the `HMTState` as `state`.

        The state includes all tokens of a sequence except the last one. A row that ends early reads padding until all
        rows have ended, so its state includes padding. To continue from a row's state, generate the rows one by one.
        Beam search does not return a `state`, because the rows of the state would be beams.

        Args:
            args, kwargs: as in transformers. `state` is also accepted: `input_ids` continue this `HMTState`.
            cache: an `HMTState` that has already read the first tokens of each row of `input_ids`. These tokens are
                not read again.
            past_key_values: alias of `cache`, used before transformers 5.24.

        Raises:
            ValueError: both `state` and `cache` are given, or `input_ids` do not contain a new token.
            TypeError: `cache` is not an `HMTState`.
        """
        mixin: Any = super()  # Any, because type checkers cannot resolve the mixin
        cache = same_state(cache, past_key_values)
        if cache is not None:
            kwargs |= {"state": same_state(kwargs.get("state"), cache), "read_again": True}
        output = mixin.generate(*args, **kwargs)
        if isinstance(output, GenerateDecoderOnlyOutput):
            after = output.get("cache", output.get("past_key_values"))
            if after is not None:  # with use_cache=True
                output["state"] = output["cache"] = after
        return output

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **model_kwargs
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Repeat the inputs as in transformers, and also the rows of a `state`."""
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
    """Drop the tokens of `input_ids` (B, T) that `state` has read. If a row becomes empty, raise ValueError."""
    lengths = torch.tensor(state.lengths, device=input_ids.device)[:, None]
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    counted = torch.ones_like(mask) if state.open_mask is not None else mask
    new = mask * (counted.cumsum(1) > lengths) if mask.shape == input_ids.shape else torch.zeros_like(mask)
    if not new.any(1).all():
        raise ValueError(
            f"The cache has read {list(state.lengths)} tokens. `input_ids` must contain more tokens, got shape "
            f"{tuple(input_ids.shape)}. Pass the whole sequence of each row. To pass only the new tokens, use `state` "
            "instead of `cache`."
        )
    first = int(new.argmax(1).min())
    return input_ids[:, first:], None if attention_mask is None and new[:, first:].all() else new[:, first:]
