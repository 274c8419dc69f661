"""What a caller of the model can get wrong: each thing is refused with one error that says how to mend it.

Shapes, dtypes and types cost nothing to look at. Values are looked at where they lie on the CPU only, since a look at a GPU
would make it wait in every step. While compiling nothing is checked.
"""

import torch

from .attention_fox import GATE_PARTS, GATE_QUERY, folded_width


def seen_tokens(past_key_values) -> int | None:
    """Tokens in a cache; None where only the GPU knows."""
    if past_key_values is None:
        return 0
    seen = past_key_values.get_seq_length()
    if isinstance(seen, torch.Tensor):
        return int(seen) if seen.device.type == "cpu" else None
    return seen


def check_call(model, inputs_embeds, attention_mask, position_ids, past_key_values):
    """Raise ValueError for what cannot be one call of the model: its tokens, mask, positions and cache do not fit.

    Args:
        model: the `FoxModel`.
        inputs_embeds: (B, T, hidden).
        attention_mask: (B, past + T) or a mask that is left to the attention backend.
        position_ids: (1 or B, T) or None.
        past_key_values: a `Cache` or None.
    """
    batch, length = inputs_embeds.shape[:2]
    if batch == 0 or length == 0:
        raise ValueError(f"the input is empty: {batch} rows of {length} tokens. Give at least one token.")
    if position_ids is not None and (position_ids.shape[-1] != length or position_ids.shape[0] not in (1, batch)):
        raise ValueError(
            f"position_ids is {tuple(position_ids.shape)}; for {batch} rows of {length} tokens it must be "
            f"{(batch, length)} or {(1, length)}. Leave it out to count from the cached tokens on."
        )
    if past_key_values is not None:
        layers, depth = getattr(past_key_values, "layers", None), model.config.num_hidden_layers
        if layers is None or len(layers) not in (0, depth):
            what = "no transformers Cache" if layers is None else f"for {len(layers)} layers"
            raise ValueError(
                f"this {type(past_key_values).__name__} is {what} and the model has {depth} layers; make a cache for this "
                "model: DynamicCache(config=model.config)."
            )
    seen = seen_tokens(past_key_values)
    for layer in past_key_values.layers[:1] if past_key_values is not None else ():
        room = getattr(layer, "max_cache_len", None)  # of a static cache; a window moves on
        needed = (seen or 0) + length
        if room is not None and not layer.is_sliding and needed > room:
            raise ValueError(
                f"this {type(past_key_values).__name__} has room for {room} tokens and {needed} are needed; make it with a "
                "larger max_cache_len."
            )
    flat_mask = isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2
    if flat_mask and seen is not None and attention_mask.shape != (batch, seen + length):
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}; it must be {(batch, seen + length)}: a column for each of "
            f"{seen} cached and {length} new tokens, 1 for a token and 0 for padding."
        )


def check_dtype(hidden_states, projection):
    """Raise ValueError if what enters the first layer has another dtype than its weights.

    It is asked there, not of the model's input: sharded weights have their dtype of computation only while they are used.
    """
    weight = getattr(projection, "weight", None)
    plain = weight is not None and weight.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if plain and hidden_states.dtype != weight.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
        raise ValueError(
            f"inputs_embeds is {hidden_states.dtype} but the weights are {weight.dtype}; cast one of them: "
            "inputs_embeds.to(model.dtype)."
        )


def check_positions(position_ids, starts):
    """Raise ValueError if positions fall where no document starts again.

    Args:
        position_ids: (B, T).
        starts: (B, T) bool, where they do not rise; each is taken for the start of a document.
    """
    wrong = starts & (position_ids != position_ids[:, :1])
    if wrong.any():
        row, at = wrong.nonzero()[0].tolist()
        fall = f"from {position_ids[row, at - 1]} to {position_ids[row, at]}"
        raise ValueError(
            f"position_ids go {fall} at token {at} of row {row}. Within a document they must rise, and the next document "
            f"packed into the row must start with {position_ids[row, 0]} again, as the first did."
        )


def check_cache(attention, past_key_values, k):
    """Raise ValueError unless this model can have written what the cache holds.

    Args:
        attention: the `FoxAttention` about to use its layer of the cache.
        past_key_values: a `Cache`.
        k: keys before the decay is folded in, (B, T, Hkv, D).
    """
    layers = past_key_values.layers
    layer = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
    if layer is None or not layer.is_initialized or layer.keys.ndim != 4:
        return
    keys, gated = layer.keys, attention.f_proj is not None
    width = folded_width(attention.head_dim, attention.gates_per_key, k.device) if gated else attention.head_dim
    dtype = k.dtype
    if torch.is_autocast_enabled(k.device.type):  # without a gate, norms and RoPE decide
        dtype = torch.get_autocast_dtype(k.device.type) if gated else keys.dtype
    has = (keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype)
    needs = (k.shape[0], k.shape[2], width, dtype)
    if has != needs:
        raise ValueError(
            f"this {type(past_key_values).__name__} holds keys of (rows, heads, width, dtype) = {has}; those of this model "
            f"and input are {needs}. It was filled by another model, in another dtype or for another batch. Make one for "
            "this model: DynamicCache(config=model.config)."
        )
    looked_at = gated and attention.layer_idx == 0 and keys.device.type == "cpu" and keys.shape[2] > 0
    marker = attention.head_dim + GATE_PARTS * attention.gates_per_key  # of a key that the decay was folded into
    if looked_at and layer.get_seq_length() > 0 and keys[0, 0, 0, marker] != GATE_QUERY:
        raise ValueError(
            f"the keys in this {type(past_key_values).__name__} carry no decay, so another model has filled it. Make one "
            "for this model: DynamicCache(config=model.config)."
        )
