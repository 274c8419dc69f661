"""Windows of the key heads of a model: which keys each head keeps, and the file that stores them."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers.utils import PushToHubMixin, cached_file

from .attention import NAME
from .cache import WindowCache
from .groups import LayerWindows, kept_keys
from .layers import attention_layers, decoder_of, key_heads, own_window
from .static_cache import StaticWindowCache


FILE = "head_windows.json"


class HeadWindows(PushToHubMixin):
    """Windows of the key heads of a pretrained model. The model's cache then stores only the keys inside them::

        windows = HeadWindows.from_pretrained(folder)
        windows.apply(model)
        model.generate(**inputs)

    A query of a head attends to the first `sinks` tokens of its sequence and to the last `window` tokens, its own
    included. Padding is not counted. A layer's own sliding window applies as well.

    Args:
        windows: the window of each key head in each layer, (layers, Hkv) integers. -1: the head keeps all keys.
        sinks: number of first tokens that every head keeps.
        model_type: `config.model_type` of the model for which the windows were learned. They are not applied to models
            of other types. Default None: the type is not checked.

    Raises:
        ValueError: an argument is out of range.
    """

    model_type: str | None = None

    def __init__(
        self,
        windows: Sequence[Sequence[int]] | torch.Tensor,
        sinks: int = 4,
        model_type: str | None = None,
    ):
        rows = windows.tolist() if isinstance(windows, torch.Tensor) else windows
        self.windows: list[list[int]] = check_windows(rows)
        if not is_integer(sinks) or sinks < 0:
            raise ValueError(f"`sinks` must be an integer of at least 0, got {sinks!r}. It counts tokens.")
        self.sinks = sinks
        if model_type is not None:
            self.model_type = model_type

    def __repr__(self) -> str:
        heads = [window for row in self.windows for window in row]
        size = f"{len(self.windows)} x {len(self.windows[0])} heads, {heads.count(-1)} of which keep all keys"
        return f"HeadWindows({size}, sinks={self.sinks})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadWindows) and (self.windows, self.sinks) == (other.windows, other.sinks)

    __hash__ = None

    @property
    def layers(self) -> list[LayerWindows]:
        """The windows of each layer."""
        return [LayerWindows(tuple(row), self.sinks) for row in self.windows]

    def share(self, context: int, model: nn.Module | None = None) -> float:
        """Return the share of the keys in the model's cache that the heads keep after `context` tokens.

        model: a model whose layers have sliding windows of their own. Default None: all layers have full attention.

        Raises:
            ValueError: the windows belong to another model.

        >>> HeadWindows([[-1, 96]]).share(1000)
        0.55
        """
        own = [None] * len(self.windows) if model is None else [own_window(x, context) for x in self._layers_of(model)]
        heads = [(window, reach or context) for row, reach in zip(self.windows, own) for window in row]
        kept = sum(min(kept_keys(window, self.sinks, context), reach) for window, reach in heads)
        return kept / sum(reach for _, reach in heads)

    def apply(self, model: nn.Module) -> nn.Module:
        """Let a model attend only to the keys inside the windows, with and without a cache. Return the model.

        `generate` then creates the cache itself. Windows that were applied before are replaced.

        Raises:
            NotImplementedError: the model's attention is not supported.
            ValueError: the model has another type, or other numbers of layers or key heads.
        """
        layers = self._layers_of(model)
        decoder = decoder_of(model, layers)
        before = decoder.config._attn_implementation
        decoder.set_attn_implementation(NAME)
        if not hasattr(layers[0], "head_windows"):
            decoder.before_head_windows = before
            for layer in layers:
                layer.register_forward_pre_hook(check_implementation)
        for layer, windows in zip(layers, self.layers):
            layer.head_windows = windows
        for module in model.modules():
            if isinstance(module, GenerationMixin):
                vars(module)["_prepare_cache_for_generation"] = partial(prepare_cache, module, self)
        return model

    @staticmethod
    def remove(model: nn.Module) -> nn.Module:
        """Undo `apply`. Return the model.

        Raises:
            ValueError: windows have not been applied.
        """
        layers = attention_layers(model)
        decoder = decoder_of(model, layers)
        if not hasattr(layers[0], "head_windows"):
            raise ValueError("`model` must have windows, got a model without. Call windows.apply(model) first.")
        for layer in layers:
            del layer.head_windows
            for key, hook in list(layer._forward_pre_hooks.items()):
                if hook is check_implementation:
                    del layer._forward_pre_hooks[key]
        decoder.set_attn_implementation(decoder.before_head_windows)
        del decoder.before_head_windows
        for module in model.modules():
            if isinstance(module, GenerationMixin):
                del vars(module)["_prepare_cache_for_generation"]
        return model

    def _layers_of(self, model: nn.Module) -> list[Any]:
        """Return the attention layers of a model, if these windows belong to it."""
        layers = attention_layers(model)
        found = layers[0].config.model_type
        if self.model_type not in (None, found):
            raise ValueError(
                f"`model` must have the type {self.model_type!r}, got {found!r}. These windows were learned for another "
                "model."
            )
        shape, heads = [len(row) for row in self.windows], [key_heads(layer) for layer in layers]
        if shape != heads:
            raise ValueError(
                f"`windows` must have {len(heads)} layers of {heads[0]} key heads, got {len(shape)} layers of {shape[0]}. "
                "These windows belong to another model."
            )
        return layers

    def cache(self, max_cache_len: int | None = None) -> Cache:
        """Return an empty cache for a model to which these windows are applied.

        It supports all that a `DynamicCache` supports, except gradients to earlier calls. `crop` can remove one token,
        and all tokens that were added after `cache.activate_past_recording()`.

        Args:
            max_cache_len: number of tokens that the cache can store. The cache is then static: its tensors have
                constant shapes, and a decoding step compiles. It cannot be cropped. Default None: the cache grows.

        Raises:
            ValueError: max_cache_len is not a positive integer.
        """
        if max_cache_len is None:
            return WindowCache(self.layers)
        if not is_integer(max_cache_len) or max_cache_len < 1:
            raise ValueError(f"`max_cache_len` must be a number of tokens of at least 1, got {max_cache_len!r}.")
        return StaticWindowCache(self.layers, max_cache_len)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write `head_windows.json` to a folder, which may contain the model.

        kwargs: not used. `push_to_hub` passes options of models.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        rows = ",\n  ".join(map(json.dumps, self.windows))
        kind = "" if self.model_type is None else f' "model_type": {json.dumps(self.model_type)},\n'
        text = f'{{\n{kind} "sinks": {self.sinks},\n "windows": [\n  {rows}\n ]\n}}\n'
        (folder / FILE).write_text(text)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **kwargs: Any) -> "HeadWindows":
        """Load windows from a file, a folder or a repository of the Hub. They are not applied to a model.

        Args:
            name_or_path: the file, or the folder or repository that contains `head_windows.json`.
            kwargs: options of a repository, such as revision, token, cache_dir and subfolder.

        Raises:
            OSError: the file was not found.
            ValueError: the file does not contain windows.
        """
        path = Path(name_or_path)
        file = path if path.is_file() else Path(cached_file(str(name_or_path), FILE, **kwargs) or "")
        try:
            fields = json.loads(file.read_text())
            return cls(fields["windows"], fields["sinks"], fields.get("model_type"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{file} must contain {{"windows": layers x key heads, "sinks": integer}}, got {type(error).__name__}: '
                f"{error}"
            ) from error


def is_integer(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def check_windows(rows: Any) -> list[list[int]]:
    """Return windows as a new list, if they are valid."""
    lists = isinstance(rows, Sequence) and all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows)
    if not lists or not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError(
            f"`windows` must be a list of layers, each with one integer for each key head, got {str(rows)[:80]}."
        )
    for i, row in enumerate(rows):
        for window in row:
            if not is_integer(window) or window == 0 or window < -1:
                raise ValueError(
                    f"`windows` must be integers of at least 1, or -1 for all keys, got {window!r} in layer {i}. A window "
                    "counts tokens, and a query attends to its own token."
                )
    return [list(row) for row in rows]


def check_implementation(module: Any, args: Any) -> None:
    """Raise an error before an attention layer runs without its windows."""
    name = module.config._attn_implementation
    if name != NAME:
        raise ValueError(
            f'the attention implementation must be "{NAME}" while windows are applied, got "{name}". Call '
            "windows.apply(model) again, or windows.remove(model)."
        )


def prepare_cache(
    model: Any, windows: HeadWindows, generation_config: Any, model_kwargs: dict, mode: Any, rows: int, length: int
) -> None:
    """Create the cache of `generate` in place of transformers' method, if it would be dynamic or static."""
    type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, mode, rows, length)
    for name in ("cache", "past_key_values"):  # since and before transformers 5.24
        cache, implementation = model_kwargs.get(name), generation_config.cache_implementation
        if cache is None or getattr(cache, "_is_user_defined", False):
            continue
        if implementation in (None, "dynamic"):
            model_kwargs[name] = windows.cache()
        elif implementation == "static":
            model_kwargs[name] = windows.cache(max(length, generation_config.max_cache_len or 0))
        if generation_config.is_assistant:
            model_kwargs[name].activate_past_recording()
