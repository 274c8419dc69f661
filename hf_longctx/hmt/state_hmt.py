"""The state of a batch of sequences between calls, and its file format: `HMTState`."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel


@dataclass
class HMTState:
    """The state of a batch of sequences. A later call, training step or process can continue from it.

    A call does not modify its input state, so several calls can branch from one state. A call checks that the settings
    of the state and of the model are equal. `load` also compares the weights.

    Attributes:
        memory: memories of the retrievers, keyed by name (`retriever_hmt.py`).
        tail: the last k tokens of the previous segment and the l tokens of the open segment, (B, k + l).
        lengths: for each row, the number of tokens read. Every L'-th token ends a segment.
        signature: architecture and settings of the model (`HMTConfig.signature`).
        open_mask: (B, l), bool, False on padding of the open segment. Used only in paper mode. None without padding.
        kv_cache: keys and values of the open segments. If it is None, the next call reads the open segments again.
            Files do not contain it.
        kv_mask: (B, P), bool, False on padding of `kv_cache`. None without padding.
    """

    memory: dict[str, dict[str, Tensor]]
    tail: Tensor
    lengths: tuple[int, ...]
    signature: dict
    open_mask: Tensor | None = None
    kv_cache: Cache | None = field(default=None, repr=False)
    kv_mask: Tensor | None = field(default=None, repr=False)

    is_croppable = False  # transformers checks this before it crops a cache

    @property
    def position(self) -> int:
        """Number of tokens that the longest row has read."""
        return max(self.lengths)

    @property
    def segment(self) -> int:
        """Number of full segments of the longest row."""
        return self.position // self.signature["segment_length"]

    @property
    def open_ids(self) -> Tensor:
        """The tokens of the open segment, (B, l)."""
        return self.tail[:, self.signature["sensory_tokens"] :]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the memories. None if no retriever stores embeddings."""
        return next((x.dtype for name, x in self.tensors().items() if x.is_floating_point()), None)

    def segments(self) -> list[list[range]]:
        """For each row, list the token ranges of the remembered segments, oldest first."""
        length = self.signature["segment_length"]
        for state in self.memory.values():
            if "ends" in state:
                return [[range(end - length, end) for end in row if end] for row in state["ends"].tolist()]
        return [[] for _ in self.lengths]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, keyed by name. Tensors in the key/value cache are omitted."""
        named = {"tail": self.tail} if self.open_mask is None else {"tail": self.tail, "open_mask": self.open_mask}
        for name, state in self.memory.items():
            named |= {f"memory.{name}.{key}": value for key, value in state.items()}
        return named

    def without_kv_cache(self) -> "HMTState":
        """Return a state without the key/value cache. The next call then reads the open segment again."""
        return replace(self, kv_cache=None, kv_mask=None)

    def map(self, function: Callable[[Tensor], Tensor]) -> "HMTState":
        """Return a state with `function` applied to each tensor, and without the key/value cache."""
        memory = {name: {key: function(x) for key, x in state.items()} for name, state in self.memory.items()}
        open_mask = None if self.open_mask is None else function(self.open_mask)
        state = replace(self, memory=memory, tail=function(self.tail), open_mask=open_mask)
        return state.without_kv_cache()

    def detach(self) -> "HMTState":
        """Return a state without the autograd graph. Gradients then do not reach earlier calls."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> "HMTState":
        """Return the state on another device.

        Raises:
            TypeError: `device` is a dtype. A cast would round token ids too.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"`device` must be a device, got the dtype {device}. Cast the model instead of its state.")
        return self.map(lambda x: x.to(device))

    def select_rows(self, index: Tensor | Sequence[int]) -> "HMTState":
        """Select rows. `index`: (rows,), from 0 to B - 1. The new state does not contain the key/value cache."""
        chosen = torch.as_tensor(index, device=self.tail.device)
        state = self.map(lambda x: take_rows(x, chosen))
        return replace(state, lengths=tuple(self.lengths[i] for i in chosen.tolist()))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Select rows in place, as beam search does with a `Cache`. `beam_idx`: (rows,), long."""
        kv_cache, kv_mask = self.kv_cache, self.kv_mask
        self.__dict__.update(self.select_rows(beam_idx).__dict__)
        if kv_cache is not None:
            kv_cache.reorder_cache(beam_idx)
            kv_mask = None if kv_mask is None else kv_mask.index_select(0, beam_idx.to(kv_mask.device))
            self.kv_cache, self.kv_mask = kv_cache, kv_mask

    def save(self, path: str | Path, model: nn.Module | None, about: dict | None = None) -> None:
        """Write a safetensors file from which `load` restores the state in any process.

        Args:
            model: model that read the sequences. `load` recognizes the model by a hash of its weights. During
                training, pass None, because training changes the weights.
            about: additional information to save as JSON.
        """
        metadata = {"hmt_state": json.dumps({"lengths": self.lengths, "retrievers": [*self.memory]})}
        metadata |= {"signature": json.dumps(self.signature), "weights": weights_hash(model)}
        metadata |= {} if about is None else {"about": json.dumps(about)}
        # copies, because safetensors does not accept tensors that share storage
        copies = {n: x.detach().clone(memory_format=torch.contiguous_format) for n, x in self.tensors().items()}
        save_file(copies, str(path), metadata=metadata)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel | None, device: torch.device | str = "cpu") -> "HMTState":
        """Read a state written by `save`.

        Args:
            model: model that continues from the state. Memories are cast to the dtype of the model. None: weights are
                not compared. Pass None if the weights have changed, for example after training.

        Raises:
            ValueError: the file is damaged, does not contain a state, or was saved by a model with other weights.
        """
        try:
            with safe_open(str(path), "pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            is_own = model is None or metadata["weights"] == weights_hash(model)
            if model is not None:  # models of different dtypes can have the same hash
                like: Any = model.get_input_embeddings().weight
                tensors = {name: x.to(like.dtype) if x.is_floating_point() else x for name, x in tensors.items()}
            header, signature = json.loads(metadata["hmt_state"]), json.loads(metadata["signature"])
            memory: dict[str, dict[str, Tensor]] = {name: {} for name in header["retrievers"]}
            fields = {name: tensors.pop(name) for name in ("tail", "open_mask") if name in tensors}
            for name, value in tensors.items():
                retriever, key = name.removeprefix("memory.").split(".")
                memory[retriever][key] = value
            state = cls(memory=memory, lengths=tuple(header["lengths"]), signature=signature, **fields)
            state.check()
        except torch.OutOfMemoryError:
            raise
        except _DAMAGED as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is not a complete file written by HMTState.save ({reason}).") from error
        if not is_own:
            raise ValueError(
                f"{path} was saved by a different model. Its memories are useless to this model. Load the model that "
                "saved the file, or pass model=None."
            )
        return state

    def check(self) -> None:
        """Raise ValueError if the fields differ in the number of rows or tokens."""
        length = self.signature["segment_length"]
        opened = max((n % length for n in self.lengths), default=0)
        shape = len(self.lengths), self.signature["sensory_tokens"] + opened
        ends = [row[-1].stop if row else n - n % length for row, n in zip(self.segments(), self.lengths)]
        if not ends or ends != [n - n % length for n in self.lengths] or self.tail.shape != shape:
            raise ValueError(
                f"the rows have read {self.lengths} tokens, their memories end at {ends}, and the tail has shape "
                f"{tuple(self.tail.shape)}"
            )
        for name, state in self.memory.items():
            if not state or any(len(value) != len(self.lengths) for value in state.values()):
                raise ValueError(f"{name!r} does not have a memory of {len(self.lengths)} rows")


# errors that a damaged file can cause, such as ZeroDivisionError for a segment length of 0
_DAMAGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError, ValueError)


