"""The memory of HMT: its parameters (`HMTMemory`) and what a stream carries from call to call (`HMTState`).

Symbols follow arXiv 2405.06067, sec. 3: d is the width of a memory embedding (that of an input embedding), h the
width of the recall projections, m the embeddings per memory, k the sensory tokens, L' the new tokens per segment.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Cache

from .neural_cache_hmt import NeuralCache
from .pages_hmt import MemoryPages


# With Wq = Wk = gain * I the scores start as gain^2 q.c / sqrt(h). Memories come out of the final norm with entries of
# order 1, so q.c / sqrt(h) is about sqrt(d) * cosine: sharp enough to pick, soft enough to learn from.
SIMILARITY_GAIN = 1.5


# Scale-free scores start as log(1 + c) times cosines over this temperature: cosines over 0.1, among ten memories.
TEMPERATURE = 0.25
# Share of an embedding's squared norm; a rest beside the mean that is smaller is not blown up to length one.
FLOOR = 1e-4


class HMTMemory(nn.Module):
    """The parameters that HMT adds to a backbone: learned prompts, two recall projections and a temperature.

    Args:
        width: d.
        memory_tokens: m.
        recall_dim: h, or None for a memory without recall, which has no projections.
        single_pass: whether it is that of the single-pass mode, whose summary token is there without recall too, and
            whose scores are free of scale.
        settings: returns those of the model. They travel with an adapter of PEFT that holds the memory.

    Parameters: `initial` (m, d), the prompt of a first segment, which the single-pass mode reads without any;
    `summary_token` (1, d), the paper's H^T, and what ends both parts of a segment in the single-pass mode; `wq`, `wk`
    (h, d); `log_temperature` (1,), of scale-free scores. All are plain parameters, so that neither quantization nor
    LoRA on "all linear layers" touches them.
    """

    def __init__(
        self,
        width: int,
        memory_tokens: int,
        recall_dim: int | None,
        single_pass: bool = False,
        settings: Callable[[], dict] = dict,
    ):
        super().__init__()
        self.settings = settings
        self.single_pass, self.memory_tokens = single_pass, memory_tokens
        if not single_pass:
            self.initial = nn.Parameter(torch.empty(memory_tokens, width))
        if single_pass or recall_dim is not None:
            self.summary_token = nn.Parameter(torch.empty(1, width))
        if recall_dim is not None:
            self.wq = nn.Parameter(torch.empty(recall_dim, width))
            self.wk = nn.Parameter(torch.empty(recall_dim, width))
            if single_pass:
                self.log_temperature = nn.Parameter(torch.empty(1))  # FSDP2 takes no scalars

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Load the weights that accelerate has offloaded, which its hook does only in a call of `forward`."""
        hook: Any = self._hf_hook
        hook.pre_forward(self)
        try:
            yield
        finally:
            hook.post_forward(self, None)

    def get_extra_state(self) -> Tensor:
        """Return the settings of the model as the bytes of a JSON text, (n,), uint8."""
        return torch.tensor(list(json.dumps(self.settings()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the settings that came with weights with those of this model; ValueError where they differ."""
        saved, own = json.loads(bytes(state.tolist())), self.settings()
        differing = {name: value for name, value in saved.items() if own.get(name) != value}
        if differing:
            raise ValueError(
                f"These weights of a memory were trained with {differing}, and this model has "
                f"{ {name: own.get(name) for name in differing} }. Load them around a model of their own settings; some "
                "may be changed afterwards, in model.config."
            )

    def scores(self, query: Tensor, bank: Tensor, origin: Tensor, count: Tensor) -> Tensor:
        """Score memory embeddings before the softmax, (B, c) in at least fp32: q Wq^T (C Wk^T)^T / sqrt(h).

        Free of scale, in the single-pass mode: log(1 + count) u(q) Wq^T (u(C) Wk^T)^T / temperature, where u(x) is x
        less the `origin`, at length one.

        Args:
            query, bank: as in `recall`.
            origin: the mean of all memories of a row, (B, 1, d).
            count: their number, (B,).
        """
        with torch.autocast(query.device.type, enabled=False):
            wide = torch.promote_types(bank.dtype, torch.float32)
            query, bank, wq, wk, origin = (x.to(wide) for x in (query, bank, self.wq, self.wk, origin))
            if self.single_pass:
                query, bank = normalize(query, origin), normalize(bank, origin)
                factor = count.to(wide).log1p()[:, None, None] * (-self.log_temperature.to(wide)).exp()
            else:
                factor = wq.shape[0] ** -0.5
            # (q Wq^T) Wk: h * d products in all, where keys would cost h * d for each memory
            return (query @ wq.mT @ wk * factor @ bank.mT).squeeze(1)

    def recall(
        self, query: Tensor, bank: Tensor, valid: Tensor, origin: Tensor | None = None, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the remembered segments (paper, sec. 3.2): softmax(scores) C.

        Hidden states of a pretrained backbone have most of their length in common, and a length that differs from
        backbone to backbone: hence the scale-free scores. The logarithm of the number of memories in them lets the
        best one keep its weight as they grow more than those of training (arXiv 2501.19399, eq. 2).

        Args:
            query: summary of the segment that recalls, (B, 1, d).
            bank: memory embeddings C, oldest first, (B, c, d).
            valid: False where a row has no such memory, (B, c), bool.
            origin, count: those of all memories, as in `scores`, where `bank` has only some of them.

        Returns:
            prompt (B, 1, d) in bank.dtype, scores (B, c) in at least fp32, 0 where not valid. Both are 0 in a row
            without any memory.
        """
        with torch.autocast(query.device.type, enabled=False):
            bank_wide = bank.to(torch.promote_types(bank.dtype, torch.float32))
            if origin is None or count is None:
                origin, count = mean_memory(bank_wide, valid)
            scores = self.scores(query, bank_wide, origin, count)
            scores = scores.masked_fill(~valid, torch.finfo(scores.dtype).min).softmax(-1) * valid
            prompt = (scores[:, None] @ bank_wide).to(bank.dtype)
        return prompt, scores

    def or_initial(self, prompt: Tensor, valid: Tensor) -> Tensor:
        """Return `prompt` (B, m, d) where a row has a memory (`valid`, (B, c)), else `initial`, as three passes do."""
        return torch.where(valid.any(1)[:, None, None], prompt, self.initial.to(prompt))


@dataclass
class HMTState:
    """Everything that continues a stream: in the next call, after a gradient cut, or in another process.

    Each row has read `lengths` (B ints) tokens and has segment borders of its own, at every L'-th of its tokens.

    Tensors (B rows): `bank` (B, c, d) memory embeddings, the latest at the end; `ends` (B, c) long, how many tokens
    of the text were read when each was made, 0 where a row has no such memory; `query` (B, 1, d) summary of the
    latest segment that recalled; `sensory_ids`, `sensory_mask` (B, k); `open_ids`, `open_mask` (B, l) the tokens of
    the open segment, from the left, which is not full yet, l < L'; `opening_prompt` and `prompt` (B, m, d), the open
    segment's prompts before and after its recall. Where tokens are read again, `bank_ids` (B, c, L') long holds the
    tokens of each memory, and the embeddings of r of them stand behind `prompt`. A neural cache takes `bank_ids` too,
    and `bank_keys` (B, c, L' - 1, d), see `NeuralCache`. `kv_cache` holds the keys and values of the open segments and
    speeds up the next call; `kv_mask` (B, P) is False, or 0, where these are padding. The cache is never saved, and
    without it the open segments are read again. `pages` holds, for each row, the embeddings that fell out of `bank`,
    if the model keeps pages.

    A call does not change its state: keep a state to branch off from it later. `position` and `segment` count the
    tokens and the full segments of the longest row; `padded` is True if the paper mode has read padding. `signature`
    holds the architecture and settings of the state's model, which a call compares with its own. Weights are compared
    by `load` only: in one process, the memories of another model of the same settings are accepted, and are noise.
    """

    bank: Tensor
    ends: Tensor
    sensory_ids: Tensor
    sensory_mask: Tensor
    open_ids: Tensor
    open_mask: Tensor
    lengths: tuple[int, ...]
    query: Tensor | None = None
    opening_prompt: Tensor | None = None
    prompt: Tensor | None = None
    bank_ids: Tensor | None = None
    bank_keys: Tensor | None = None
    pages: tuple[MemoryPages, ...] | None = field(default=None, repr=False)
    padded: bool = False
    signature: dict = field(default_factory=dict)
    kv_cache: Cache | None = field(default=None, repr=False)
    kv_mask: Tensor | None = field(default=None, repr=False)

    is_croppable = False  # transformers asks whether tokens can be taken back

    @classmethod
    def empty(
        cls,
        batch: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
        signature: dict,
        pages: tuple[MemoryPages, ...] | None = None,
    ) -> "HMTState":
        """Make the state before the first token; `HMTWrapper.new_state` calls this."""
        ids = torch.zeros(batch, 0, dtype=torch.long, device=device)
        mask = torch.zeros(batch, 0, dtype=torch.bool, device=device)
        bank, length = torch.zeros(batch, 0, width, dtype=dtype, device=device), signature["segment_length"]
        state = cls(bank, ids, ids, mask, ids, mask, (0,) * batch, signature=signature, pages=pages)
        if signature["recall_tokens"] or signature["neural_cache"]:
            state.bank_ids = ids.new_zeros(batch, 0, length)
        if signature["neural_cache"]:
            state.bank_keys = bank.new_zeros(batch, 0, length - 1, width)
        return state

    @property
    def position(self) -> int:
        """Tokens that the longest row has read."""
        return max(self.lengths)

    @property
    def segment(self) -> int:
        """Full segments of the longest row."""
        return self.position // self.signature["segment_length"]

    @property
    def valid(self) -> Tensor:
        """False where a row has no such memory, (B, c)."""
        return self.ends > 0

    @property
    def neural_cache(self) -> NeuralCache | None:
        """The neural cache of the remembered segments, if the model has one."""
        if self.bank_keys is None or self.bank_ids is None:
            return None
        return NeuralCache(self.bank_keys, self.bank_ids, self.valid)

    def latest(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the newest memories of each row, (B, count, d), and False for a row that has none, (B, 1)."""
        return self.bank[:, -count:], self.valid.any(1, keepdim=True)

    def segments(self) -> list[list[range]]:
        """List for each row the tokens that each memory was made of, oldest first, pages before the bank."""
        length, rows = self.signature["segment_length"], []
        for i, row in enumerate(self.ends.tolist()):
            paged = range(len(self.pages[i])) if self.pages else []
            ends = [*(length * (number + 1) for number in paged), *filter(None, row)]
            rows.append([range(end - length, end) for end in ends])
        return rows

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are set, by name, without the pages and what belongs to the key/value cache."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("kv_")}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def without_kv_cache(self) -> "HMTState":
        """Return a state whose open segment is read again."""
        return replace(self, kv_cache=None, kv_mask=None)

    def map(self, function: Callable[[Tensor], Tensor]) -> "HMTState":
        """Return a state with `function` applied to each tensor, and without the key/value cache."""
        changed = {name: function(value) for name, value in self.tensors().items()}
        pages = self.pages and tuple(row.map(function) for row in self.pages)
        return replace(self, **changed, pages=pages).without_kv_cache()

    def detach(self) -> "HMTState":
        """Return the same memory without its autograd graph: no gradient reaches earlier calls."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str) -> "HMTState":
        """Return the same memory on another device; pages stay in CPU memory.

        Raises:
            TypeError: a dtype; token ids would be rounded too.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"A state has the dtype of its model, and cannot be cast to {device}; cast the model.")
        pages = self.pages and tuple(row.to(device) for row in self.pages)
        return replace(replace(self, pages=None).map(lambda x: x.to(device)), pages=pages)

    def select_rows(self, index: Tensor | Sequence[int]) -> "HMTState":
        """Return a state of the rows in `index` (rows,), ints, of which all are there, without the key/value cache."""
        chosen, rows = torch.as_tensor(index), len(self.lengths)
        whole = chosen.dtype in (torch.int32, torch.int64) and chosen.dim() == 1 and len(chosen)
        if not whole or chosen.min() < 0 or chosen.max() >= rows:
            raise ValueError(
                f"select_rows takes a list of numbers of rows, here of 0 to {rows - 1}, and not {chosen.tolist()}."
            )
        state = replace(self, pages=None).map(lambda x: take_rows(x, chosen.to(x.device)))
        rows = chosen.tolist()
        pages = self.pages and tuple(self.pages[row] for row in rows)
        return replace(state, lengths=tuple(self.lengths[row] for row in rows), pages=pages)

    def where_rows(self, rows: list[bool], other: "HMTState") -> "HMTState":
        """Return a state with `rows` (B bools) of this one and the others of `other`, without the key/value cache."""
        if all(rows):
            return self
        changed = {
            name: where_rows(rows, getattr(self, name), getattr(other, name))
            for name in self.tensors() | other.tensors()
        }
        pages = self.pages and tuple(a if row else b for row, a, b in zip(rows, self.pages, other.pages or ()))
        return replace(self, **changed, pages=pages).without_kv_cache()

    def restart_rows(self, rows: list[bool]) -> "HMTState":
        """Return a state in which `rows` (B bools) have read nothing yet, without the key/value cache."""
        if not any(rows):
            return self
        state = replace(self, pages=None).map(lambda x: where_rows(rows, torch.zeros_like(x), x))
        lengths = tuple(0 if row else length for row, length in zip(rows, self.lengths))
        pages = self.pages and tuple(x.emptied() if row else x for row, x in zip(rows, self.pages))
        return replace(state, lengths=lengths, pages=pages)

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
            model: the one that read the text. A sample of its weights is hashed, so that `load` knows them again.
                None within a training, which changes them.
            about: what else the file shall tell, as JSON.

        Raises:
            FileNotFoundError: there is no folder for the file.
        """
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(f"There is no folder {Path(path).parent} to save a state in.")
        metadata = {"hmt_state": json.dumps({"lengths": self.lengths, "padded": self.padded})}
        metadata |= {"signature": json.dumps(self.signature), "weights": weights_hash(model)}
        metadata |= {} if about is None else {"about": json.dumps(about)}
        tensors = self.tensors()
        if self.pages is not None:
            packed = [row.pack() for row in self.pages]
            tensors |= {f"pages.{row}.{name}": x for row, (named, _) in enumerate(packed) for name, x in named.items()}
            metadata["pages"] = json.dumps([numbers for _, numbers in packed])
        # a copy of each: safetensors refuses views of one storage
        copies = {n: x.detach().clone(memory_format=torch.contiguous_format) for n, x in tensors.items()}
        save_file(copies, str(path), metadata=metadata)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None, device: torch.device | str = "cpu") -> "HMTState":
        """Read a state written by `save`. All its pages come into CPU memory, those of a page file too.

        Args:
            model: the one that goes on with it, in whose dtype the state is given. None: any weights, such as those
                before a training.

        Raises:
            ValueError: the file holds something else, is damaged, or was made by other weights.
        """
        try:
            with safe_open(str(path), "pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if model is not None and metadata["weights"] != weights_hash(model):
                raise ValueError(
                    f"{path} was made by other weights than those of this model, to which its memories are noise. Load the "
                    "model that made it, or read it with model=None."
                )
            pages = []
            for row, numbers in enumerate(json.loads(metadata.get("pages", "[]"))):
                names = [name for name in tensors if name.startswith(f"pages.{row}.")]
                packed = {name.split(".")[2]: tensors.pop(name) for name in names}
                pages.append(MemoryPages.unpack(packed, numbers))
            counters = json.loads(metadata["hmt_state"])
            if model is not None:  # weights in another dtype are the same weights
                dtype, kept = memory_dtype(model), {name for name in tensors if name.endswith(".sums")}
                kept |= {name for name, x in tensors.items() if not x.is_floating_point()}
                tensors = {name: x if name in kept else x.to(dtype) for name, x in tensors.items()}
            return cls(
                **tensors,
                pages=tuple(pages) or None,
                lengths=tuple(counters["lengths"]),
                padded=counters["padded"],
                signature=dict(json.loads(metadata["signature"])),
            )
        except (AttributeError, LookupError, RecursionError, SafetensorError, TypeError, JSONDecodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is not a whole file of HMTState.save ({reason}).") from error


def weights_hash(model: nn.Module | None) -> str:
    """Hash some 64 numbers of each parameter in bfloat16; a training changes them, and a copy in float32 has them."""
    digest = hashlib.sha256()
    for parameter in () if model is None else model.parameters():
        if not parameter.is_meta:
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // 64)].to("cpu", torch.bfloat16).contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def memory_dtype(model: Any) -> torch.dtype:
    """Return the dtype of the memories of a wrapper, that of its token embeddings."""
    return model.get_input_embeddings().weight.dtype


def mean_memory(
    bank: Tensor, valid: Tensor, total: Tensor | float = 0, count: Tensor | int = 0
) -> tuple[Tensor, Tensor]:
    """Return the mean of the memories of each row, (B, 1, d), and their number, (B,).

    Args:
        bank, valid: as in `HMTMemory.recall`.
        total: the sum of those that are not in `bank`, (B, 1, d).
        count: their number, (B,).
    """
    total, count = total + (bank * valid[..., None]).sum(1, keepdim=True), count + valid.sum(1)
    return total / count.clamp(min=1)[:, None, None], count


def normalize(x: Tensor, origin: Tensor) -> Tensor:
    """Scale `x` less `origin` to length one, or less where hardly anything of x is left."""
    rest = x - origin
    return rest * (rest.square().sum(-1, keepdim=True) + FLOOR * x.square().sum(-1, keepdim=True) + 1e-30).rsqrt()


def where_rows(rows: list[bool], new: Tensor | None, old: Tensor | None) -> Tensor:
    """Take `new` (B, n, ...) in `rows` (B bools) and `old` (B, m, ...) elsewhere.

    The shorter is padded with zeros in front. None stands for zeros; at most one is None.
    """
    if all(rows) and new is not None:
        return new
    like = old if new is None else new
    assert like is not None
    new, old = (torch.zeros_like(like) if x is None else x for x in (new, old))
    width = max(new.shape[1], old.shape[1])
    new, old = (pad_front(x.transpose(0, 1), width).transpose(0, 1) for x in (new, old))
    chosen = torch.tensor(rows, device=new.device).view(-1, *[1] * (new.dim() - 1))
    return torch.where(chosen, new, old)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Take `rows` (n,), long, of x (B, ...). Copies of one row share its memory, as do the beams of one text."""
    alike = x.stride(0) == 0  # shared already
    if not alike and (rows != rows[0]).any():
        return x.index_select(0, rows)
    row = x[:1] if alike else x.index_select(0, rows[:1])
    return row.expand(len(rows), *x.shape[1:])


def pad_front(x: Tensor, width: int) -> Tensor:
    """Put zeros before `x` (n, ...), to (width, ...)."""
    return torch.cat([x.new_zeros(width - len(x), *x.shape[1:]), x])


__all__ = ["HMTMemory", "HMTState", "mean_memory", "pad_front", "take_rows", "where_rows"]
