"""The three things HMT needs from a backbone: token embeddings, a pass over embeddings, the last hidden state.

Any transformers causal LM that takes `inputs_embeds` will do. The last hidden state (after the final norm, and after
OPT's output projection) is what the base model returns as `last_hidden_state`. When logits are needed too, the whole
causal LM runs, so that the soft caps and scales of its head apply, and a forward hook on the base model catches the
hidden state. No pass builds the list of all hidden states, or a key/value cache that nobody asked for.
"""

import copy
import inspect
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .compat_hmt import cache_name
from .graphs_hmt import PassGraphs


_IGNORE_ATTENTION_MASK = ("rwkv",)  # accept an attention mask and do not use it
_FADING_KEYS = ("fox",)  # know how much stands between a key and a query, whatever their position ids are
# Layers whose cache several tokens can continue under an attention mask. "hybrid": FoX, whose token shift minds
# padding.
_CONTINUED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid", "hybrid_sliding"}
_LOGITS_AT_ONCE = 2**23  # 32 MiB in float32, enough rows for a fast product


class Backbone:
    """Calls into a causal LM. Holds no parameters: the wrapper registers the module, this class only refers to it.

    Args:
        model: a causal LM, or a PEFT model around one.

    Raises:
        ValueError: an encoder-decoder, no input embeddings, no `inputs_embeds`, prompt-learning PEFT, or a position
            that sees later ones; the message names the class.
    """

    def __init__(self, model: Any):  # transformers' types take the attributes of a model for tensors
        if getattr(model, "active_peft_config", None) is not None:
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    f"{type(model).__name__} uses {model.active_peft_config.peft_type}, which adds its own positions "
                    "to the input; HMT builds the input itself. Use LoRA or another method that changes weights."
                )
            model = model.get_base_model()
        name = type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{name} is an encoder-decoder; HMT reads a text with one decoder. Use a causal LM such as "
                "LlamaForCausalLM."
            )
        self.forward_arguments = frozenset(inspect.signature(model.forward).parameters)
        if "inputs_embeds" not in self.forward_arguments:
            raise ValueError(
                f"{name}.forward takes no inputs_embeds; HMT needs it to put memory embeddings among the tokens. "
                "Use a causal LM that takes inputs_embeds."
            )
        try:
            embedding = model.get_input_embeddings()
        except NotImplementedError:
            embedding = None
        if embedding is None:
            raise ValueError(f"{name} has no input embeddings; HMT needs them to embed tokens beside its memory.")
        self.model = model
        self.base = model.get_decoder()  # not base_model: OPTForCausalLM calls the decoder inside its base model
        if self.base is model.get_output_embeddings():  # ModernBertDecoderForCausalLM calls its head so
            self.base = model.base_model
        if self.base is model:  # a text model within a larger architecture, such as Llama4ForCausalLM
            self.base = getattr(model, "model", model)
        if self.base is model:
            raise ValueError(f"{name} has no head beside its base model; pass a causal LM such as LlamaForCausalLM.")
        self.width = embedding.weight.shape[-1]
        tables: list[Any] = [getattr(module, "position_embeddings", None) for module in model.modules()]
        # None, or how many tokens have a position, where the first positions are kept for padding, as in RoBERTa
        counts = [x.num_embeddings - x.padding_idx - 1 for x in tables if getattr(x, "padding_idx", None) is not None]
        self.positions = min(counts, default=None)
        self.sees_padding = model.config.model_type not in _IGNORE_ATTENTION_MASK
        layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        self.stateful = getattr(model, "_is_stateful", False)
        self._has_dynamic_cache = (
            cache_name(type(model)) is not None
            and not self.stateful
            and getattr(model, "_supports_default_dynamic_cache", bool)()  # of models that generate
            and layers <= _CONTINUED_LAYERS
        )
        self.graphs = PassGraphs()
        self._continues = {}  # by what decides it
        self._counts_from_0: bool | None = None  # None: not probed yet
        self._hides: bool | None = None
        # None: not probed yet. RWKV changes its weights in place where a probe would set it to eval.
        self._head_alone_makes_logits = False if model.config.model_type == "rwkv" else None
        self._check_causal(self.device)

    def _check_causal(self, device: torch.device) -> None:
        """Raise ValueError if the first of three positions sees the last: a tiny pass for each of two last embeddings.

        Recurrent backbones cannot see ahead.
        """
        attention = getattr(self.model.config, "_attn_implementation", None)
        # other attention may need another device or dtype than the model has so far
        if self.stateful or device.type == "meta" or attention not in (None, "eager", "sdpa"):
            return
        with self._probing(device) as embeds:
            changed = torch.cat([embeds[:, :2], -embeds[:, 2:]], 1)
            first, second = (self.run(x, None, None)[1][0, 0] for x in (embeds, changed))
        if not equal_up_to_rounding(second, first):
            raise ValueError(
                f"{type(self.model).__name__} is not causal: its first position sees a later one, so it would read the "
                "tokens that it is asked to predict. Configure it for language modelling (BERT and its relatives: "
                "is_decoder=True; XLNet: attn_type='uni'), or use another backbone."
            )

    @property
    def continues(self) -> bool:
        """Whether several tokens, some of them padding, can continue a `DynamicCache`, or are read again.

        Probed once for each way to compute: ProphetNet continues its cache by one token only, and RoBERTa and its
        relatives give embeddings the positions of a text's beginning, whatever is in the cache.
        """
        device, dtype = self.device, self.model.get_input_embeddings().weight.dtype
        if not self._has_dynamic_cache or device.type == "meta":
            return self._has_dynamic_cache
        autocast = torch.is_autocast_enabled(device.type)
        way = getattr(self.model.config, "_attn_implementation", None), device.type, dtype, autocast
        if way not in self._continues:
            self._continues[way] = self._probe_cache(device)
        return self._continues[way]

    def _probe_cache(self, device: torch.device) -> bool:
        """Compare a pass over three positions and, below its cache, three more with one pass over all six."""
        for autocast in {False, torch.is_autocast_enabled(device.type)}:  # FlashAttention may need the caller's
            try:
                with self._probing(device, 6, autocast) as embeds:
                    # small beside learned position embeddings, so that wrong ones show in bfloat16 too; and clones,
                    # because CTRL writes into its embeddings
                    embeds, kv_cache = 0.01 * embeds, DynamicCache(config=self.model.config)
                    self.run(embeds[:, :3].clone(), None, None, kv_cache)
                    _, below = self.run(embeds[:, 3:].clone(), None, None, kv_cache)
                    return equal_up_to_rounding(below, self.run(embeds, None, None)[1][:, 3:])
            except Exception:  # a backbone that does not take several tokens may raise anything
                continue
        return False

    def cuts(self, positions: int) -> bool:
        """Say whether a cache of up to so many positions can lose its last one, and get another one in front.

        So it is with keys and values of all positions; not with recurrent states, or with windows that slide. Layers
        that are checkpointed leave the cache out.
        """
        if torch.is_grad_enabled() and any(
            module.training and getattr(module, "gradient_checkpointing", False) for module in self.model.modules()
        ):
            return False
        return self.keeps_all_keys(positions) and self.continues

    def keeps_all_keys(self, positions: int) -> bool:
        """Say whether, by the configuration, each of so many positions sees the keys of all positions before it."""
        config = self.model.config.get_text_config()
        if self.stateful or config.model_type in _FADING_KEYS or rotates_by_length(config, positions):
            return False
        if "local" in (getattr(config, "attention_layers", None) or ()) and config.window_size <= positions:
            return False  # GPT-Neo, whose cache does not tell of its windows
        layers = DynamicCache(config=self.model.config).layers
        return all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            and getattr(layer, "sliding_window", math.inf) > positions
            for layer in layers
        )

    @property
    def device(self) -> torch.device:
        """The device that embeds tokens, which accelerate loads offloaded embeddings to."""
        embedding = self.model.get_input_embeddings()
        loaded = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
        return embedding.weight.device if loaded is None else torch.device(loaded)

    @property
    def has_data(self) -> bool:
        """Whether the weights hold numbers; those on the meta device, and PyTorch's fake tensors, do not."""
        return self.device.type != "meta" and not isinstance(self.model.get_input_embeddings().weight, FakeTensor)

    @property
    def counts_from_0(self) -> bool:
        """Whether the forward takes position ids that are 0 for the first of a text. RoBERTa's are not."""
        if self._counts_from_0 is None:
            if "position_ids" not in self.forward_arguments or not self.has_data:
                return "position_ids" in self.forward_arguments
            with self._probing(self.device, masks=True) as embeds:
                embeds = 0.01 * embeds  # so that wrong position embeddings show in bfloat16 too
                places = torch.arange(embeds.shape[1], device=embeds.device)[None]
                given = self._read_base(embeds, position_ids=places)
                self._counts_from_0 = equal_up_to_rounding(given, self._read_base(embeds))
        return self._counts_from_0

    def can_hide(self, positions: int, only_short: bool = False) -> bool:
        """Say whether a mask can hide a prompt, the first of so many positions, from the tokens behind it.

        These then have the hidden states that they have alone, one position later, and the last position sees the
        prompt. It must not matter where the column of the prompt stands: its position id says it all. No cache is
        asked for. `only_short` leaves out the pass over all positions, which shows windows that the configuration
        does not tell.

        Raises:
            ValueError: a probe failed, so that nothing is known.
        """
        if not self.keeps_all_keys(positions) or not self.counts_from_0:
            return False
        device = self.device
        try:
            with self._probing(device, 6, masks=True) as embeds:
                hides = self._probe_mask(embeds, 3, changes=True)
            self._hides = hides
            if hides and not only_short:
                with self._probing(device, positions, masks=True) as embeds:
                    hides = self._probe_mask(embeds, positions - 2)
        except Exception as error:
            raise ValueError(
                f"{type(self.model).__name__} failed in a pass with a mask of four dimensions, which decides how HMT reads "
                "it. Mend the cause, or decide: HMTConfig(reread=True), which every backbone computes, or reread=False, for "
                "which the cache of the backbone must be one that HMT can cut."
            ) from error
        return hides

    def takes_mask(self, positions: int) -> bool:
        """Say whether a mask can hide a prompt in passes over so many positions. FlashAttention takes none."""
        attention = getattr(self.model.config, "_attn_implementation", None)
        if attention not in (None, "eager", "sdpa"):
            return False
        if self._hides is None:
            if not self.has_data:
                return False
            try:
                self._hides = self.can_hide(positions, only_short=True)
            except ValueError:  # a cache, or nothing, gives the same function
                self._hides = False
        return self._hides and self.keeps_all_keys(positions)

    def check_mask(self, positions: int) -> None:
        """Raise ValueError if a prompt can be hidden neither by cutting a cache nor by a mask."""
        if self.has_data and not self.takes_mask(positions):
            attention = getattr(self.model.config, "_attn_implementation", None)
            raise ValueError(
                f"config.reread is False, and {type(self.model).__name__} with attention {attention!r} cannot be read so: "
                "tokens would see a prompt that was hidden from them in training. Set attn_implementation='sdpa', use a "
                "version of transformers whose cache HMT can cut, or, for a new model, set reread=True."
            )

    def _probe_mask(self, embeds: Tensor, hidden_from: int, changes: bool = False) -> bool:
        """Compare passes in which the tokens after the first do not see it with a pass that does not have it.

        With `changes`, the last tokens must have other hidden states with another first one; among many, rounding may
        hide that.
        """
        prompt, tokens, last = embeds[:, :1], embeds[:, 1 : 1 + hidden_from], embeds[:, 1 + hidden_from :]
        places = torch.arange(embeds.shape[1], device=embeds.device)[None]
        first, other = (
            self._read_base(torch.cat([x, tokens, last], 1), hide_prompt(embeds, hidden_from), position_ids=places)
            for x in (prompt, -prompt)
        )
        alone = self._read_base(tokens, position_ids=places[:, 1 : 1 + hidden_from])
        mask = hide_prompt(embeds, hidden_from)
        order = torch.cat([places[0, 1 : 1 + hidden_from], places[0, :1], places[0, 1 + hidden_from :]])
        between = self._read_base(embeds[:, order], mask[..., order, :][..., order], position_ids=places[:, order])
        hidden, seeing = slice(1, 1 + hidden_from), slice(1 + hidden_from, None)
        return (
            equal_up_to_rounding(other[:, hidden], first[:, hidden], 3e-5)
            and equal_up_to_rounding(alone, first[:, hidden])
            and equal_up_to_rounding(between, first[:, order])
            and not (changes and torch.equal(other[:, seeing], first[:, seeing]))
        )

    def _read_base(self, embeds: Tensor, mask: Tensor | None = None, **inputs) -> Tensor:
        """Return the last hidden state of a pass without a cache; the embeddings stay as they are."""
        inputs = inputs if mask is None else inputs | {"attention_mask": mask}
        return self.base(inputs_embeds=embeds.clone(), use_cache=False, **inputs)[0]

    @contextmanager
    def _probing(
        self, device: torch.device, positions: int = 3, autocast: bool = False, masks: bool = False
    ) -> Iterator[Tensor]:
        """Yield embeddings for passes without gradient and dropout, (1, positions, d).

        With `masks`, PyTorch computes the attention: other implementations may take no mask of four dimensions, or not
        this device or dtype.
        """
        training = [module for module in self.model.modules() if module.training]
        config, attention = self.model.config, getattr(self.model.config, "_attn_implementation", None)
        self.model.eval()
        try:
            if masks and attention not in (None, "eager", "sdpa"):
                config._attn_implementation = "sdpa" if self.model._supports_sdpa else "eager"
            with torch.no_grad(), torch.autocast(device.type, enabled=autocast):
                like = self.embed(torch.zeros(1, positions, dtype=torch.long, device=device))
                yield torch.arange(like.numel(), device=like.device).cos().view(like.shape).to(like.dtype)
        finally:
            if getattr(config, "_attn_implementation", None) != attention:
                config._attn_implementation = attention
            for module in training:
                module.training = True

    def can_skip_logits(self, device: torch.device) -> bool:
        """Say whether `loss_without_logits` can replace the head; `device` is that of the embeddings.

        The head must be a plain linear layer on the device of the last hidden state, and logits must be the product of
        the two, without a cap or a scale. PyTorch before 2.13 lacks the loss.
        """
        head = self.model.get_output_embeddings()
        plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter and device.type != "meta"
        if not plain or not hasattr(F, "linear_cross_entropy"):
            return False
        if self._head_alone_makes_logits is None:
            try:
                self._head_alone_makes_logits = self._probe_head(head, device)
            except Exception:  # attention that takes no float32, a head that is not called as a module
                self._head_alone_makes_logits = False
        return self._head_alone_makes_logits

    def _probe_head(self, head: nn.Linear, device: torch.device) -> bool:
        """Run one tiny pass in which other numbers stand in for the output of the head: logits must be these numbers.

        They are large, so that a soft cap would change them.
        """
        inputs, thread = [], threading.get_ident()

        def numbers(like: Tensor) -> Tensor:
            integers = torch.arange(like.numel(), device=like.device) % 199 - 99  # which bfloat16 has exactly
            return integers.view(like.shape).to(like)

        def replace_output(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and threading.get_ident() != thread:  # which reads a text meanwhile
                return output
            inputs.append(args[0])
            return numbers(output)

        with self._probing(device) as embeds:
            hook = head.register_forward_hook(replace_output)
            try:
                logits, hidden = self.run(embeds, None, torch.arange(3, device=device))
            finally:
                hook.remove()
        (head_input,) = inputs
        of_input, of_hidden = ((x.dtype, x.shape) for x in (head_input, hidden))
        like_hidden = of_input == of_hidden and head.weight.device == hidden.device
        assert logits is not None
        return like_hidden and torch.equal(head_input, hidden) and torch.equal(logits, numbers(logits))

    def loss_without_logits(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum the cross entropy of logits that are made in pieces; allowed by `can_skip_logits`.

        PyTorch makes the gradients with the loss, so that a piece's logits are enough. One gradient of the head's
        weight is kept for each call: call it once for a whole text. It is computed in float32 at least, since in
        bfloat16 PyTorch would round the sum to 8 bits.

        Args:
            hidden: last hidden states, (n, d).
            targets: what they predict, (n,), long, -100 where not scored.

        Returns:
            a scalar, fp32 or fp64.
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
        mask: Tensor | None,
        keep: Tensor | None,
        kv_cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Run the backbone once.

        Args:
            embeds: (B, T, d).
            mask: (B, cached + T), bool, False is padding; or (1, 1, T, cached + T), see `hide_prompt`; or None.
            keep: the positions among the T that get logits, (n,) long; or None for no logits.
            kv_cache: a `Cache` to continue from and to extend, or None.
            positions: position ids, (B, T) long, where the backbone takes them and counts from 0; None is its own.

        Returns:
            logits (B, n, V) or None, last hidden state (B, T, d).

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
        # Several threads may run the same model: a hook keeps the outputs of its own call. Dynamo cannot trace
        # get_ident.
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
                f"{type(self.model).__name__} takes embeddings of width {self.width} and returns hidden states of "
                f"width {hidden.shape[-1]}; HMT feeds the latter back as the former, so the two must be equal."
            )
        return logits, hidden

    def run_captured(
        self,
        embeds: Tensor,
        mask: Tensor | None,
        keep: Tensor | None,
        kv_cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Run the backbone as `run` does, by a CUDA graph. The cache is read, and stays as it is."""
        given = {"embeds": embeds, "mask": mask, "keep": keep, "positions": positions}
        given = {name: value for name, value in given.items() if value is not None}
        layers = [] if kv_cache is None else kv_cache.layers
        of_cache = {
            (i, name): value
            for i, layer in enumerate(layers)
            for name, value in vars(layer).items()
            if isinstance(value, Tensor) and value.dim() > 1
        }

        def function(*tensors: Tensor) -> list[Tensor]:
            inputs: dict[str, Any] = {"mask": None, "keep": None, **dict(zip(given, tensors))}
            cache = None if kv_cache is None else fork(kv_cache)
            for (i, name), value in zip(of_cache, tensors[len(given) :]):
                assert cache is not None
                setattr(cache.layers[i], name, value)
            logits, hidden = self.run(**inputs, kv_cache=cache)
            return [hidden] if logits is None else [hidden, logits]

        key = (tuple(given), tuple(of_cache))
        hidden, *logits = self.graphs.run(key, function, [*given.values(), *of_cache.values()])
        return logits[0] if logits else None, hidden

    def versions(self) -> dict[str, int]:
        """Count the changes in place of each parameter, such as optimizer steps; inference mode counts none."""
        parameters = self.model.named_parameters()
        return {name: 0 if value.is_inference() else value._version for name, value in parameters}

    @torch.no_grad()
    def embedding_std(self) -> float:
        """Return the standard deviation of what `embed` returns (a scaled embedding such as Gemma's included).

        Taken over at most 4096 tokens spread evenly over the vocabulary. Without weights, such as on the meta device,
        it is that of the configuration.
        """
        if not self.has_data:
            return getattr(self.model.config.get_text_config(), "initializer_range", 0.02)
        vocabulary, device = self.model.get_input_embeddings().weight.shape[0], self.device
        ids = torch.linspace(0, vocabulary - 1, min(vocabulary, 4096), device=device).long()
        return self.embed(ids[None]).float().std().item()


def hide_prompt(embeds: Tensor, hidden_from: int, cached: int = 0) -> Tensor:
    """Make the causal mask of embeddings (B, T, d) behind `cached` positions, whose first column is a prompt.

    The prompt sees itself alone, and the next `hidden_from` columns do not see it.

    Returns:
        what is added to the scores, (1, 1, T, cached + T), in the dtype of the embeddings.
    """
    columns = embeds.shape[1]
    visible = torch.ones(columns, cached + columns, dtype=torch.bool, device=embeds.device).tril(cached)
    visible[0, :cached] = False
    visible[1 : 1 + hidden_from, cached] = False
    mask = torch.zeros(visible.shape, dtype=embeds.dtype, device=embeds.device)
    return mask.masked_fill(~visible, torch.finfo(embeds.dtype).min)[None, None]


def rotates_by_length(config: Any, positions: int) -> bool:
    """Say whether RoPE has other frequencies in a pass over so many positions than in a shorter one."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in parameters.values() if all(isinstance(x, dict) for x in parameters.values()) else [parameters]:
        default = getattr(config, "max_position_embeddings", math.inf)
        longest = entry.get("original_max_position_embeddings") or default
        if entry.get("rope_type") in ("longrope", "dynamic") and positions > longest:
            return True
    return False


def equal_up_to_rounding(x: Tensor, y: Tensor, least: float = 3e-4) -> bool:
    """Say whether x differs from y by rounding only.

    The tolerance is at least `least`: a mixture of experts groups the positions differently, and rounds differently.
    """
    tolerance = max(8 * torch.finfo(y.dtype).eps, least)
    return bool((x.float() - y.float()).norm() <= tolerance * y.float().norm())


def fork(kv_cache: Cache, rows: slice | list[int] | Tensor = slice(None), length: int | None = None) -> Cache:
    """Make a cache with the `rows` of another one, which stays as it is when this one grows.

    Layers of attention put new tensors in place of the old ones, so they are shared. The states of convolutions are
    overwritten, so they are copied. With `length`, only the first so many positions, or with -length the last.
    """
    part = slice(length, None) if length is not None and length < 0 else slice(length)
    forked = copy.copy(kv_cache)
    forked.layers = [copy.copy(layer) for layer in kv_cache.layers]
    for layer in forked.layers:
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.dim() > 1:
                setattr(layer, name, value[rows][:, :, part])
            elif isinstance(value, dict):
                states = {i: x[rows].clone() if isinstance(x, Tensor) else x for i, x in value.items()}
                setattr(layer, name, states)
            elif name == "cumulative_length" and length is not None:
                setattr(layer, name, abs(length))
    return forked


def split(kv_cache: Cache, parts: int) -> list[Cache]:
    """Fork equal shares of the rows. Their gradients are joined; those of slices would be padded and added."""
    shares = [fork(kv_cache) for _ in range(parts)]
    for i, layer in enumerate(kv_cache.layers):
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.dim() > 1:
                for share, rows in zip(shares, value.chunk(parts)):
                    setattr(share.layers[i], name, rows)
            elif isinstance(value, dict):
                for n, share in enumerate(shares):
                    states = {i: x.chunk(parts)[n].clone() if isinstance(x, Tensor) else x for i, x in value.items()}
                    setattr(share.layers[i], name, states)
    return shares


def side_by_side(parts: list[tuple[list[int], Cache]]) -> tuple[Cache, Tensor | None]:
    """Join caches of some rows each; short ones stand at the right.

    Returns:
        the cache, and what in it is no padding, (B, P) bool, or None if all is.
    """
    order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
    lengths = torch.tensor([cache.get_seq_length() for rows, cache in parts for _ in rows])[order]
    width, joined = int(lengths.max()), fork(parts[0][1])

    def join(values: list[Tensor]) -> Tensor:
        longest = max(x.shape[2] for x in values)
        # FoX knows its keys by numbers in the first, so that padding repeats it
        padded = [x[:, :, (torch.arange(longest) - longest + x.shape[2]).clamp(min=0)] for x in values]
        return torch.cat(padded)[order.to(values[0].device)]

    for i, layer in enumerate(joined.layers):
        for name, value in vars(layer).items():
            values: list[Any] = [getattr(cache.layers[i], name, None) for _, cache in parts]
            if isinstance(value, Tensor) and value.dim() > 1:
                setattr(layer, name, join(values))
            elif isinstance(value, dict):
                tensors = {n: join([x[n] for x in values]) for n, x in value.items() if isinstance(x, Tensor)}
                setattr(layer, name, value | tensors)
            elif name == "cumulative_length":
                setattr(layer, name, width)
    if lengths.min() == width:
        return joined, None
    device = next(x.device for x in vars(joined.layers[0]).values() if isinstance(x, Tensor) and x.dim() > 1)
    return joined, (torch.arange(width) >= width - lengths[:, None]).to(device)


__all__ = ["Backbone", "fork", "hide_prompt", "side_by_side", "split"]
