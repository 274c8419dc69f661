"""Greedy predictions at some positions of many inputs, at the least cost that does not change them.

`predict_plainly` is the definition: one forward pass per input. An `Engine` gives the same predictions for less:

- a prefix that inputs share is read once, and its cache cut back after each of them;
- long inputs are read in passes of a bounded number of tokens, and short inputs share a pass;
- hidden states are projected only where a prediction is needed, tile by tile, so that no (T, V) logits exist.

A shortcut is used only if the model advertises it and a trial on a short input reproduces the plain logits; otherwise
the model reads by `predict_plainly`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .logits import (
    CACHES,
    accepted_options,
    argmax,
    check_returned,
    input_device,
    logits_plainly,
    output_logits,
    predict_plainly,
)
from .model import first_parameter, text_config


# Tokens per pass, and (positions, vocabulary rows) per tile of logits: small where memory is what they cost and larger
# ones are no faster, large where a device waits for work.
TOKENS_PER_PASS = {"cpu": 512, "accelerator": 4096}
TILE = {"cpu": (128, 4096), "accelerator": (1024, 16384)}
LOGITS_PER_PASS = 2**24  # of a model that must project by itself, over its whole vocabulary
TRIAL_TOKENS = 32
SMALLEST_PASS = 16

T = TypeVar("T")


class Unreadable(RuntimeError):
    """The model cannot read an input of this kind or length, for the reason that is the message; others it can."""


class OutOfMemory(Unreadable):
    """Memory ran out even in the smallest passes."""


class Engine:
    """Predicts with one model, in eval and inference mode (see `LocalReader.reading`).

    Args:
        model: a causal language model.
        trial: a typical input, (T,) int64, T >= 3. Up to 32 of its ids are read to see what the model can do.
        tokens_per_pass: bound of the tokens in a forward pass, and of those in the caches of inputs that share one.
            A model whose cache cannot be continued reads an input in one pass, however long it is. Default: 512 on a
            CPU, 4096 elsewhere.

    Raises:
        ValueError: the model is not causal; see `check_causal`.

    Attributes:
        tokens_per_pass: may be changed at any time.
        head: weight (V, D) and bias (V,) or None of the projection from hidden states to logits, if that is a plain
            linear one; else None, and the model projects by itself.
        reuses_prefixes: whether the model's cache can be continued and cut back.
    """

    def __init__(self, model: nn.Module, trial: np.ndarray, tokens_per_pass: int | None = None):
        self.model, self.config = model, text_config(model)
        self.device = input_device(model)
        kind = "cpu" if self.device.type == "cpu" else "accelerator"
        self.tile, self.tokens_per_pass = TILE[kind], tokens_per_pass or TOKENS_PER_PASS[kind]
        self._base = getattr(model, "base_model", model)
        self._accepted = {module: accepted_options(module) for module in (model, self._base)}
        scalings = [getattr(module, "rope_type", None) for module in model.modules()]  # of rotary embeddings
        scalings = [name for kind in scalings for name in (kind.values() if isinstance(kind, dict) else [kind])]
        rope_types = {name for name in scalings if isinstance(name, str)}
        # a dynamic RoPE scales as for the longest input so far, until it reads one that needs no scaling
        self._rescales = any("dynamic" in name for name in rope_types)
        self.head = None
        trial = trial[None, :TRIAL_TOKENS]
        self._first_id = trial[:, :1]
        logits, hidden = self._logits_and_hidden(trial)
        check_causal(model, trial, logits, lambda ids: self._logits_and_hidden(ids)[0])
        self.vocab_size = logits.shape[-1]
        self.head = plain_head(model, hidden, logits)
        # "dynamic" and "longrope" change all frequencies at some length, so that keys in a cache no longer fit
        fixed = not self._rescales and "longrope" not in rope_types
        takes_cache = "use_cache" in self._accepted[model] and not self._accepted[model].isdisjoint(CACHES)
        self.reuses_prefixes = fixed and takes_cache and self._continues_exactly(trial, logits)

    def with_less_memory(self, work: Callable[..., T], *args: Any) -> T:
        """Return `work(*args)`; if memory runs out, again with a quarter of the tokens per pass, down to 16.

        Raises:
            OutOfMemory: 16 tokens per pass are too many.
        """
        while True:
            try:
                return work(*args)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.tokens_per_pass <= SMALLEST_PASS:
                    raise OutOfMemory("out of memory, even in the smallest passes") from error
            self.tokens_per_pass = max(SMALLEST_PASS, self.tokens_per_pass // 4)

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        """Return greedy next-token predictions, (R, len(positions)) int64, for inputs (R, T); see `reader.Reader`."""
        self.forget_lengths()
        copies = equal_rows(inputs)
        rows = inputs[[group[0] for group in copies]]
        best = np.empty((len(rows), len(positions)), dtype=np.int64)
        batch, alone = max(1, self.tokens_per_pass // inputs.shape[1]), []
        for group in equal_rows(rows[:, :prefix]):
            if self.reuses_prefixes and len(group) > 1:
                cache = DynamicCache(config=self.config)
                self.read(rows[group[:1], :prefix], cache)
                for start in range(0, len(group), batch):
                    some = group[start : start + batch]
                    best[some] = self.read_after(cache, rows[some, prefix : positions.stop], len(positions))
            else:
                alone += group
        for start in range(0, len(alone), batch):
            some = alone[start : start + batch]
            best[some] = self._predict_alone(rows[some], positions)
        predictions = np.empty((len(inputs), len(positions)), dtype=np.int64)
        for row, group in enumerate(copies):
            predictions[group] = best[row]
        return predictions

    def forget_lengths(self) -> None:
        """Undo the scaling of a dynamic RoPE for an earlier, longer input."""
        if self._rescales:
            self._logits(self._first_id, None, 1)

    def read(self, ids: np.ndarray, cache: DynamicCache, scored: int = 0) -> np.ndarray:
        """Read ids (B, t) on from a cache of B texts, which grows, in passes of at most `tokens_per_pass` tokens.

        Returns:
            predictions at the last `scored` positions, (B, scored) int64.
        """
        length, unscored = ids.shape[1], ids.shape[1] - scored
        step = max(1, self.tokens_per_pass // len(ids))
        best, start = [np.empty((len(ids), 0), dtype=np.int64)], 0
        while start < length:
            stop = min(start + step, length)
            if self.head is None and start < unscored:
                stop = min(stop, unscored)
            elif self.head is None:
                stop = min(stop, start + max(1, LOGITS_PER_PASS // (len(ids) * self.vocab_size)))
            kept = max(0, stop - max(start, unscored))
            if self.head is not None:
                hidden = self._forward(self._base, ids[:, start:stop], cache)[0]
                best.append(argmax_tiled(hidden[:, hidden.shape[1] - kept :], *self.head, self.tile))
            else:
                logits = self._logits(ids[:, start:stop], cache, max(kept, 1))
                best.append(argmax(logits[:, logits.shape[1] - kept :]))
            start = stop
        return np.concatenate(best, axis=1)

    def read_after(self, cache: DynamicCache, ids: np.ndarray, scored: int) -> np.ndarray:
        """Read ids (B, t), each row on from the one text of a cache, as `read` does; the cache is restored."""
        if len(ids) == 1 and all(type(layer) is DynamicLayer for layer in cache.layers):
            best = self.read(ids, cache, scored)
            cache.crop(-ids.shape[1])
            return best
        branch = copy.deepcopy(cache)  # layers of other types forget or overwrite their input
        if len(ids) > 1:
            first: Any = torch.zeros(len(ids), dtype=torch.long, device=self.device)
            branch.reorder_cache(first)
        return self.read(ids, branch, scored)

    def logits(self, ids: np.ndarray, positions: range) -> Iterator[torch.Tensor]:
        """Yield the logits at some positions (consecutive, ascending) of one input (T,), a part at a time.

        Yields:
            (n, V) in the model's dtype for the next n positions, n * V at most `LOGITS_PER_PASS` unless n is 1. A
            model that can neither continue a cache nor be projected apart computes all of them at once first.
        """
        self.forget_lengths()
        rows = max(1, LOGITS_PER_PASS // self.vocab_size)
        if self.head is None and not self.reuses_prefixes:
            yield from logits_plainly(self.model, ids, positions).split(rows)
            return
        ids = ids[None, : positions.stop]
        cache = DynamicCache(config=self.config) if self.reuses_prefixes else None
        step = self.tokens_per_pass if self.reuses_prefixes else positions.stop
        start = 0
        while start < positions.stop:
            stop = min(start + step, positions.stop)
            if self.head is not None:
                hidden = self._forward(self._base, ids[:, start:stop], cache)[0][0, max(0, positions.start - start) :]
                yield from (
                    F.linear(part, *self.head) for part in hidden.to(self.head[0].device).split(rows) if len(part)
                )
            elif start < positions.start:
                stop = min(stop, positions.start)
                self._logits(ids[:, start:stop], cache, 1)
            else:
                stop = min(stop, start + rows)
                yield self._logits(ids[:, start:stop], cache, stop - start)[0]
            start = stop

    def _predict_alone(self, rows, positions):
        """Return predictions (B, P) for inputs (B, T) that share nothing."""
        if self.reuses_prefixes:
            return self.read(rows[:, : positions.stop], DynamicCache(config=self.config), len(positions))
        if self.head is None:
            return np.stack([predict_plainly(self.model, row, positions) for row in rows])
        hidden = self._forward(self._base, rows, None)[0][:, positions.start : positions.stop]
        return argmax_tiled(hidden, *self.head, self.tile)

    def _forward(self, module, ids, cache, **options):
        """Return the output for ids (B, t), read on from a cache or not, with those options that the module takes."""
        options |= {"use_cache": cache is not None}
        if cache is not None:  # None would replace the prefix of a PEFT model; one of the names is accepted
            options |= dict.fromkeys(CACHES, cache)
        accepted = {name: value for name, value in options.items() if name in self._accepted[module]}
        return module(torch.from_numpy(ids).to(self.device), **accepted)

    def _logits(self, ids, cache, keep):
        """Return logits at the last positions, (B, keep, V)."""
        if self.head is not None:
            hidden = self._forward(self._base, ids, cache)[0]
            return F.linear(hidden[:, hidden.shape[1] - keep :].to(self.head[0].device), *self.head)
        logits = output_logits(self._forward(self.model, ids, cache, logits_to_keep=keep))
        check_returned(self.model, logits.shape[1] >= keep, logits.shape[1], keep, ids.shape[1])
        return logits[:, logits.shape[1] - keep :]

    def _logits_and_hidden(self, ids):
        """Return logits of the whole model, (1, T, V), and the hidden states that its base model computed for them."""
        seen = []
        hook = self._base.register_forward_hook(lambda *args: seen.append(args[-1]))
        try:
            logits = output_logits(self._forward(self.model, ids, None))
        finally:
            hook.remove()
        logits = logits[:, -ids.shape[1] :]  # not those of PEFT's virtual tokens
        hidden = seen[0][0] if len(seen) == 1 and self._base is not self.model else None
        return logits, hidden if isinstance(hidden, torch.Tensor) else None

    def _continues_exactly(self, ids, logits):
        """Check that reading in parts, with the end read again, gives the logits of one pass but for rounding."""
        if not isinstance(self.config, PreTrainedConfig) or getattr(self.model, "_is_stateful", False):
            return False
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            return False  # PEFT passes a cache of its own
        if not getattr(self.model, "_supports_default_dynamic_cache", lambda: True)():
            return False
        a, b = ids.shape[1] // 3, 2 * ids.shape[1] // 3
        cache = DynamicCache(config=self.config)
        parts = [self._logits(ids[:, :a], cache, a)]
        if cache.get_seq_length() != a or not getattr(cache, "is_croppable", True):
            return False
        self.read_after(cache, ids[:, a:], 1)
        parts += [self._logits(ids[:, i:j], cache, j - i) for i, j in ((a, b), (b, ids.shape[1]))]
        error = (torch.cat(parts, 1).float() - logits.float()).norm()
        # Rounding is 1e-6 in float32 and a few per cent in half precision; a wrong position or mask is far above
        exact = first_parameter(self.model).dtype in (torch.float32, torch.float64)
        return bool(error <= (1e-3 if exact else 0.1) * (logits.float() - logits.float().mean()).norm())


def check_causal(
    model: nn.Module, ids: np.ndarray, logits: torch.Tensor, read: Callable[[np.ndarray], torch.Tensor]
) -> None:
    """Read a trial again with other ids in its second half: the logits of the first half must stay.

    The border has an odd index, so that it lies within a block of models that look ahead in blocks. Logits that are
    NaN pass: whoever counts them says where they are.

    Args:
        ids: the trial, (1, T) int64, T >= 3.
        logits: what `read`, from ids to (1, T, V), gives for it.

    Raises:
        ValueError: the first half depends on the second.
    """
    if logits.shape[1] < ids.shape[1]:  # a model that returns the last logits only, or not those asked for
        return
    border = ids.shape[1] // 2 | 1
    distinct = np.unique(ids) if (ids != ids[0, 0]).any() else np.unique([ids[0, 0], 0, 1])
    others = distinct[(np.searchsorted(distinct, ids) + 1) % len(distinct)]
    changed = read(np.concatenate([ids[:, :border], others[:, border:]], axis=1))
    before, after = (x[:, :border].float() for x in (logits, changed))
    dtypes = {
        p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1
    }  # no quantized ones
    eps = max(torch.finfo(dtype).eps for dtype in dtypes or {torch.float32})
    # a fraction of the spread: a mixture of experts groups the positions differently, and rounds differently
    if (after - before).norm() > max(8 * eps, 1e-4) * (before - before.mean()).norm():
        raise ValueError(
            f"{type(model).__name__} is not causal: its logits change with tokens that come later, so it reads what it is "
            "to predict. Load a language model that sees the past only (BERT and its relatives: config.is_decoder=True, "
            'if they were trained so; XLNet: attn_type="uni"). Or its activations are quantized with one scale for all tokens, '
            "as torch's dynamic int8 does: measure it in the dtype of its weights, or quantize the weights only."
        )


def plain_head(
    model: nn.Module, hidden: torch.Tensor | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight and bias of the output embeddings if they make exactly these logits of these hidden states.

    They do not where logits are scaled or capped, nor may they be used alone where hooks watch or move the modules.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if hidden is None or type(head) is not nn.Linear or head.weight.device.type == "meta":
        return None
    if any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in (model, head)):
        return None
    if hidden.shape != (*logits.shape[:2], head.in_features):  # logits: what PEFT calls base_model has its head on
        return None
    same = torch.equal(F.linear(hidden, head.weight, head.bias), logits)
    return (head.weight, head.bias) if same else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on a device (torch.OutOfMemoryError) or not (torch's CPU allocator)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def argmax_tiled(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: tuple[int, int]
) -> np.ndarray:
    """Return `argmax(hidden @ weight.T + bias)`, (B, P) int64, with at most the logits of a tile at a time.

    Args:
        hidden, weight, bias: (B, P, D), (V, D) and (V,).
        tile: positions and vocabulary rows.
    """
    rows, columns = tile
    indices = []
    for part in hidden.reshape(-1, hidden.shape[-1]).to(weight.device).split(rows):
        best = part.new_full((len(part),), -torch.inf)
        index = torch.zeros(len(part), dtype=torch.long, device=part.device)
        for start in range(0, len(weight), columns):
            some = slice(start, start + columns)
            tile_best = F.linear(part, weight[some], None if bias is None else bias[some]).max(-1)
            better = (tile_best.values > best) | tile_best.values.isnan()  # not >=: the first of equal logits counts
            best = torch.where(better, tile_best.values, best)
            index = torch.where(better, tile_best.indices + start, index)
        indices.append(index.masked_fill(best.isnan(), -1))
    return torch.cat(indices).view(hidden.shape[:2]).cpu().numpy()


def equal_rows(rows: np.ndarray) -> list[list[int]]:
    """Return the indices of the rows, those of equal rows together."""
    groups = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.tobytes(), []).append(index)
    return list(groups.values())
