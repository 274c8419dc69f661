"""What a model settles once: `Reader`. The calls of the model share it."""

from dataclasses import dataclass

from .backbone_hmt import Backbone
from .configuration_hmt import HMTConfig
from .memory_hmt import HMTMemory
from .retrievers_hmt import Retrievers


@dataclass(frozen=True)
class Reader:
    """The settings of a model and what follows from them.

    Attributes:
        config: the settings. They cannot change: `HMTWrapper.configure` replaces the reader.
        lm, memory, retrievers: the parts of the model.
        signature: the settings that a state must share (`HMTConfig.signature`).
        basis: the replaceable parts of the model (`basis_of`) from which the other attributes were derived.
        length, j, k: L', `HMTConfig.summary_length` and `HMTConfig.sensory_tokens`.
        single_pass, reread: as in `HMTConfig`.
    """

    config: HMTConfig
    lm: Backbone
    memory: HMTMemory
    retrievers: Retrievers
    signature: dict
    basis: tuple
    length: int
    j: int
    k: int
    single_pass: bool
    reread: bool

    @property
    def in_two_passes(self) -> bool:
        """Whether the second pass of a segment can extend the cache of the first one (`single_pass_hmt.py`)."""
        return not self.reread and self.retrievers.columns == 1


def basis_of(lm: Backbone, memory: HMTMemory) -> tuple:
    """Return the parts of a model that may be replaced between calls.

    These are: the memory module (by PEFT), the attention implementation, the vocabulary size, and whether the weights
    contain data.
    """
    return memory, lm.attention, len(lm.model.get_input_embeddings().weight), lm.has_data


def settle(config: HMTConfig, lm: Backbone, memory: HMTMemory) -> Reader:
    """Check that the backbone supports the settings, and return the reader. If `config.reread` is None, set it.

    Raises:
        ValueError: the backbone does not support the settings.
    """
    config.check(lm.positions)
    retrievers = Retrievers(config, memory, lm.embed)
    if config.single_pass and lm.has_data:
        positions = config.positions_per_segment
        if config.reread is None:
            config.write(reread=not lm.can_hide(positions, thorough=True))
        if not config.reread:
            lm.check_hides(positions, extends=retrievers.columns == 1)
    return Reader(
        config=config,
        lm=lm,
        memory=memory,
        retrievers=retrievers,
        signature=config.signature(lm.width),
        basis=basis_of(lm, memory),
        length=config.segment_length,
        j=config.summary_length,
        k=config.sensory_tokens,
        single_pass=config.single_pass,
        reread=bool(config.reread),
    )


__all__ = ["Reader", "basis_of", "settle"]
