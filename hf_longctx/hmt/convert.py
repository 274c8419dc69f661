"""Conversion between the parameters of the official HMT code and `HMTWrapper`."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .configuration_hmt import HMTConfig
from .modeling_hmt import HMTWrapper


OFFICIAL_NAMES = {
    "memory_cell.memory": "memory.initial",
    "mem": "memory.summary_token",
    "cross_attn.wq.weight": "memory.wq",
    "cross_attn.wk.weight": "memory.wk",
}
BACKBONE = "memory_cell.model."
_UNUSED = "memory_cell.mem_map."  # parameters of the official code that the published algorithm does not use


def from_official(
    backbone: nn.Module,
    params: Mapping[str, Tensor],
    *,
    memory_size: int | None = None,
    recall: bool = True,
    recall_mode: str = "paper",
    **settings,
) -> HMTWrapper:
    """Wrap a backbone, and load memory parameters in the format of the official code.

    Args:
        backbone: a causal LM. It is not copied.
        params: tensors by name: `memory_cell.memory` (m, d). With recall, also `mem` (1, d), `cross_attn.wq.weight`
            and `cross_attn.wk.weight` (h, d). If `memory_cell.model.*` is present, it is loaded into the backbone.
        memory_size: see `HMTConfig`.
        recall: whether `params` contains the recall parameters.
        recall_mode: see `HMTConfig` (default: "paper").
        settings: other fields of `HMTConfig`. `segment_length` counts only new tokens: subtract 2 m + `num_sensory`
            from the official `segment_length`.

    Raises:
        ValueError: a parameter is missing, is unknown or has the wrong shape.
    """
    needed = dict(OFFICIAL_NAMES) if recall else {"memory_cell.memory": "memory.initial"}
    unknown = [name for name in params if name not in OFFICIAL_NAMES and not name.startswith((BACKBONE, _UNUSED))]
    missing = [name for name in needed if name not in params]
    if unknown or missing:
        raise ValueError(
            f"`params` must contain {list(needed)} and may contain {BACKBONE}*. Missing: {missing}; "
            f"unknown: {unknown}. With recall=False, only memory_cell.memory is needed."
        )
    settings |= {"memory_size": memory_size, "recall": recall, "recall_mode": recall_mode}
    config = HMTConfig(recall_dim=len(params["cross_attn.wq.weight"]) if recall else None, **settings)
    backbone_weights = {name.removeprefix(BACKBONE): x for name, x in params.items() if name.startswith(BACKBONE)}
    if backbone_weights:
        backbone.load_state_dict(backbone_weights)
    model = HMTWrapper.from_backbone(backbone, config)
    with torch.no_grad():
        for name, wrapper_name in needed.items():
            parameter = model.get_parameter(wrapper_name)
            if parameter.shape != params[name].shape:
                raise ValueError(
                    f"{name} must have shape {tuple(parameter.shape)} for this backbone and these settings, got "
                    f"{tuple(params[name].shape)}."
                )
            parameter.copy_(params[name])
    return model


def official_parameters(model: HMTWrapper) -> dict[str, nn.Parameter]:
    """Return a wrapper's memory parameters, keyed by their official names. They are not copied."""
    parameters = dict(model.named_parameters())
    return {name: parameters[ours] for name, ours in OFFICIAL_NAMES.items() if ours in parameters}
