"""Parse and check the arguments of a call, once for all layers.

`read_call` turns the arguments of `FoxModel.forward` into a `Call` for all layers. It raises an error for mistakes
that would otherwise go unnoticed. Values are checked on the CPU only, because reading them from a GPU would stall
every step. Compiled calls are not checked.
"""

import difflib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import TransformersKwargs
from transformers.utils.generic import is_flash_attention_requested

from .attention_fox import GATE_PARTS, GATE_QUERY, MASKED, folded_width
from .backend_fox import NAME, find_triton_mask, resolve_auto, with_implementation
from .state_fox import AttendingCache, Call
from .torch_internals_fox import is_exporting


NO_QUANTIZED_CACHE = (
    "FoX cannot use a quantized cache: the keys contain the cumulative sum of the gates, and this sum would be rounded. "
    "Omit cache_implementation, or use 'static' or 'offloaded'."
)
# Known arguments of the model. transformers does not reject unknown ones.
NAMES = {"input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "labels", "use_cache"}
NAMES |= {"past_key_values", "logits_to_keep", *TransformersKwargs.__annotations__}
PART_OF_A_ROW = (
    "a shard of a sequence under context or sequence parallelism. FoX does not support such shards: the gates of one shard "
    "would not fade the keys of earlier shards. Use `hf-longctx train --sequence-parallel N`."
)


def read_call(
    config,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None,
    position_ids: torch.Tensor | None,
    cache,
    shard: Any = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **kwargs,
) -> Call:
    """Check the arguments of a call and convert them to a `Call`.

    Args:
        config: the `FoxConfig`.
        inputs_embeds: (B, T, hidden). With a shard: (B, t, hidden).
        attention_mask: one of: a mask (B, past + T); a 4D mask as in `read_tree_mask`; the result of
            `create_masks_for_generate`; None.
        position_ids: (1 or B, T) or None.
        cache: a `Cache` or None.
        shard: the part of each row that is in `inputs_embeds`. None: rows are whole.
        cu_seq_lens_q, seq_idx: boundaries of packed sequences, as in `find_sequences`.
        kwargs: arguments for other parts of the model.

    Raises:
        ValueError: tokens, mask, positions and cache do not match; or packed rows have padding or a cache.
        NotImplementedError: FoX does not support this type of cache with these arguments.
    """
    if shard is not None:  # the checks use only the shape of the whole rows
        inputs_embeds = inputs_embeds.detach()[:, :1].expand(-1, shard.size * inputs_embeds.shape[1], -1)
    check_call(config, inputs_embeds, attention_mask, position_ids, cache, kwargs)
    batch, length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    token_mask = sequences = predecessor = successor = visible = None
    if isinstance(attention_mask, dict):
        token_mask = attention_mask["token_mask"]
        name, mask = next((key, mask) for key, mask in attention_mask.items() if key != "token_mask")
    elif attention_mask is not None and attention_mask.ndim == 4:
        name, mask = resolve_auto(config, inputs_embeds, cache)._attn_implementation, attention_mask
        visible, predecessor = read_tree_mask(config, attention_mask, batch, length, cache)
    else:
        token_mask = read_token_mask(attention_mask, length)
        boundaries = position_ids, cu_seq_lens_q, seq_idx
        if boundaries != (None, None, None) and (cache is None or not torch.compiler.is_compiling()):
            sequences = find_sequences(batch, length, device, token_mask, *boundaries)
        if sequences is not None:
            if token_mask is not None or cache is not None:
                raise ValueError(
                    "packed documents (restarting position ids, cu_seq_lens_q or seq_idx) do not support a cache or an "
                    "attention_mask that hides tokens. A cache cannot separate documents. Omit cache and "
                    "attention_mask. Put padding after the documents, with label -100."
                )
            attention_mask = cache = None  # the mask is all ones, and the cache is empty while compiling
        name, mask = create_attention_mask(config, inputs_embeds, attention_mask, cache, sequences)

    if config.k_shift or config.v_shift:
        if token_mask is not None:  # the last real token before each token
            last = torch.arange(1, length + 1, device=device) * token_mask
            predecessor = F.pad(last.cummax(1).values[:, :-1], (1, 0))
        if sequences is not None:
            first = sequences == 0 if shard is None else shard.part(sequences == 0)
            predecessor = torch.where(first, -1, torch.arange(first.shape[1], device=device))
        if visible is None and predecessor is not None:
            successor = find_successors(predecessor, token_mask)
    flash = {}
    if sequences is not None and cu_seq_lens_q is None and is_flash_attention_requested(config):
        # FlashAttention would infer the boundaries from position ids, once per layer and only for a batch of one
        boundaries = F.pad((sequences.flatten() == 0).nonzero()[:, 0], (0, 1), value=sequences.numel()).int()
        longest = int(sequences.max()) + 1
        flash = dict(cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries, max_length_q=longest, max_length_k=longest)
    if position_ids is None:
        position_ids = sequences
    if position_ids is None:
        cached = 0 if cache is None else cache.get_seq_length()
        position_ids = (torch.arange(length, device=device) + cached).unsqueeze(0)
    return Call(name, mask, token_mask, position_ids, sequences, predecessor, successor, visible, flash, shard)


def find_successors(predecessor: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """Compute `Call.successor` from `Call.predecessor`, (1 or B, T). Each token has at most one successor."""
    length = predecessor.shape[1]
    has_none = predecessor <= 0 if token_mask is None else (predecessor <= 0) | ~token_mask
    index = torch.where(has_none, length, predecessor - 1)  # index of the predecessor, or an extra slot
    tokens = torch.arange(length, device=predecessor.device).expand_as(predecessor)
    successor = predecessor.new_full((predecessor.shape[0], length + 1), -1).scatter(1, index, tokens)
    return successor[:, :-1].contiguous()


def read_token_mask(attention_mask: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """Return the last `length` columns of a mask (B, past + T) as bool. If all their tokens are real, return None.

    transformers' `create_recurrent_attention_mask` is not used: it assumes that a single token is never padding.
    """
    if attention_mask is None:
        return None
    token_mask = attention_mask[:, -length:].bool()
    return None if not torch.compiler.is_compiling() and token_mask.all() else token_mask


def create_attention_mask(config, inputs_embeds, attention_mask, cache, position_in_sequence=None) -> tuple[str, Any]:
    """Return the attention implementation of a call, and the mask in the format of this implementation.

    The implementation is the one in the config, or the one that "auto" selects. If our kernels do not support the
    padding, it is SDPA instead. Before the mask is created, a `PrunedCache` drops tokens.
    """
    config = resolve_auto(config, inputs_embeds, cache)
    if isinstance(cache, AttendingCache):
        cache.make_room(inputs_embeds.shape[1], attention_mask)
        if cache.is_compileable:  # the cache stores which of its tokens are hidden, so the mask covers new tokens only
            if attention_mask is not None:
                attention_mask = attention_mask[:, -inputs_embeds.shape[1] :]
            if cache.layers[0].is_initialized:
                mask = None if attention_mask is None else attention_mask[:, None, None].bool()
                return config._attn_implementation, mask
            cache = None
    if config._attn_implementation == NAME:
        supported, visible = find_triton_mask(config, inputs_embeds, attention_mask, cache, position_in_sequence)
        if supported:
            return NAME, visible
        config = with_implementation(config, "sdpa")
    create = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    mask = create(config, inputs_embeds, attention_mask, cache, position_ids=position_in_sequence)
    return config._attn_implementation, mask


def find_sequences(
    batch: int,
    length: int,
    device: torch.device,
    token_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seq_lens_q: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the position of each token within its packed sequence, (B, T). If no row is packed, return None.

    A collator's `cu_seq_lens_q` (N + 1,) or `seq_idx` (B, T) marks the starts of sequences. Without them, a sequence
    starts where position ids do not increase. Compiled calls cannot read values. If they get position ids but no mask,
    they assume that sequences are packed, as transformers does.
    """
    compiling = torch.compiler.is_compiling()
    if cu_seq_lens_q is not None:
        ends = not compiling and (cu_seq_lens_q[0] != 0 or cu_seq_lens_q[-1] != length)
        if batch > 1 or ends or (not compiling and (cu_seq_lens_q.diff() < 0).any()):
            raise ValueError(
                "cu_seq_lens_q must increase from 0 to the length of a row, and requires a batch of one, got "
                f"{cu_seq_lens_q.tolist()} for an input of {(batch, length)} tokens."
            )
        starts = torch.zeros(length + 1, dtype=torch.bool, device=device)
        starts = starts.index_fill(0, cu_seq_lens_q.to(device, torch.long), True)[None, :-1]
    elif seq_idx is not None:
        if seq_idx.shape != (batch, length):
            raise ValueError(
                f"seq_idx must be {(batch, length)}, got {tuple(seq_idx.shape)}. It is the document index of each token."
            )
        starts = F.pad(seq_idx.to(device).diff(dim=1) != 0, (1, 0), value=True)
    elif position_ids is None or length == 1 or (compiling and token_mask is not None):
        return None
    else:
        position_ids = position_ids.to(device).expand(batch, -1)
        previous = position_ids[:, :-1]
        if token_mask is not None:  # position of the last real token
            last = (torch.arange(length, device=device) * token_mask).cummax(1).values
            previous = position_ids.gather(1, last[:, :-1]).masked_fill(~token_mask.cummax(1).values[:, :-1], -1)
        starts = F.pad(position_ids[:, 1:] <= previous, (1, 0), value=True)
        if token_mask is not None:  # after right padding, `generate` decreases positions, but not to the first one
            first = position_ids.gather(1, token_mask.int().argmax(1, keepdim=True))
            starts = starts & token_mask & (position_ids == first)
        elif not compiling and starts[:, 1:].any():
            first = position_ids[:, :1]
            wrong = starts.all(dim=1, keepdim=True) | (first < 0) | (starts & (position_ids != first))
            if wrong.any():
                row, t = wrong.nonzero()[-1].tolist()
                raise ValueError(
                    "position_ids must increase within a document. All documents of a row must start at the same "
                    f"position, 0 or more. Row {row} starts at {first[row, 0]}, but token {t} has position "
                    f"{position_ids[row, t]}. Mark padding with 0 in attention_mask."
                )
    if not compiling and position_ids is not None and (cu_seq_lens_q, seq_idx) != (None, None):
        restarts = F.pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0)).to(device)
        if (restarts & ~starts).any():
            raise ValueError(
                "position_ids restart where neither cu_seq_lens_q nor seq_idx has a boundary. Pass either "
                "position_ids or boundaries, or make them agree."
            )
    if not compiling and not starts[:, 1:].any():
        return None
    index = torch.arange(length, device=device)
    return index - torch.where(starts, index, 0).cummax(1).values


def read_tree_mask(config, mask: torch.Tensor, batch: int, length: int, cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a 4D attention mask, and find the predecessor of each token. Compiled calls skip checks of values.

    Args:
        config: the `FoxConfig`.
        mask: (1 or B, 1, T, keys). A boolean mask is True for visible keys. A floating mask is 0 for visible keys and
            the dtype's minimum for others. `keys` is the number of keys in the cache after this call. It includes the
            free slots of a static cache.
        batch, length: B and T.
        cache: a `Cache` or None.

    Returns:
        The boolean mask, and `Call.predecessor`, (1 or B, T). The predecessor of a token is the nearest earlier token
        that it attends to.

    Raises:
        ValueError: shape, dtype or values are wrong; a token attends to a later token, or beyond the sliding window;
            or, in a model with a token shift, a new token follows a cached token that is not the last cached one.
        NotImplementedError: the cache is a `PrunedCache`.
    """
    if isinstance(cache, AttendingCache):
        raise NotImplementedError(
            f"a {type(cache).__name__} does not support a 4D attention_mask. It drops tokens under the assumption that "
            "all gates apply. Use DynamicCache(config=model.config)."
        )
    cached = offset = 0
    keys = length
    if cache is not None:
        cached = cache.get_seq_length()
        keys, offset = cache.get_mask_sizes(length, 0)
    if tuple(mask.shape) not in ((batch, 1, length, keys), (1, 1, length, keys)):
        raise ValueError(
            f"a 4D attention_mask must be {(batch, 1, length, keys)}, got {tuple(mask.shape)}. It has one row of keys per "
            "new token, the same for all heads."
        )
    compiling, additive = torch.compiler.is_compiling(), mask.is_floating_point()
    values = compiling or not additive or ((mask == 0) | (mask < MASKED)).all()
    if not values or not (additive or mask.dtype == torch.bool):
        raise ValueError(
            f"a 4D attention_mask must be boolean or additive, got {mask.dtype}. A boolean mask is True on visible "
            "keys. An additive mask is 0 on visible keys, and torch.finfo(dtype).min elsewhere. Use mask.bool() to convert 0/1."
        )
    visible = mask > MASKED if additive else mask
    key = torch.arange(keys, device=mask.device) + offset
    query = torch.arange(length, device=mask.device)[:, None] + cached  # (T, 1)
    if not compiling and (visible & (key > query)).any():
        raise ValueError(
            "attention_mask must be causal, but a token attends to a later one. Forget gates act on the past only. "
            "Hide the keys above the diagonal: mask.tril()."
        )
    if config.sliding_window is not None and not compiling and visible.sum(-1).max() > config.sliding_window:
        raise ValueError(
            f"attention_mask lets a token attend to {visible.sum(-1).max()} tokens. With sliding_window="
            f"{config.sliding_window}, a token may attend to at most {config.sliding_window} tokens."
        )
    before = torch.where(visible[:, 0] & (key < query), key, -1).amax(-1)  # (1 or B, T)
    predecessor = torch.where(before < 0, -1, before - cached + 1)
    if (config.k_shift or config.v_shift) and not compiling and ((predecessor < 0) & (before >= 0)).any():
        raise ValueError(
            "in attention_mask, a new token follows a cached token that is not the last cached token. Only the last "
            "token has a cached token-shift state. Crop the cache after the token that the new token follows, and pass all "
            "later tokens in one call."
        )
    return visible, predecessor


# --- checks ----------------------------------------------------------------------------------------------------------


def check_call(config, inputs_embeds, attention_mask, position_ids, cache, kwargs: dict) -> None:
    """Raise ValueError if tokens, mask, positions and cache do not match. See `read_call` for the arguments."""
    if cache is not None and is_exporting():
        static = any(hasattr(layer, "max_cache_len") for layer in cache.layers)
        if static or config.sliding_window is not None:
            raise NotImplementedError(
                "FoX cannot be exported with a static cache, whose keys have no room for the decay. FoX cannot be "
                "exported with both a cache and a sliding window, because transformers stores the number of cached tokens "
                "outside the graph. Export FoX with a DynamicCache and sliding_window=None, or without a cache: use_cache=False."
            )
    if torch.compiler.is_compiling():
        return
    for name in kwargs.keys() - NAMES:
        if closest := difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8):
            raise ValueError(f"{name!r} is not an argument of this model; did you mean {closest[0]!r}?")
    if not (kwargs.get("is_causal", True) and getattr(config, "is_causal", True)):
        raise ValueError("is_causal must be True or unset, got False. Forget gates require causal attention.")
    for function in (F.scaled_dot_product_attention, ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)):
        package = getattr(function, "__module__", None) or ""
        if package.startswith(("torch.distributed", "deepspeed")):
            raise ValueError(f"{package} has replaced the attention, so each process has {PART_OF_A_ROW}")
    if inputs_embeds.ndim != 3:
        raise ValueError(
            f"inputs_embeds must be (B, T, {config.hidden_size}), got {tuple(inputs_embeds.shape)}. If you have a single "
            "sequence of ids, pass input_ids[None]."
        )
    batch, length = inputs_embeds.shape[:2]
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids must be {(batch, length)} or {(1, length)}, got {tuple(position_ids.shape)}. To continue from "
            "the cached tokens, leave it out."
        )
    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    whole = attention_mask is not None or cache is not None or position_ids is None
    if processes > 1 and not whole and (position_ids[:, 0] > 0).any():  # valid in one process: RoPE is relative
        raise ValueError(
            f"without a cache, position_ids start at {position_ids[:, 0].max()} in one of {processes} processes. The input "
            f"may be {PART_OF_A_ROW} If it is a whole sequence, start its positions at 0."
        )
    cached = 0 if cache is None else check_cache(config, cache, batch, inputs_embeds.device)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim == 4:
        return
    shape = (batch, length if cached is None else cached + length)
    if attention_mask.ndim != 2 or (cached is not None and attention_mask.shape != shape):
        raise ValueError(
            f"attention_mask must be {shape}, got {tuple(attention_mask.shape)}. It has a column for each of the {cached} "
            f"cached and {length} new tokens: 1 for real tokens, 0 for padding."
        )
    if attention_mask.device.type == "cpu":
        others = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
        if len(others):
            raise ValueError(
                f"attention_mask must be 1 for tokens and 0 for padding, got {others[0].item()}. Convert an additive "
                "mask: (mask == 0).long()."
            )


def check_cache(config, cache, batch: int, device: torch.device) -> int | None:
    """Return the number of tokens in a cache. If this number is stored on a GPU, return None.

    Raises:
        TypeError: the cache is not a decoder cache.
        ValueError: the cache does not match the model or the batch.
        NotImplementedError: the cache is quantized.
    """
    kind = type(cache).__name__
    repair = "Make one for this model: DynamicCache(config=model.config)."
    if not hasattr(cache, "layers"):  # a legacy tuple, or an encoder-decoder cache
        raise TypeError(f"`cache` must be a Cache of transformers for a decoder, got a {kind}. {repair}")
    if len(cache.layers) not in (0, config.num_hidden_layers):
        raise ValueError(
            f"this {kind} must have {config.num_hidden_layers} layers for this model, got {len(cache.layers)}. {repair}"
        )
    layer: Any = cache.layers[0] if cache.layers else None
    gated = config.forget_gate != "none"
    head_dim = config.head_dim
    keys = getattr(layer, "keys", None)
    if gated and hasattr(layer, "_quantize"):
        raise NotImplementedError(NO_QUANTIZED_CACHE)
    if keys is not None and keys.ndim == 4:
        width = folded_width(head_dim, config.gates_per_key, device) if gated else head_dim
        readable = gated and keys.device.type == "cpu" and not cache.offloading and layer.get_seq_length() > 0
        marker = head_dim + GATE_PARTS * config.gates_per_key  # column of a folded key that contains `GATE_QUERY`
        if keys.shape[::3] != (batch, width) or (readable and keys[0, 0, 0, marker] != GATE_QUERY):
            raise ValueError(
                f"this {kind} must contain FoX keys with the decay. Their (rows, width) must be {(batch, width)}, got "
                f"{(keys.shape[0], keys.shape[3])}. It was filled by another model, for another batch, or by PEFT's prefix "
                f"tuning. {repair} Instead of prefix tuning, use prompt tuning (PromptTuningConfig) or LoRA."
            )
    if (config.k_shift or config.v_shift) and not hasattr(layer, "conv_states"):
        raise ValueError(f"this {kind} cannot store the token-shift state. {repair}")
    cached = cache.get_seq_length()
    return cached if isinstance(cached, int) else int(cached) if cached.device.type == "cpu" else None
