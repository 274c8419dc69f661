"""How a model's queries and keys vary, component by component: what eq. 19 of arXiv 2405.14591 weighs cosines with."""

import sys
from typing import NamedTuple

import numpy as np


class QKSpread(NamedTuple):
    """Standard deviations over tokens of one layer's queries and keys before rotation, float64, (query heads, d) each.

    interleaved: whether the layer rotates components (2i, 2i+1) together, or (i, i + d/2).
    """

    q_std: np.ndarray
    k_std: np.ndarray
    interleaved: bool


def measure_qk_spread(model, input_ids) -> dict[int, QKSpread]:
    """Run a model once and measure every attention layer's queries and keys, as they are just before RoPE.

    Args:
        model: a `PreTrainedModel` whose attention is of Llama's make: q_proj and k_proj, perhaps q_norm and k_norm
            after them, head_dim, and a rotate_half in its modeling file (which tells how components pair up).
        input_ids: (B, T) on the model's device, at least 2 tokens; the spread is over all B T of them, so take
            hundreds of tokens of ordinary text at least.

    Returns:
        {layer index: QKSpread}. Key heads are repeated to the number of query heads.

    Raises:
        ValueError: input_ids has another shape or a single token.
        NotImplementedError: the attention is built differently; its class is named.
    """
    import torch

    if input_ids.ndim != 2 or input_ids.numel() < 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; (B, T) with two tokens or more is needed.")
    text_config = model.config.get_text_config(decoder=True)
    layers = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and hasattr(module, "head_dim")
        and getattr(module, "config", None) is text_config
    }
    if not layers:
        raise NotImplementedError(f"{type(model).__name__} has no attention with q_proj and k_proj to measure.")
    captured, handles = {}, []

    def capture(layer, name):
        def hook(module, args, output):
            heads = output.detach().reshape(input_ids.numel(), -1, layers[layer].head_dim)
            captured[layer, name] = heads.double().std(0, correction=0).cpu().numpy()

        return hook

    try:
        for layer, module in layers.items():
            for name, source in zip("qk", _before_rotation(module)):
                handles.append(source.register_forward_hook(capture(layer, name)))
        with torch.no_grad():
            model(input_ids=input_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    spread = {}
    for layer, module in layers.items():
        q_std, k_std = captured[layer, "q"], captured[layer, "k"]
        spread[layer] = QKSpread(q_std, np.repeat(k_std, len(q_std) // len(k_std), axis=0), _interleaved(module))
    return spread


def _before_rotation(attention):
    """The two submodules whose outputs are the queries and keys that RoPE rotates."""
    names = dict(attention.named_children())
    strange = [name for name in names if "norm" in name and name not in ("q_norm", "k_norm", "v_norm")]
    if "q_proj" not in names or "k_proj" not in names or strange:
        raise NotImplementedError(
            f"{type(attention).__name__} has {', '.join(names)}; queries and keys are measured only behind q_proj and "
            "k_proj, or q_norm and k_norm after them."
        )
    return names.get("q_norm", names["q_proj"]), names.get("k_norm", names["k_proj"])


def _interleaved(attention):
    """Which components rotate together, by a call of the rotate_half in the attention's modeling file."""
    import torch

    rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
    rotated = None if rotate_half is None else rotate_half(torch.arange(1.0, 5.0)).tolist()
    if rotated not in ([-3, -4, 1, 2], [-2, 1, -4, 3]):
        raise NotImplementedError(f"{type(attention).__name__} rotates its queries in an unknown way.")
    return rotated == [-2, 1, -4, 3]
