"""Long texts with a known structure, to watch what a memory recalls (arXiv 2405.06067, appendix D).

Token ids in, token ids out; lists, so that they can be used within `datasets.map`.
"""


def interleave(first: list[int], second: list[int], length: int) -> list[int]:
    """Two texts in turns: `length` tokens of the first, `length` of the second, and so on; then what is left of one.

    A model with a memory should look two turns back, past the other text.

    >>> interleave([1, 2, 3, 4, 5], [6, 7, 8], 2)
    [1, 2, 6, 7, 3, 4, 8, 5]
    """
    _check(length)
    starts = range(0, max(len(first), len(second)), length)
    return [token for start in starts for text in (first, second) for token in text[start : start + length]]


def dilate(ids: list[int], length: int, filler: int) -> list[int]:
    """A text with `length` copies of one token after every `length` tokens. The copies are not worth remembering.

    >>> dilate([1, 2, 3, 4, 5], 2, filler=0)
    [1, 2, 0, 0, 3, 4, 0, 0, 5]
    """
    _check(length)
    pieces = (ids[start : start + length] for start in range(0, len(ids), length))
    return [token for piece in pieces for token in (piece + [filler] * length if len(piece) == length else piece)]


def _check(length):
    if length < 1:
        raise ValueError(f"length is {length}; a turn needs at least one token.")


__all__ = ["dilate", "interleave"]
