"""Tensors that grow by a token a call and are not copied for it.

A cache of transformers copies all of its tokens to append one. Here, free places lie behind the last token: the next
one is written into the first of them, and a view that is one place longer takes the place of the old one.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch


FREE = 64  # places, for which a cache takes memory in advance


class Growing:
    """The free places behind a tensor of (..., tokens, numbers) or (..., numbers, tokens).

    Only the tensor that was returned last grows into them. One that has been cut, reordered or loaded, or that of a
    copied cache, is copied first, so no two tensors write to one place.
    """

    latest: Callable[[], Any] = staticmethod(lambda: None)
    free = 0

    def __reduce__(self):  # a copy shares no memory
        return Growing, ()

    def append(self, x: torch.Tensor, new: torch.Tensor, dim: int = -2, most: int | None = None) -> torch.Tensor:
        """Return x with one more token, or its last `most` tokens; without derivatives.

        new: the first numbers of the new token, like x. The others are those of the token before.
        dim: -2 or -1, where the tokens are. The numbers of a token lie together in memory.
        """
        shape = list(x.shape)
        length = shape[dim]
        if self.latest() is not x or self.free == 0 or (x.is_inference() and not torch.is_inference_mode_enabled()):
            rows = x.transpose(dim, -2)
            memory = rows.new_empty(*rows.shape[:-2], length + FREE, rows.shape[-1]).transpose(dim, -2)
            memory.narrow(dim, length, FREE).copy_(x.narrow(dim, length - 1, 1))
            x, self.free = memory.narrow(dim, 0, length).copy_(x), FREE
        self.free -= 1
        strides, begin = x.stride(), x.storage_offset()
        x.as_strided(new.shape, strides, begin + length * strides[dim]).copy_(new)
        first = 0 if most is None else max(length + 1 - most, 0)
        shape[dim] = length + 1 - first
        longer = x.as_strided(shape, strides, begin + first * strides[dim])
        self.latest = weakref.ref(longer)
        return longer
