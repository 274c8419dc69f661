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
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from .logits import (
    accepted,
    argmax,
    argmax_tiled,
    input_device,
    logits_plainly,
    output_logits,
    predict_plainly,
    wrong_logits,
)
from .model import first_parameter, text_config


# Tokens per pass, and (positions, vocabulary rows) per tile of logits: small where memory is what they cost and larger
# ones are no faster, large where a device waits for work.
ON_CPU = (512, (128, 4096))
ON_ACCELERATOR = (4096, (1024, 16384))
LOGITS_PER_PASS = 2**24  # of a model that must project by itself, over its whole vocabulary
TRIAL_TOKENS = 32
SMALLEST_PASS = 16

T = TypeVar("T")


class Unreadable(RuntimeError):
    """The model cannot read an input of this kind or length, for the reason that is the message; others it can."""


class OutOfMemory(Unreadable):
    """Memory ran out even in the smallest passes."""


class Engine:
    """Predicts with one model, in eval and inference mode (see `evaluating`).

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
        self.model = model
        self.device = input_device(model)
        default, self.tile = pass_and_tile(self.device)
        self.tokens_per_pass = tokens_per_pass or default
        trial = trial[None, :TRIAL_TOKENS]
        self.head = None
        self._first_id = trial[:, :1]
        logits, hidden = self._logits_and_hidden(trial)
        check_causal(model, trial, logits, lambda ids: self._logits_and_hidden(ids)[0])
        self.vocab_size = logits.shape[-1]
        self.head = plain_head(model, hidden, logits)
        self.reuses_prefixes = can_continue(model) and self._continues_exactly(trial, logits)

    def with_less_memory(self, work: Callable[..., T], *args) -> T:
        """`work(*args)`; if memory runs out, again with a quarter of the tokens per pass, down to 16.

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
        """Greedy next-token predictions, (R, len(positions)) int64, for inputs (R, T); see `reader.Reader`."""
        self.forget_lengths()
        copies = equal_rows(inputs)
        rows = inputs[[group[0] for group in copies]]
        best = np.empty((len(rows), len(positions)), dtype=np.int64)
        batch = max(1, self.tokens_per_pass // inputs.shape[1])
        alone = []
        for group in equal_rows(rows[:, :prefix]):
            if self.reuses_prefixes and len(group) > 1:
                cache = self.new_cache()
                self.read(rows[group[:1], :prefix], cache)
                for some in batches(group, batch):
                    best[some] = self.read_after(cache, rows[some, prefix : positions.stop], len(positions))
            else:
                alone += group
        for some in batches(alone, batch):
            best[some] = self._predict_alone(rows[some], positions)
        predictions = np.empty((len(inputs), len(positions)), dtype=np.int64)
        for row, group in enumerate(copies):
            predictions[group] = best[row]
        return predictions

    def forget_lengths(self) -> None:
        """Dynamic RoPE scales as for the longest input so far, until it reads one that needs no scaling."""
        if any("dynamic" in kind for kind in rope_types(self.model)):
            self._logits(self._first_id, None, 1)

    def new_cache(self) -> DynamicCache:
        """An empty cache of the layers that this model needs."""
        return DynamicCache(config=text_config(self.model))

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
            best.append(self._pass(ids[:, start:stop], cache, max(0, stop - max(start, unscored))))
            start = stop
        return np.concatenate(best, axis=1)

    def read_after(self, cache: DynamicCache, ids: np.ndarray, scored: int, texts: int = 1) -> np.ndarray:
        """As `read`, but the cache is restored afterwards. It holds `texts` texts: B, or 1 that all rows continue."""
        if len(ids) == texts and all(type(layer) is DynamicLayer for layer in cache.layers):
            best = self.read(ids, cache, scored)
            cache.crop(-ids.shape[1])
            return best
        branch = copy.deepcopy(cache)  # layers of other types forget or overwrite their input
        if len(ids) != texts:
            branch.reorder_cache(torch.zeros(len(ids), dtype=torch.long, device=self.device))
        return self.read(ids, branch, scored)

    def logits(self, ids: np.ndarray, positions: range) -> Iterator[torch.Tensor]:
        """Logits at some positions (consecutive, ascending) of one input (T,), a part at a time.

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
        cache = self.new_cache() if self.reuses_prefixes else None
        step = self.tokens_per_pass if self.reuses_prefixes else positions.stop
        start = 0
        while start < positions.stop:
            stop = min(start + step, positions.stop)
            if self.head is not None:
                hidden = self._hidden(ids[:, start:stop], cache)[0, max(0, positions.start - start) :]
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
        """Predictions (B, P) for inputs (B, T) that share nothing."""
        if self.reuses_prefixes:
            return self.read(rows[:, : positions.stop], self.new_cache(), len(positions))
        if self.head is None:
            return np.stack([predict_plainly(self.model, row, positions) for row in rows])
        hidden = self._hidden(rows, None)[:, positions.start : positions.stop]
        return argmax_tiled(hidden, *self.head, self.tile)

    def _pass(self, ids, cache, keep):
        """One forward pass; predictions (B, keep) at its last positions."""
        if self.head is not None:
            hidden = self._hidden(ids, cache)
            return argmax_tiled(hidden[:, hidden.shape[1] - keep :], *self.head, self.tile)
        logits = self._logits(ids, cache, max(keep, 1))
        return argmax(logits[:, logits.shape[1] - keep :])

    def _hidden(self, ids, cache):
        """(B, t, D)"""
        options = accepted(self.model.base_model, past_key_values=cache, use_cache=cache is not None)
        return self.model.base_model(torch.from_numpy(ids).to(self.device), **options)[0]

    def _logits(self, ids, cache, keep):
        """(B, keep, V), at the last positions."""
        options = accepted(self.model, past_key_values=cache, use_cache=cache is not None, logits_to_keep=keep)
        logits = output_logits(self.model(torch.from_numpy(ids).to(self.device), **options))
        if logits.shape[1] < keep:
            raise wrong_logits(self.model, logits.shape[1], keep, ids.shape[1])
        return logits[:, logits.shape[1] - keep :]

    def _logits_and_hidden(self, ids):
        """Logits of the whole model, (1, T, V), and the hidden states that its base model computed for them."""
        seen = []
        base = getattr(self.model, "base_model", None)
        watch = isinstance(base, nn.Module) and base is not self.model
        hook = base.register_forward_hook(lambda *args: seen.append(args[-1])) if watch else None
        try:
            options = accepted(self.model, use_cache=False)
            logits = output_logits(self.model(torch.from_numpy(ids).to(self.device), **options))
        finally:
            if hook is not None:
                hook.remove()
        hidden = seen[0][0] if len(seen) == 1 else None
        return logits, hidden if isinstance(hidden, torch.Tensor) else None

    def _continues_exactly(self, ids, logits):
        """Whether reading in parts, with the end read again, gives the logits of one pass but for rounding."""
        a, b = ids.shape[1] // 3, 2 * ids.shape[1] // 3
        cache = self.new_cache()
        project = self._logits if self.head is None else lambda *args: F.linear(self._hidden(*args[:2]), *self.head)
        parts = [project(ids[:, :a], cache, a)]
        if cache.get_seq_length() != a or not getattr(cache, "is_croppable", False):
            return False
        self.read_after(cache, ids[:, a:], 1)
        parts += [project(ids[:, i:j], cache, j - i) for i, j in ((a, b), (b, ids.shape[1]))]
        error = (torch.cat(parts, 1).float() - logits.float()).norm()
        # Rounding is 1e-6 in float32 and a few per cent in half precision; a wrong position or mask is far above
        exact = first_parameter(self.model).dtype in (torch.float32, torch.float64)
        return bool(error <= (1e-3 if exact else 0.1) * (logits.float() - logits.float().mean()).norm())


def check_causal(
    model: nn.Module, ids: np.ndarray, logits: torch.Tensor, read: Callable[[np.ndarray], torch.Tensor]
) -> None:
    """One more pass, in which the second half of a trial has other ids: the logits of the first half must stay.

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
            'if they were trained so; XLNet: attn_type="uni").'
        )


