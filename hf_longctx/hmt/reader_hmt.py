"""What a model settles once: `Reader`. The calls of the model share it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .backbone_hmt import Backbone
from .configuration_hmt import HMTConfig
from .memory_hmt import HMTMemory, memory_dtype
from .retrievers_hmt import Retrievers


@dataclass(frozen=True)
class Reader:
    """The settings of a model and what follows from them.

    Attributes:
        config: the settings. They cannot change: `HMTWrapper.configure` replaces the reader.
        lm, embed, memory, retrievers: the parts of the model. `embed` embeds token ids.
        signature: the settings that a state must share (`HMTConfig.signature`).
        basis: the replaceable parts of the model from which the other attributes were derived (`basis_of`).
        is_settled: whether the weights contained data, so that the backbone was tested.
        length, j, k: L', `HMTConfig.summary_length` and `HMTConfig.sensory_tokens`.
        n_prefix: number of embeddings that a segment reads before its tokens, including the prompt.
        single_pass, reread: as in `HMTConfig`.
        in_two_passes: whether the second pass of a segment can extend the cache of the first (`single_pass_hmt.py`).
        dtype: dtype of the memory embeddings.
    """

    config: HMTConfig
    lm: Backbone
    embed: nn.Module
    memory: HMTMemory
    retrievers: Retrievers
    signature: dict
    basis: tuple
    is_settled: bool
    length: int
    j: int
    k: int
    n_prefix: int
    single_pass: bool
    reread: bool
    in_two_passes: bool
    dtype: torch.dtype


def basis_of(lm: Backbone, memory: HMTMemory) -> tuple:
    """Return what may be replaced between the calls of a model.

    It consists of the memory module and the embedding module, which PEFT replaces, the shape, dtype and device of the
    embedding weights, and the attention implementation.
    """
    embed: Any = lm.model.get_input_embeddings()
    attention = getattr(lm.model.config, "_attn_implementation", None)
    return memory, embed, embed.weight.shape, embed.weight.dtype, embed.weight.device, attention


def settle(config: HMTConfig, lm: Backbone, memory: HMTMemory) -> Reader:
    """Check that the backbone supports the settings, and return the reader. If `config.reread` is None, set it.

    Raises:
        ValueError: the backbone does not support the settings.
    """
    config.check(lm.positions)
    retrievers = Retrievers(config, memory, lm.embed)
    n_prefix = retrievers.columns
    if config.single_pass and lm.has_data:
        if config.reread is None:
            config.write(reread=not lm.can_hide(config.positions_per_segment, thorough=True))
        if not config.reread:
            lm.check_hides(config.positions_per_segment, extends=n_prefix == 1)
    return Reader(
        config=config,
        lm=lm,
        embed=lm.model.get_input_embeddings(),
        memory=memory,
        retrievers=retrievers,
        signature=config.signature(lm.width),
        basis=basis_of(lm, memory),
        is_settled=lm.has_data,
        length=config.segment_length,
        j=config.summary_length,
        k=config.sensory_tokens,
        n_prefix=n_prefix,
        single_pass=config.single_pass,
        reread=bool(config.reread),
        in_two_passes=config.single_pass and not config.reread and n_prefix == 1,
        dtype=memory_dtype(lm.model),
    )


__all__ = ["Reader", "basis_of", "settle"]
