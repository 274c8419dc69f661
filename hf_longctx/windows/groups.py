"""The windows of one layer, and the groups of its key heads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class HeadGroup(NamedTuple):
    """Key heads with the same window. -1: these heads keep all keys."""

    window: int
    heads: tuple[int, ...]


def group_heads(windows: Sequence[int]) -> tuple[HeadGroup, ...]:
    """Group the key heads of one layer by their windows.

    >>> group_heads([64, -1, 64])
    (HeadGroup(window=-1, heads=(1,)), HeadGroup(window=64, heads=(0, 2)))
    """
    return tuple(
        HeadGroup(window, tuple(head for head, other in enumerate(windows) if other == window))
        for window in sorted(set(windows))
    )


class Extent(NamedTuple):
    """The keys that a group of heads keeps: the first `sinks` and the last `window`."""

    window: int
    sinks: int


@dataclass(frozen=True)
class LayerWindows:
    """The window of each key head of one layer, and the number of first tokens that every head keeps."""

    windows: tuple[int, ...]
    sinks: int
    groups: tuple[HeadGroup, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", group_heads(self.windows))

    def extent(self, group: HeadGroup, sliding_window: int | None) -> Extent | None:
        """Return which keys a group keeps. None: all keys that the layer's own attention reaches.

        sliding_window: the layer's own window. None: full attention.
        """
        if group.window < 0 or (sliding_window is not None and sliding_window <= group.window):
            return None
        return Extent(group.window, self.sinks)


def kept_keys(window: int, sinks: int, context: int) -> int:
    """Return the number of keys that a head keeps after `context` tokens.

    >>> kept_keys(64, 4, 1000), kept_keys(64, 4, 10), kept_keys(-1, 4, 1000)
    (68, 10, 1000)
    """
    return context if window < 0 else min(context, sinks + window)
