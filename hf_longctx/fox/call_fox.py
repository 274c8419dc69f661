"""The `Call` that every layer takes: which tokens are real, which sequences share a row, and who sees whom."""

from typing import Any, NamedTuple, Protocol

import torch


def is_exporting() -> bool:
    """Return whether `torch.export` traces the call, by its flag: torch 2.11 compiles `is_exporting()` to True."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


class Shard(Protocol):
    """The part of each row that this process has, where N = `size` processes share the rows; t = T / N.

    All methods but `part` are collective operations, forward and backward.
    """

    size: int

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return the entries of this process: (B, T, ...) -> (B, t, ...)."""
        ...

    def token_before(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last token of the part before, 0 for the first part: (B, t, ...) -> (B, 1, ...)."""
        ...

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Trade parts of rows for heads: (B, H, t, ...) -> (B, H / N, T, ...)."""
        ...

    def to_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Trade heads for parts of rows: (B, T, H / N, ...) -> (B, t, H, ...)."""
        ...


class Call(NamedTuple):
    """All that the layers need to know of one call, the same for every layer.

    mask: who sees whom, in the form that the attention implementation takes; None for plain causal attention.
    token_mask: (B, T) bool, False at padding. None: every token is real.
    position_ids: (1 or B, T), positions for RoPE.
    position_in_sequence: (B, T), where rows hold several sequences. None: each row is one sequence.
    predecessor: (1 or B, T), the token before each one, for the token shift: an index of the last cached token, 0, and
        the new ones; -1 for none. None: the tokens stand one after another.
    successor: (1 or B, T), the new real token whose predecessor each one is, an index of the new ones; -1 for none.
        None: as `predecessor`, or the tokens are those of a tree.
    visible: (1 or B, 1, T, keys) bool, the keys that each token sees by a mask of four dimensions, else None.
    flash: borders of the sequences, as FlashAttention takes them.
    shard: which part of the rows is here; `predecessor` is then of this part, everything else of the whole rows. None:
        the rows are here as a whole.
    implementation: the attention implementation; None: that of the config.
    """

    mask: Any = None
    token_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    position_in_sequence: torch.Tensor | None = None
    predecessor: torch.Tensor | None = None
    successor: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    flash: dict[str, Any] = {}
    shard: Shard | None = None
    implementation: str | None = None


PLAIN_CALL = Call()  # real tokens of one sequence per row, and nothing cached
