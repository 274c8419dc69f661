"""The interface between HMT and its backbone: token embeddings, a pass over embeddings, last hidden states, caches.

Any causal LM of transformers that takes `inputs_embeds` can be a backbone. The last hidden states (after the final
norm, and after OPT's output projection) are the `last_hidden_state` of the base model. When logits are needed too, the
whole causal LM runs, so that the soft caps and scales of its head apply, and a forward hook on the base model captures
the hidden states. A pass never builds the list of all hidden states, and builds a key/value cache only on request.
"""

import inspect
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .compat_hmt import cache_name
from .graphs_hmt import PassGraphs


# Layers whose cache several tokens can extend under an attention mask. "hybrid" is FoX, whose token shift skips
# padding.
_CONTINUED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"}
_LOGITS_AT_ONCE = 2**23  # 32 MiB in float32, enough rows for a fast product


class Backbone:
    """The interface through which HMT calls a causal LM. The wrapper registers the module; this class refers to it.

    Args:
        model: a causal LM, or a PEFT model around one.

    Raises:
        TypeError: the model is not a causal LM of transformers.
        ValueError: the model is an encoder-decoder, does not take `inputs_embeds`, uses prompt-learning PEFT, or is
            not causal.
    """

    def __init__(self, model: Any):  # Any: type checkers take a module's attributes for tensors
        if getattr(model, "active_peft_config", None) is not None:
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    f"{type(model).__name__} uses {model.active_peft_config.peft_type}, which adds its own positions "
                    "to the input; HMT builds the input itself. Use LoRA or another method that changes weights."
                )
            model = model.get_base_model()
        name = type(model).__name__
        if not isinstance(model, PreTrainedModel) or not model.can_generate():
            raise TypeError(
                "The backbone must be a causal LM of transformers, such as LlamaForCausalLM, or the name or path of "
                f"one, got a {name}."
            )
        self.forward_arguments = frozenset(inspect.signature(model.forward).parameters)
        if model.config.is_encoder_decoder or "inputs_embeds" not in self.forward_arguments:
            raise ValueError(
                f"{name} must be a decoder whose forward takes inputs_embeds, because HMT puts memory embeddings "
                "among the tokens. Use a causal LM such as LlamaForCausalLM."
            )
        self.model: Any = model
        self.base: Any = model.get_decoder()  # not base_model: OPTForCausalLM calls the decoder inside its base model
        if self.base is model.get_output_embeddings():  # ModernBertDecoderForCausalLM names its head `decoder`
            self.base = model.base_model
        if self.base is model:  # a text model within a larger architecture, such as Llama4ForCausalLM
            self.base = getattr(model, "model", model)
        self.width = model.get_input_embeddings().weight.shape[-1]
        tables: list[Any] = [getattr(module, "position_embeddings", None) for module in model.modules()]
        # Number of usable positions where the first ones are reserved for padding, as in RoBERTa; else None
        counts = [x.num_embeddings - x.padding_idx - 1 for x in tables if getattr(x, "padding_idx", None) is not None]
        self.positions = min(counts, default=None)
        layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        self.stateful = getattr(model, "_is_stateful", False)
        # Results of probes; None: not probed yet
        has_dynamic_cache = getattr(model, "_supports_default_dynamic_cache", bool)  # only generative models define it
        extends = cache_name(type(model)) is not None and not self.stateful and layers <= _CONTINUED_LAYERS
        self._continues: bool | None = None if extends and has_dynamic_cache() else False
        self._hides: bool | None = None
        # Not probed for RWKV, whose eval() changes its weights in place
        self._head_alone_makes_logits = False if model.config.model_type == "rwkv" else None
        self.graphs = PassGraphs()
        self._check_causal()

    def _check_causal(self) -> None:
        """Raise ValueError if the first of three positions changes with the last one.

        Recurrent backbones are causal by construction, and are not probed.
        """
        if self.stateful or not self.has_data:
            return
        with self._probing(3) as embeds:
            changed = torch.cat([embeds[:, :2], -embeds[:, 2:]], 1)
            first, second = (self._read(x)[0, 0] for x in (embeds, changed))
        if not equal_up_to_rounding(second, first):
            raise ValueError(
                f"{type(self.model).__name__} must be causal, but its first position sees a later one. Configure it "
                "for language modeling (BERT and its variants: is_decoder=True; XLNet: attn_type='uni'), or use "
                "another backbone."
            )

    @property
    def continues(self) -> bool:
        """Whether several tokens, some of them padding, can extend a `DynamicCache`.

        Otherwise, HMT reads an open segment again in each call. A probe compares a pass over six positions with a pass
        over three and three more that extend its cache. ProphetNet extends its cache by one token at a time, and
        RoBERTa and its variants number `inputs_embeds` from the start, whatever is in the cache.
        """
        if self._continues is None and self.has_data:
            try:
                with self._probing(6) as embeds:
                    # scaled down, so that wrong position embeddings show in bfloat16 too
                    embeds, kv_cache = 0.01 * embeds, DynamicCache(config=self.model.config)
                    self._read(embeds[:, :3], kv_cache=kv_cache)
                    continued = self._read(embeds[:, 3:], kv_cache=kv_cache)
                    self._continues = equal_up_to_rounding(continued, self._read(embeds)[:, 3:])
            except Exception:  # a backbone that cannot extend its cache by several tokens may raise anything
                self._continues = False
        return self._continues is not False

    @property
    def checkpoints_layers(self) -> bool:
        """Whether layers are checkpointed in a call, which then skip the cache."""
        return torch.is_grad_enabled() and any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in self.model.modules()
        )

    def keeps_all_keys(self, positions: int) -> bool:
        """Return whether, by the config, each of `positions` positions sees the keys of all positions before it."""
        config = self.model.config.get_text_config()
        if self.stateful or config.model_type == "fox" or rotates_by_length(config, positions):
            return False  # FoX's keys fade with each token, whatever the position ids are
        if "local" in (getattr(config, "attention_layers", None) or ()) and config.window_size <= positions:
            return False  # GPT-Neo, whose cache layers do not report their windows
        layers = DynamicCache(config=self.model.config).layers
        return all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            and getattr(layer, "sliding_window", math.inf) > positions
            for layer in layers
        )

    @property
    def device(self) -> torch.device:
        """The device on which tokens are embedded; accelerate loads offloaded embeddings to it."""
        embedding = self.model.get_input_embeddings()
        loaded = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
        return embedding.weight.device if loaded is None else torch.device(loaded)

    @property
    def has_data(self) -> bool:
        """Whether the weights have data, unlike on the meta device."""
        return self.device.type != "meta"

    @property
    def counts_from_0(self) -> bool:
        """Whether the forward takes position ids that start at 0. RoBERTa's start later."""
        return "position_ids" in self.forward_arguments and self.positions is None

    @property
    def takes_mask(self) -> bool:
        """Whether the attention takes a 4D mask. FlashAttention does not."""
        return getattr(self.model.config, "_attn_implementation", None) in (None, "eager", "sdpa")

    def can_hide(self, positions: int, thorough: bool = False) -> bool:
        """Return whether a mask can hide a prompt, the first of `positions` positions, from the tokens after it.

        The tokens must then have the same hidden states as without the prompt, and the last position, which sees the
        prompt, must not depend on its column in the cache. Passes over a few positions probe this. With `thorough`, a
        pass over all positions also finds windows that the config does not report.

        Raises:
            ValueError: a probe failed.
        """
        if not self.keeps_all_keys(positions) or not self.counts_from_0:
            return False
        try:
            if self._hides is None:
                self._hides = self._continues is not False and self._probe_hiding(6)
            return self._hides and (not thorough or self._probe_hiding(positions))
        except Exception as error:
            raise ValueError(
                f"{type(self.model).__name__} failed in a pass with a 4D attention mask, which decides how HMT reads "
                "it. Fix the cause, or set HMTConfig(reread=True), which every backbone computes."
            ) from error

    def _probe_hiding(self, positions: int) -> bool:
        """Return whether a mask that hides the first position equals a cache to which that position is added later."""
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

    def check_hides(self, positions: int) -> None:
        """Raise ValueError if a mask cannot hide a prompt in a segment of `positions` positions."""
        if not self.has_data:
            return
        name, attention = type(self.model).__name__, getattr(self.model.config, "_attn_implementation", None)
        if not self.can_hide(positions):
            raise ValueError(
                f"config.reread=False is not supported by {name}, where a mask does not hide a prompt from its "
                "tokens. For a new model, set reread=True; for a trained one, use a version of transformers in which "
                "it does."
            )
        if not self.takes_mask:
            raise ValueError(
                f"config.reread=False is not supported with attention {attention!r}, which does not take a 4D mask. "
                "Set attn_implementation='sdpa'."
            )

    def _read(self, embeds: Tensor, **inputs) -> Tensor:
        """Return the last hidden states of `run`. The embeddings are cloned, because CTRL writes into them."""
        return self.run(embeds.clone(), **inputs)[1]

    @contextmanager
    def _probing(self, positions: int) -> Iterator[Tensor]:
        """Yield embeddings for passes without gradient, dropout and autocast, (1, positions, d).

        PyTorch computes the attention, because other implementations may not support 4D masks, the device or the
        dtype, such as FlashAttention with float32 weights, which train under autocast.
        """
        training = [module for module in self.model.modules() if module.training]
        config, attention = self.model.config, getattr(self.model.config, "_attn_implementation", None)
        self.model.eval()
        try:
            if not self.takes_mask:
                config._attn_implementation = "sdpa" if self.model._supports_sdpa else "eager"
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                like = self.embed(torch.zeros(1, positions, dtype=torch.long, device=self.device))
                yield torch.arange(like.numel(), device=like.device).cos().view(like.shape).to(like.dtype)
        finally:
            if getattr(config, "_attn_implementation", None) != attention:
                config._attn_implementation = attention
            for module in training:
                module.training = True

    def can_skip_logits(self) -> bool:
        """Return whether `loss_without_logits` can replace the head.

        The head must be a plain linear layer on the device of the last hidden states, and the logits must be its
        output, without a cap or a scale. The loss needs PyTorch 2.13.
        """
        head = self.model.get_output_embeddings()
        plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter and self.has_data
        if not plain or not hasattr(F, "linear_cross_entropy"):
            return False
        if self._head_alone_makes_logits is None:
            try:
                self._head_alone_makes_logits = self._probe_head(head)
            except Exception:  # such as a head that is not called as a module
                self._head_alone_makes_logits = False
        return self._head_alone_makes_logits

    def _probe_head(self, head: nn.Linear) -> bool:
        """Return whether the logits of a tiny pass are the head's output bit for bit, without a cap or a scale."""
        with self._probing(3) as embeds:
            logits, hidden = self.run(embeds, keep=torch.arange(3, device=embeds.device))
            output = head(hidden)
        assert logits is not None
        return head.weight.device == hidden.device and bool(logits.any()) and torch.equal(output.to(logits), logits)

    def loss_without_logits(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy of chunked logits. Requires `can_skip_logits`.

        PyTorch computes the gradients together with the loss, one chunk at a time. Each call stores a gradient of the
        head's weight, so call it once per sequence. The loss is computed in float32 at least, because PyTorch would
        round the sum to 8 bits in bfloat16.

        Args:
            hidden: last hidden states, (n, d).
            targets: target token ids, (n,), long, -100 where not scored.

        Returns:
            A scalar, fp32 or fp64.
        """
        head = self.model.get_output_embeddings()
        rows = max(1, _LOGITS_AT_ONCE // head.out_features)
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        return F.linear_cross_entropy(
            hidden.to(dtype),
            head.weight.to(dtype),
            targets,
            linear_bias=None if head.bias is None else head.bias.to(dtype),
            reduction="sum",
            ignore_index=-100,
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None, acc_policy="accurate"),
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Embed tokens as the backbone's first layer receives them, (B, T) -> (B, T, d)."""
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
            embeds: (B, T, d).
            mask: (B, cached + T), bool, False on padding; or (1, 1, T, cached + T), see `hide_prompt`; or None.
            keep: positions that get logits, (n,) long. None: no logits are computed.
            kv_cache: a `Cache` to extend, or None.
            positions: position ids, (B, T) long; ignored unless `counts_from_0`. None: the backbone's own.

        Returns:
            Logits (B, n, V) or None, and the last hidden states (B, T, d).

        Raises:
            ValueError: hidden states and embeddings differ in width.
        """
        inputs = {"inputs_embeds": embeds, "use_cache": kv_cache is not None}
        if mask is not None and mask.dim() == 4:
            inputs["attention_mask"] = mask.expand(len(embeds), -1, -1, -1)
        elif mask is not None:
            inputs["attention_mask"] = mask.long()
        if kv_cache is not None:
            inputs[cache_name(type(self.base if keep is None else self.model)) or "cache"] = kv_cache
        if positions is not None and self.counts_from_0:
            inputs["position_ids"] = positions
        logits, base_outputs = None, []
        # Several threads may run the same model, so a hook stores only the outputs of its own thread. Dynamo cannot
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
                logits = self.model(**inputs, logits_to_keep=keep).logits
            else:
                logits = self.model(**inputs).logits[:, keep]
        finally:
            hook.remove()
        hidden = base_outputs[-1][0]
        if hidden.shape[-1] != self.width:
            raise ValueError(
                f"{type(self.model).__name__} must return hidden states of the width of its embeddings, {self.width}, "
                f"because HMT reads them as embeddings, got {hidden.shape[-1]}. Use another backbone."
            )
        return logits, hidden

    def versions(self) -> dict[str, int]:
        """Count the in-place changes of each parameter, such as optimizer steps; 0 for inference tensors."""
        parameters = self.model.named_parameters()
        return {name: 0 if value.is_inference() else value._version for name, value in parameters}

    @torch.no_grad()
    def embedding_std(self) -> float:
        """Return the standard deviation of the output of `embed` (including a scale such as Gemma's).

        It is measured on at most 4096 tokens spread evenly over the vocabulary. Without weights, such as on the meta
        device, it is the config's `initializer_range`.
        """
        if not self.has_data:
            return getattr(self.model.config.get_text_config(), "initializer_range", 0.02)
        vocabulary, device = self.model.get_input_embeddings().weight.shape[0], self.device
        ids = torch.linspace(0, vocabulary - 1, min(vocabulary, 4096), device=device).long()
        return self.embed(ids[None]).float().std().item()


def hide_prompt(columns: int, hidden_from: int, cached: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make the causal mask of `columns` new positions after `cached` ones; the first new position is a prompt.

    The prompt sees only itself, and the next `hidden_from` columns do not see the prompt.

    Returns:
        An additive mask, (1, 1, columns, cached + columns).
    """
    visible = torch.ones(columns, cached + columns, dtype=torch.bool, device=device).tril(cached)
    visible[0, :cached] = False
    visible[1 : 1 + hidden_from, cached] = False
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min)[None, None]


def rotates_by_length(config: Any, positions: int) -> bool:
    """Return whether a pass over `positions` positions uses other RoPE frequencies than a shorter pass."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in parameters.values() if all(isinstance(x, dict) for x in parameters.values()) else [parameters]:
        default = getattr(config, "max_position_embeddings", math.inf)
        longest = entry.get("original_max_position_embeddings") or default
        if entry.get("rope_type") in ("longrope", "dynamic") and positions > longest:
            return True
    return False


def equal_up_to_rounding(x: Tensor, y: Tensor) -> bool:
    """Return whether x and y are equal up to rounding.

    The tolerance is at least 3e-4, because a mixture of experts groups the positions differently, which changes
    rounding.
    """
    tolerance = max(8 * torch.finfo(y.dtype).eps, 3e-4)
    return bool((x.float() - y.float()).norm() <= tolerance * y.float().norm())


__all__ = ["Backbone", "hide_prompt"]
