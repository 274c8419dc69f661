"""The interface between HMT and its backbone: any transformers causal LM that accepts `inputs_embeds`.

HMT needs the last hidden states of a pass, and sometimes logits and a key/value cache. The last hidden states are the
`last_hidden_state` of the base model. They are taken after the final norm (OPT: also after the output projection). If
logits are needed, the whole causal LM runs, including the soft caps and scales of its head. A forward hook on the base
model then captures the hidden states.
"""

import inspect
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .compat_hmt import cache_name
from .graphs_hmt import PassGraphs


# Layer types whose cache can be extended by several tokens at a time, including padding. FoX layers have the
# type "hybrid". Their token shift skips padding.
_CONTINUED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"}


class Backbone:
    """The interface through which HMT calls a causal LM.

    Args:
        model: a transformers causal LM, or a PEFT model of one. `HMTWrapper` registers it as a submodule.

    Raises:
        TypeError: the model is not a transformers causal LM.
        ValueError: one of: the model is an encoder-decoder; it does not accept `inputs_embeds`; it uses a
            prompt-learning method of PEFT; it is not causal.
    """

    def __init__(self, model: Any):  # Any: type checkers assume that a module's attributes are tensors
        if getattr(model, "active_peft_config", None) is not None:
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    f"{type(model).__name__} uses {model.active_peft_config.peft_type}. This method adds its own "
                    "positions to the input, but HMT builds the input itself. Use LoRA or another method that "
                    "changes weights."
                )
            model = model.get_base_model()
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            raise TypeError(
                f"The backbone must be a transformers causal LM, got a {name}. Pass a model such as LlamaForCausalLM, "
                "or its name or path."
            )
        self.forward_arguments = frozenset(inspect.signature(model.forward).parameters)
        if model.config.is_encoder_decoder or "inputs_embeds" not in self.forward_arguments:
            raise ValueError(
                f"{name} must be a decoder, and its forward must take inputs_embeds. HMT puts memory embeddings among "
                "the tokens. Use a causal LM such as LlamaForCausalLM."
            )
        self.model: Any = model
        self.base: Any = model.get_decoder()  # OPTForCausalLM calls its decoder, not its base_model
        if self.base is model.get_output_embeddings():  # ModernBertDecoderForCausalLM names its head `decoder`
            self.base = model.base_model
        if self.base is model:  # for text models of multimodal architectures, such as Llama4ForCausalLM
            self.base = getattr(model, "model", model)
        self.width = model.get_input_embeddings().weight.shape[-1]
        tables: list[Any] = [getattr(module, "position_embeddings", None) for module in model.modules()]
        # RoBERTa reserves its first positions for padding. Count the others. None: no positions are reserved.
        counts = [x.num_embeddings - x.padding_idx - 1 for x in tables if getattr(x, "padding_idx", None) is not None]
        self.positions = min(counts, default=None)
        # whether `forward` accepts position ids that start at 0
        self.counts_from_0 = "position_ids" in self.forward_arguments and self.positions is None
        layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        self.stateful = getattr(model, "_is_stateful", False)
        extends = cache_name(type(model)) is not None and not self.stateful and layers <= _CONTINUED_LAYERS
        has_dynamic_cache = getattr(model, "_supports_default_dynamic_cache", bool)  # only generative models have it
        # results of test passes; None before
        self._continues: bool | None = None if extends and has_dynamic_cache() else False
        self._hides: bool | None = None
        self.graphs = PassGraphs()
        self._check_causal()

    def _check_causal(self) -> None:
        """Raise ValueError if the last of three embeddings changes the first hidden state."""
        if self.stateful or not self.has_data:  # recurrent backbones are causal by construction
            return
        with self._probing(3) as embeds:
            changed = torch.cat([embeds[:, :2], -embeds[:, 2:]], 1)
            first, second = (self._read(x)[0, 0] for x in (embeds, changed))
        if not equal_up_to_rounding(second, first):
            raise ValueError(
                f"{type(self.model).__name__} must be causal, but its first position attends to a later one. "
                "Configure it for language modeling (BERT and its variants: is_decoder=True; XLNet: attn_type='uni'), "
                "or use another backbone."
            )

    @property
    def continues(self) -> bool:
        """Whether a pass over several tokens and padding can extend a `DynamicCache`.

        ProphetNet extends its cache by one token at a time. RoBERTa and its variants number the positions of
        `inputs_embeds` from the start in each pass. For such backbones, HMT reads an open segment again in each call.
        """
        if self._continues is None and self.has_data:
            try:
                with self._probing(6) as embeds:
                    # With small embeddings, wrong position embeddings make a difference in bfloat16 too.
                    embeds, kv_cache = 0.01 * embeds, DynamicCache(config=self.model.config)
                    self._read(embeds[:, :3], kv_cache=kv_cache)
                    continued = self._read(embeds[:, 3:], kv_cache=kv_cache)
                    self._continues = equal_up_to_rounding(continued, self._read(embeds)[:, 3:])
            except Exception:  # a backbone that cannot extend its cache may raise any error
                self._continues = False
        return self._continues is not False

    @property
    def checkpoints_layers(self) -> bool:
        """Whether gradient checkpointing is active in the backbone's layers. If so, the layers do not use a cache."""
        return torch.is_grad_enabled() and any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in self.model.modules()
        )

    def keeps_all_keys(self, positions: int) -> bool:
        """Return whether each position in a pass of length `positions` can attend to all earlier positions."""
        config = self.model.config.get_text_config()
        if self.stateful or config.model_type == "fox" or rotates_by_length(config, positions):
            return False  # FoX gates decay the keys with each token, regardless of position ids
        if "local" in (getattr(config, "attention_layers", None) or ()) and config.window_size <= positions:
            return False  # GPT-Neo's cache layers do not report the window
        layers = DynamicCache(config=self.model.config).layers
        return all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            and getattr(layer, "sliding_window", math.inf) > positions
            for layer in layers
        )

    @property
    def device(self) -> torch.device:
        """The device on which tokens are embedded. accelerate moves offloaded embeddings there."""
        embedding = self.model.get_input_embeddings()
        loaded = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
        return embedding.weight.device if loaded is None else torch.device(loaded)

    @property
    def has_data(self) -> bool:
        """Whether the weights contain data. Weights on the meta device do not."""
        return self.device.type != "meta"

    @property
    def attention(self) -> str | None:
        """The attention implementation."""
        return getattr(self.model.config, "_attn_implementation", None)

    @property
    def takes_mask(self) -> bool:
        """Whether the attention implementation accepts a 4D mask. FlashAttention does not."""
        return self.attention in (None, "eager", "sdpa")

    def can_hide(self, positions: int, thorough: bool = False) -> bool:
        """Return whether a mask can hide a prompt from some tokens in a pass over `positions` positions.

        The config, the arguments of `forward` and test passes over six positions must all allow it. If a test pass
        fails, raise ValueError.

        Args:
            thorough: whether to test passes over all positions too. They find attention windows that the config does
                not report.
        """
        if not self.keeps_all_keys(positions) or not self.counts_from_0:
            return False
        try:
            if self._hides is None:
                self._hides = self._continues is not False and self._probe_hiding(6)
            return self._hides and (not thorough or self._probe_hiding(positions))
        except Exception as error:
            raise ValueError(
                f"{type(self.model).__name__} failed in a test pass with a 4D attention mask. Fix the cause, or set "
                "HMTConfig(reread=True). Every backbone supports reread=True."
            ) from error

    def _probe_hiding(self, positions: int) -> bool:
        """Return whether hiding a prompt with a mask gives the same hidden states as reading it later.

        The tested pass reads [prompt, early tokens, late tokens]. Its mask hides the prompt from the early tokens. The
        reference reads the early tokens, and then extends the cache with [prompt, late tokens].
        """
        half, kv_cache = positions // 2, DynamicCache(config=self.model.config)
        with self._probing(positions) as embeds:
            places = torch.arange(positions, device=embeds.device)[None]
            mask = hide_prompt(positions, half - 1, 0, embeds.dtype, embeds.device)
            whole = self._read(embeds, mask=mask, positions=places)
            hidden = self._read(embeds[:, 1:half], positions=places[:, 1:half], kv_cache=kv_cache)
            mask = hide_prompt(1 + positions - half, 0, half - 1, embeds.dtype, embeds.device)
            rest, places, expected = (torch.cat([x[:, :1], x[:, half:]], 1) for x in (embeds, places, whole))
            seeing = self._read(rest, mask=mask, positions=places, kv_cache=kv_cache)
        return equal_up_to_rounding(hidden, whole[:, 1:half]) and equal_up_to_rounding(seeing, expected)

    def check_hides(self, positions: int, extends: bool = True) -> None:
        """Raise ValueError if a mask cannot hide the prompt in a segment of `positions` positions.

        Args:
            extends: whether all tokens that must not attend to the prompt are already in a cache. If the attention
                implementation does not accept a 4D mask, this must be True (`read_prompt`).
        """
        if not self.has_data:
            return
        name = type(self.model).__name__
        if not self.can_hide(positions):
            raise ValueError(
                f"config.reread=False is not supported by {name}: a mask cannot hide a prompt in this backbone. For a "
                "new model, set reread=True. For a trained model, use a version of transformers in which the mask "
                "hides the prompt."
            )
        if not self.takes_mask and not extends:
            raise ValueError(
                f"config.reread=False needs a 4D mask, and attention {self.attention!r} does not accept one. Set "
                "attn_implementation='sdpa'. The mask is not needed if recall_tokens is None and gradient checkpointing "
                "of the layers is off."
            )

    def _read(self, embeds: Tensor, **inputs) -> Tensor:
        """Return the last hidden states of `run`. `embeds` is cloned, because CTRL overwrites its input."""
        return self.run(embeds.clone(), **inputs)[1]

    @contextmanager
    def _probing(self, positions: int) -> Iterator[Tensor]:
        """Yield test embeddings, (1, positions, d). Gradients, dropout and autocast are disabled within the context.

        SDPA or eager attention is used, because others may not support 4D masks, the device or the dtype.
        """
        training = [module for module in self.model.modules() if module.training]
        config, attention = self.model.config, self.attention
        self.model.eval()
        try:
            if not self.takes_mask:
                config._attn_implementation = "sdpa" if self.model._supports_sdpa else "eager"
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                like = self.embed(torch.zeros(1, positions, dtype=torch.long, device=self.device))
                yield torch.arange(like.numel(), device=like.device).cos().view(like.shape).to(like.dtype)
        finally:
            if self.attention != attention:
                config._attn_implementation = attention
            for module in training:
                module.training = True

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings that the backbone's first layer receives for token ids, (B, T) -> (B, T, d)."""
        return self.model.get_input_embeddings()(ids)

    def run(
        self,
        embeds: Tensor,
        mask: Tensor | None = None,
        keep: Tensor | None = None,
        kv_cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Run the backbone once.

        Args:
            embeds: embeddings, (B, T, d).
            mask: one of: (B, cached + T), bool, False on padding; the 4D mask of `hide_prompt`; None.
            keep: positions whose logits are computed, (n,), long. None: no logits are computed.
            kv_cache: a `Cache` to extend, or None.
            positions: position ids, (B, T), long; ignored unless `counts_from_0`. None: the backbone's default.

        Returns:
            Logits (B, n, V), and the last hidden states (B, T, d). If `keep` is None, the logits are None.

        Raises:
            ValueError: the hidden states and the embeddings differ in width.
        """
        inputs = {"inputs_embeds": embeds, "use_cache": kv_cache is not None}
        if mask is not None:
            inputs["attention_mask"] = mask.expand(len(embeds), -1, -1, -1) if mask.dim() == 4 else mask.long()
        if kv_cache is not None:
            inputs[cache_name(type(self.base if keep is None else self.model)) or "cache"] = kv_cache
        if positions is not None and self.counts_from_0:
            inputs["position_ids"] = positions
        logits, base_outputs = None, []
        # Several threads may run the same model, so each hook stores only the outputs of its own thread. Dynamo cannot
        # trace get_ident.
        thread = None if torch.compiler.is_compiling() else threading.get_ident()

        def keep_output(module: nn.Module, args: tuple, output: tuple) -> None:
            if torch.compiler.is_compiling() or thread in (None, threading.get_ident()):
                base_outputs.append(output)

        hook = self.base.register_forward_hook(keep_output)
        try:
            if keep is None:
                self.base(**inputs)
            elif "logits_to_keep" in self.forward_arguments:
                logits = self.model(**inputs, logits_to_keep=0 if len(keep) == embeds.shape[1] else keep).logits
            else:
                logits = self.model(**inputs).logits[:, keep]
        finally:
            hook.remove()
        hidden = base_outputs[-1][0]
        if hidden.shape[-1] != self.width:
            raise ValueError(
                f"{type(self.model).__name__} must return hidden states of width {self.width}, got "
                f"{hidden.shape[-1]}. HMT uses hidden states as embeddings, so both need the same width. Use another "
                "backbone."
            )
        return logits, hidden

    def read_prompt(self, prompt: Tensor, kv_cache: Cache) -> Cache:
        """Read a prompt (B, 1, d) alone, and return a cache of the prompt followed by a copy of `kv_cache`.

        The next pass attends to both without a mask, and the prompt has attended only to itself.
        """
        joined = DynamicCache(config=self.model.config)
        places = torch.zeros(prompt.shape[:2], dtype=torch.long, device=prompt.device)
        self.run(prompt, kv_cache=joined, positions=places)
        layers: list[Any] = kv_cache.layers
        for i, layer in enumerate(layers):
            joined.update(layer.keys, layer.values, i)
        return joined

    def versions(self) -> dict[str, int]:
        """Return the number of in-place changes of each parameter. Inference tensors count as 0."""
        parameters = self.model.named_parameters()
        return {name: 0 if value.is_inference() else value._version for name, value in parameters}

    @torch.no_grad()
    def embedding_std(self) -> float:
        """Return the standard deviation of the outputs of `embed`, which includes a scale such as Gemma's.

        At most 4096 tokens are measured. On the meta device, return the config's `initializer_range`.
        """
        if not self.has_data:
            return getattr(self.model.config.get_text_config(), "initializer_range", 0.02)
        vocabulary, device = self.model.get_input_embeddings().weight.shape[0], self.device
        ids = torch.linspace(0, vocabulary - 1, min(vocabulary, 4096), device=device).long()
        return self.embed(ids[None]).float().std().item()


def hide_prompt(columns: int, hidden_from: int, cached: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive causal mask for a prompt and the positions after it, (1, 1, columns, cached + columns).

    The prompt follows `cached` positions and attends only to itself. The next `hidden_from` positions do not attend to
    the prompt.
    """
    visible = torch.ones(columns, cached + columns, dtype=torch.bool, device=device).tril(cached)
    visible[0, :cached] = False
    visible[1 : 1 + hidden_from, cached] = False
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def rotates_by_length(config: Any, positions: int) -> bool:
    """Return whether RoPE frequencies differ between a pass over `positions` positions and a shorter pass."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in parameters.values() if all(isinstance(x, dict) for x in parameters.values()) else [parameters]:
        default = getattr(config, "max_position_embeddings", math.inf)
        longest = entry.get("original_max_position_embeddings") or default
        if entry.get("rope_type") in ("longrope", "dynamic") and positions > longest:
            return True
    return False


def equal_up_to_rounding(x: Tensor, y: Tensor) -> bool:
    """Return whether x and y are equal up to rounding."""
    # at least 3e-4, because a mixture of experts may group positions differently in two passes
    tolerance = max(8 * torch.finfo(y.dtype).eps, 3e-4)
    return bool((x.float() - y.float()).norm() <= tolerance * y.float().norm())