def weights_hash(model: nn.Module | None) -> str:
    """Hash about 64 values of each parameter.

    Training changes the hash. A cast to float32 does not, because the values are hashed in bfloat16.
    """
    digest = hashlib.sha256()
    for parameter in () if model is None else model.parameters():
        if not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 64)].to("cpu", torch.bfloat16).contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def join_rows(parts: list[tuple[list[int], Tensor]], batch: int) -> Tensor:
    """Join tensors of different rows into one tensor (batch, n, ...). Rows are left-padded with 0; missing rows are 0.

    Args:
        parts: pairs (row indices, tensor (rows, n, ...)).
    """
    rows, like = parts[0]
    if len(rows) == batch:
        return like
    joined = like.new_zeros(batch, max(x.shape[1] for _, x in parts), *like.shape[2:])
    for rows, x in parts:
        joined[rows, joined.shape[1] - x.shape[1] :] = x
    return joined


def join_memories(parts: list[tuple[list[int], dict[str, dict[str, Tensor]]]]) -> dict[str, dict[str, Tensor]]:
    """Join memories of different rows. Each row of the batch must be in one of the memories."""
    batch = sum(len(rows) for rows, _ in parts)
    return {
        name: {key: join_rows([(rows, memory[name][key]) for rows, memory in parts], batch) for key in state}
        for name, state in parts[0][1].items()
    }


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows], for x (B, ...) and row indices (n,), long. Copies of one row, such as beams, share storage."""
    alike = x.stride(0) == 0  # expanded already
    if not alike and (rows != rows[0]).any():
        return x.index_select(0, rows)
    row = x[:1] if alike else x.index_select(0, rows[:1])
    return row.expand(len(rows), *x.shape[1:])
