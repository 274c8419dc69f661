"""Conversations with an HMT: a request holds a conversation from its beginning, and only what is new in it is read."""

import hashlib
import struct
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from .memory_hmt import HMTState
from .modeling_hmt import HMTWrapper
from .reading import save


class Conversations:
    """Keep the states of the latest conversations; `generate` goes on from them.

    Two states of a conversation are kept: one behind its latest prompt, one behind the reply. A state serves only ids
    that begin with those that it has read; others, such as a history that was edited, are read from their beginning.

    Args:
        number: how many conversations stay in memory; the one that was used least recently leaves.
        folder: where states are written too. A conversation that has left, or that an earlier process had, goes on
            from there. Files are named by hashes; deleting them is safe, and left to the caller.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, number: int = 16, folder: Path | None = None):
        if number < 0:
            raise ValueError(f"The number of conversations in memory is {number}; it must be 0 or more.")
        self.number, self.folder = number, folder
        self._kept: OrderedDict[str, dict[str, HMTState]] = OrderedDict()  # by name; by what was read

    @torch.no_grad()
    def generate(self, model: HMTWrapper, name: str, input_ids: Tensor, **options: Any) -> Tensor:
        """Generate what `model.generate` does, (1, T + new), from the ids of a whole conversation, (1, T), long.

        Args:
            model: the one that all states of these conversations come from.
            name: of the conversation.
            options: those of `model.generate`.
        """
        if model.config.recall_mode == "paper":  # which goes on at borders of segments only
            return model.generate(input_ids, **options)
        ids = input_ids[0].tolist()
        state = self._find(model, name, ids)
        begun = 0 if state is None else state.position
        if begun < len(ids) - 1:
            state = model(input_ids[:, begun:-1], state=state, use_cache=True, logits_to_keep=1).state
        states, prompt = {}, what_was_read(ids[:-1])
        if state is not None:
            states[prompt] = state.without_kv_cache()
            self._keep(model, name, states, prompt)  # generation may be cut short
        output: Any = model.generate(input_ids, cache=state, return_dict_in_generate=True, **options)
        state = output.get("state")  # beams have none
        if state is not None and len(state.lengths) == 1:
            reply = what_was_read(output.sequences[0, :-1].tolist())
            self._keep(model, name, states | {reply: state}, reply)
        return output.sequences

    def _find(self, model: HMTWrapper, name: str, ids: list[int]) -> HMTState | None:
        """Return the state that has read most of the ids, but not the last."""
        kept, files = self._kept.get(name, {}), {}
        if self.folder is not None:
            files = {path.stem: path for path in self._files(name).glob("*.safetensors")}
        for read in sorted({*kept, *files}, key=tokens_of, reverse=True):
            if tokens_of(read) < len(ids) and what_was_read(ids[: tokens_of(read)]) == read:
                if read in kept:
                    return kept[read]
                try:
                    return HMTState.load(files[read], model, device=model.device)
                except (ValueError, OSError) as error:
                    warnings.warn(f"A conversation is read again from its beginning: {error}", stacklevel=2)
        return None

    def _keep(self, model: HMTWrapper, name: str, states: dict[str, HMTState], new: str) -> None:
        """Keep the states of a conversation in place of those before; the one of `new` is not yet on disk."""
        self._kept[name] = states
        self._kept.move_to_end(name)
        while len(self._kept) > self.number:
            self._kept.popitem(last=False)
        if self.folder is None:
            return
        try:
            folder = self._files(name)
            folder.mkdir(parents=True, exist_ok=True)
            save(states[new], model, folder / f"{new}.safetensors")
            for path in folder.glob("*.safetensors"):
                if path.stem not in states:
                    path.unlink()
        except (OSError, SafetensorError) as error:
            warnings.warn(f"The state of a conversation is not on disk, and stays in memory: {error}", stacklevel=2)

    def _files(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / hashlib.sha256(name.encode()).hexdigest()


def what_was_read(ids: list[int]) -> str:
    """Return the number of the ids, and a hash of them."""
    return f"{len(ids)}-{hashlib.sha256(struct.pack(f'<{len(ids)}q', *ids)).hexdigest()}"


def tokens_of(read: str) -> int:
    """Return the number of ids from what `what_was_read` returns.

    >>> tokens_of(what_was_read([5, 6, 7]))
    3
    """
    return int(read.partition("-")[0])


__all__ = ["Conversations"]