def plain_head(
    model: nn.Module, hidden: torch.Tensor | None, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight and bias of the output embeddings if they make exactly these logits of these hidden states.

    They do not where logits are scaled or capped, nor may they be used alone where hooks watch or move the modules.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if hidden is None or type(head) is not nn.Linear or head.weight.device.type == "meta":
        return None
    if any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in (model, head)):
        return None
    same = torch.equal(F.linear(hidden, head.weight, head.bias), logits)
    return (head.weight, head.bias) if same else None


def can_continue(model: nn.Module) -> bool:
    """Whether the model says that it works with a growing cache, and does so as if it read all at once."""
    if not {"past_key_values", "use_cache"} <= accepted(model, past_key_values=None, use_cache=None).keys():
        return False
    if not isinstance(text_config(model), PreTrainedConfig) or getattr(model, "_is_stateful", False):
        return False
    if not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        return False
    # These change all frequencies at some length, so that keys in a cache no longer fit
    return not any("dynamic" in kind or kind == "longrope" for kind in rope_types(model))


def rope_types(model: nn.Module) -> set[str]:
    """By what the frequencies of its rotary embeddings are scaled; "default" by nothing."""
    types = [getattr(module, "rope_type", None) for module in model.modules()]
    types = [name for kind in types for name in (kind.values() if isinstance(kind, dict) else [kind])]
    return {name for name in types if isinstance(name, str)}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device (torch.OutOfMemoryError) or not (what torch's CPU allocator says)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def equal_rows(rows: np.ndarray) -> list[list[int]]:
    """The indices of the rows, those of equal rows together."""
    groups = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.tobytes(), []).append(index)
    return list(groups.values())


def batches(items: list, size: int) -> Iterator[list]:
    return (items[start : start + size] for start in range(0, len(items), size))


@contextmanager
def evaluating(model: nn.Module):
    """Eval and inference mode; afterwards every module has its training flag again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def pass_and_tile(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Tokens per pass and tile of logits by default."""
    return ON_CPU if device.type == "cpu" else ON_ACCELERATOR
