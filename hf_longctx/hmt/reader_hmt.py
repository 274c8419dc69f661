"""What a model settles once: `Reader`. The calls of the model share it."""

from typing import Any

from .backbone_hmt import Backbone
from .configuration_hmt import HMTConfig
from .memory_hmt import HMTMemory
from .retrievers_hmt import Retrievers


class Reader:
    """The settings of a model and what follows from them. No attribute changes: `HMTWrapper` replaces its reader.

    Args:
        config: the settings. If `reread` is None, it is set.
        lm, memory: the backbone and the memory of the model.

    Attributes:
        signature: the settings that a state must share (`HMTConfig.signature`).
        basis: the replaceable parts of the model from which the other attributes were derived (`basis_of`).
        is_settled: whether the weights contained data, so that the backbone was tested.
        length, j, k: L', `HMTConfig.summary_length` and `HMTConfig.sensory_tokens`.
        n_prefix: number of embeddings that a segment reads before its tokens, including the prompt.
        in_two_passes: whether the second pass of a segment can extend the cache of the first (`single_pass_hmt.py`).
        dtype: dtype of the memory embeddings.

    Raises:
        ValueError: the backbone does not support the settings.
    """

    def __init__(self, config: HMTConfig, lm: Backbone, memory: HMTMemory):
        config.check(lm.positions)
        self.config, self.lm, self.memory = config, lm, memory
        self.basis = basis_of(lm, memory)
        self.is_settled = lm.has_data
        self.embed: Any = lm.model.get_input_embeddings()
        self.retrievers = Retrievers(config, memory, lm.embed)
        self.n_prefix = self.retrievers.columns
        self.length, self.j, self.k = config.segment_length, config.summary_length, config.sensory_tokens
        self.single_pass = config.single_pass
        if self.single_pass and self.is_settled:
            if config.reread is None:
                config.write(reread=not lm.can_hide(config.positions_per_segment, thorough=True))
            if not config.reread:
                lm.check_hides(config.positions_per_segment, extends=self.n_prefix == 1)
        self.reread = bool(config.reread)
        self.in_two_passes = self.single_pass and not self.reread and self.n_prefix == 1
        self.dtype = self.embed.weight.dtype
        self.signature = config.signature(lm.width)


def basis_of(lm: Backbone, memory: HMTMemory) -> tuple:
    """Return what may be replaced between the calls of a model.

    It consists of the memory module and the embedding module, which PEFT replaces, the shape, dtype and device of the
    embedding weights, and the attention implementation.
    """
    embed: Any = lm.model.get_input_embeddings()
    return memory, embed, embed.weight.shape, embed.weight.dtype, embed.weight.device, lm.attention
