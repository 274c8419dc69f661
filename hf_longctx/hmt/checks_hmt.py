"""What a caller of `HMTWrapper` can get wrong, and what does not show in a shape."""

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


__all__ = ["check_generation", "check_ids"]
