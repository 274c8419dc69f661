"""Long texts with a known structure, which show what a memory recalls (arXiv 2405.06067, appendix D).

The functions take and return lists of token ids, as `datasets.map` does.
"""


def interleave(first: list[int], second: list[int], length: int) -> list[int]:
    """Two texts in turns: `length` tokens of the first, `length` of the second, and so on; then the longer one's rest.

    The text of a turn continues two turns back: a model with a memory should recall from there.

    >>> interleave([1, 2, 3, 4, 5], [6, 7, 8], 2)
    [1, 2, 6, 7, 3, 4, 8, 5]
    """
    _check_length(length)
    starts = range(0, max(len(first), len(second)), length)
    return [token for start in starts for text in (first, second) for token in text[start : start + length]]


def dilate(ids: list[int], length: int, filler: int) -> list[int]:
    """A text with `length` copies of the token `filler` after every `length` tokens; a memory should ignore the
    copies.

    >>> dilate([1, 2, 3, 4, 5], 2, filler=0)
    [1, 2, 0, 0, 3, 4, 0, 0, 5]
    """
    _check_length(length)
    pieces = (ids[start : start + length] for start in range(0, len(ids), length))
    return [token for piece in pieces for token in (piece + [filler] * length if len(piece) == length else piece)]


def _check_length(length):
    if length < 1:
        raise ValueError(f"length is {length}; it must be at least one token.")


__all__ = ["dilate", "interleave"]
