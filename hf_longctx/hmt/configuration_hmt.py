"""Configuration of the Hierarchical Memory Transformer (arXiv 2405.06067)."""

import difflib
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .compat_hmt import REPAIR  # noqa: F401 - the import warns if transformers is newer
from .custom_backbone_hmt import MODEL_CLASS
from .custom_backbone_hmt import __doc__ as ABOUT


# Keyword arguments that the base class accepts in addition to its fields
BASE_NAMES = {"attn_implementation", "auto_map", "quantization_config"}
# Fields that can be changed while a model uses the config. Calls of the model do not read them.
WRITABLE = {"backbone_name_or_path", "backbone_revision", "backbone_in_checkpoint"}
WRITABLE |= {"bos_token_id", "eos_token_id", "pad_token_id"}


@strict
class HMTConfig(PreTrainedConfig):
    """Configuration of `HMTWrapper` and its backbone.

    Args:
        backbone_config: configuration of the wrapped causal LM. `HMTWrapper.from_backbone` sets it.
        segment_length: L', number of new tokens per segment. The backbone reads `positions_per_segment` positions at a
            time. (The paper's L also counts prompts and sensory tokens. With k = 32, L = 256 corresponds to L' = 222.)
        sensory_tokens: k. A segment re-reads the last k tokens of the previous segment.
        memory_size: N, maximum number of memory embeddings retained for recall. The oldest is dropped first. None:
            all.
        sum_fraction: fraction of a segment that forms its recall query: the first j = int(round(segment_length *
            sum_fraction)) tokens. Single-pass mode requires j < L', because only later tokens attend to a memory.
        recall: whether segments recall memories. If False, the prompt is the memory of the previous segment, as in RMT
            and in the first stage of the paper's training.
        memory_tokens: m, number of embeddings per memory. With recall or in single-pass mode, m must be 1.
        recall_dim: h, output width of the recall projections. None: the width of a memory embedding.
        recall_mode: one of: "single_pass" (`single_pass_hmt.py`), which is causal; "paper" (`paper_hmt.py`), which
            reads the first j tokens of a segment before predicting them.
        retrievers: names of registered retrievers (`retriever_hmt.py`). The first one returns the prompt. None: the
            retrievers that the other fields require.
        reread: whether single-pass mode reads the whole segment again after the prompt. If True, the tokens before the
            recall attend to the prompt too. True is required for backbones with recurrent states, gates that decay
            keys, or windows shorter than a segment. None: the value is set when a backbone is wrapped. Checkpoints
            contain this value.
        recall_tokens: number of earlier tokens that a segment re-reads in single-pass mode (`search_hmt.py`). It must
            divide L'. The search works without training and adds `recall_tokens` positions to each segment. None: no
            search.
        neural_cache_weight: weight of a neural cache (`neural_cache_hmt.py`) in each prediction of single-pass mode,
            such as 0.1. The cache works without training. A state stores d numbers per remembered token: 177 MB in
            bfloat16 at d = 576 and the defaults. In training, each segment keeps these numbers for its backward pass.
            None: no cache.
        loss_scope: one of: "all"; "last". With "last", only the last `segment_length` labels of a row are scored, like
            in the official code.
        bptt_segments: number of segments after which backpropagation is truncated. None: not truncated.
        summary_batch: maximum number of rows in one backbone batch of summary passes (paper mode) or first parts
            (single-pass mode). Each segment adds one row per sequence. Lower values use less GPU or CPU memory.
        cuda_graphs: whether calls without gradients replay the pass that ends a segment as a CUDA graph
            (`graphs_hmt.py`). Graphs require `reread=False` and SDPA or eager attention. HMT detects replaced weights
            and switched adapters. After any other change of the backbone, call the model once with
            `cuda_graphs=False`.
        backbone_name_or_path: name or path from which the backbone was loaded.
        backbone_revision: revision of the backbone on the Hub.
        backbone_in_checkpoint: whether a checkpoint contains the backbone. False saves only the memory parameters (0.5
            to 2 % of all) and loads the backbone from `backbone_name_or_path`. Use False only with a frozen backbone,
            because changes of its weights are not saved.

    Raises:
        ValueError: a value is outside its range, or an argument is not a field. Saved configurations may contain
            other names, because other programs add them.
    """

    model_type = "hmt"
    _is_used = False  # whether a model uses this config. Its fields then cannot be changed
    sub_configs = {"backbone_config": AutoConfig}
    keys_to_ignore_at_inference = ["state", "cache", "recall_scores", "recall_ends", "recall_distance", "memories"]
    keys_to_ignore_at_inference += ["segment_length"]

    backbone_config: dict | PreTrainedConfig | None = None
    segment_length: int = 512
    sensory_tokens: int = 32
    memory_size: int | None = 300
    sum_fraction: float | int = 0.5
    recall: bool = True
    memory_tokens: int = 1
    recall_dim: int | None = None
    recall_mode: str = "single_pass"
    retrievers: list[str] | None = None
    reread: bool | None = None
    recall_tokens: int | None = None
    neural_cache_weight: float | int | None = None
    loss_scope: str = "all"
    bptt_segments: int | None = None
    summary_batch: int = 16
    cuda_graphs: bool = False
    backbone_name_or_path: str | None = None
    backbone_revision: str | None = None
    backbone_in_checkpoint: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs) -> None:
        if "model_type" not in kwargs:  # files contain a model_type, and other programs may add names to them
            self.check_names(kwargs)
        if isinstance(self.backbone_config, dict):
            self.backbone_config = config_from_dict(self.backbone_config)
        super().__post_init__(**kwargs)
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. If a model uses this config and depends on the field, raise ValueError."""
        if self._is_used and name in type(self).__annotations__ and name not in WRITABLE:
            raise ValueError(
                f"`config.{name}` cannot be changed, because a model uses this config. Call "
                f"model.configure({name}={value!r}), or change a copy: copy.deepcopy(model.config)."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict:
        """Return the attributes of a copy. No model uses the copy yet."""
        return {name: value for name, value in self.__dict__.items() if name != "_is_used"}

    def write(self, **fields: Any) -> None:
        """Set fields, and mark the config as used. Only the model that uses it calls this method."""
        self._is_used = False
        try:
            for name, value in fields.items():
                setattr(self, name, value)
        finally:
            self._is_used = True

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> Any:
        """Build the config from a dict. For another `model_type`, raise ValueError."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"This is a configuration of model_type {model_type!r}, not an HMT checkpoint. Wrap that model: "
                "HMTWrapper.from_backbone(name_or_path, HMTConfig())."
            )
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict:
        """Return the fields as a dict, without the local path of the backbone."""
        values = super().to_dict()
        values.pop("_is_used", None)
        (values.get("backbone_config") or {}).pop("_name_or_path", None)
        return values

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs) -> None:
        """Save the configuration and the code of a custom backbone."""
        super().save_pretrained(save_directory)
        line = "MODEL_CLASS = None"
        if model_class := custom_model_class(self.backbone_config):
            line = f"from .{model_class.__module__.split('.')[-1]} import {model_class.__name__} as MODEL_CLASS"
            custom_object_save(model_class, save_directory)
        Path(save_directory, "custom_backbone_hmt.py").write_text(f'"""{ABOUT}"""\n\n{line}\n')
        if push_to_hub:  # super() would push without custom_backbone_hmt.py
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raise ValueError for a name that is not a field."""
        for name in names:
            if name not in BASE_NAMES and not name.startswith("_") and not hasattr(cls, name):
                closest = difflib.get_close_matches(name, cls.__annotations__)
                hint = f"; did you mean {', '.join(closest)}?" if closest else "."
                raise ValueError(f"{name!r} is not a field of HMTConfig{hint} See help(HMTConfig) for all fields.")

    def check(self, positions: int | None = None) -> None:
        """Raise ValueError for a value outside its range.

        Args:
            positions: maximum number of positions of the backbone (default: its `max_position_embeddings`).
        """
        for name in ("sensory_tokens", "memory_tokens", "memory_size", "recall_dim", "recall_tokens", "summary_batch"):
            least, value = int(name != "sensory_tokens"), getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` must be at least {least}, got {value}.")
        if self.recall_mode not in ("single_pass", "paper"):
            raise ValueError(f"`recall_mode` must be 'single_pass' or 'paper', got {self.recall_mode!r}.")
        check_loss_settings(self.loss_scope, self.bptt_segments)
        if self.segment_length <= self.sensory_tokens + self.memory_tokens:
            raise ValueError(
                f"`segment_length` must be greater than sensory_tokens + memory_tokens = {self.sensory_tokens} + "
                f"{self.memory_tokens}, got {self.segment_length}. Raise segment_length or lower sensory_tokens. "
                "segment_length counts only new tokens."
            )
        if not 0 < self.sum_fraction <= 1 or not 0 < self.summary_length <= self.segment_length - self.single_pass:
            raise ValueError(
                f"`sum_fraction` must select between 1 and {self.segment_length - self.single_pass} of the "
                f"{self.segment_length} tokens in a segment, got {self.sum_fraction}. In single-pass mode, only "
                "tokens after the query attend to a memory. At least one token must follow the query."
            )
        if self.neural_cache_weight is not None and not 0 < self.neural_cache_weight < 1:
            raise ValueError(
                f"`neural_cache_weight` must be above 0 and below 1, got {self.neural_cache_weight}. For example, set "
                "it to 0.1."
            )
        if self.recall_tokens is not None and self.segment_length % self.recall_tokens:
            raise ValueError(
                f"`recall_tokens` must divide segment_length={self.segment_length}, got {self.recall_tokens}."
            )
        with_recall, without = (
            {"recall": True, "recall_mode": "single_pass"},
            {"recall": False, "recall_mode": "paper"},
        )
        for name, default in {"memory_tokens": 1, "recall_tokens": None, "neural_cache_weight": None}.items():
            needed = without if name == "memory_tokens" else with_recall
            given = {other: getattr(self, other) for other in needed}
            if getattr(self, name) != default and given != needed:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` needs {needed}, got {given}. Change one of these fields."
                )
        if self.backbone_config is not None:
            positions = positions or getattr(self.text_config, "max_position_embeddings", None)
        # XLNet uses -1 for unlimited positions
        if positions is not None and 0 < positions < self.positions_per_segment:
            unit, longest = self.recall_tokens or 1, self.segment_length - self.positions_per_segment + positions
            raise ValueError(
                f"The backbone allows {positions} positions. A segment needs {self.positions_per_segment}: "
                f"{self.segment_length} new tokens, {self.sensory_tokens} sensory tokens, {self.recall_tokens or 0} "
                f"re-read tokens and the prompts. Set segment_length to at most {max(longest // unit * unit, 0)}, or "
                "lower sensory_tokens or recall_tokens."
            )

    def signature(self, width: int) -> dict:
        """Return the settings that a model must share with its states and adapters.

        Args:
            width: d, the width of a memory embedding.
        """
        names = ["segment_length", "sensory_tokens", "memory_size", "sum_fraction", "recall", "memory_tokens"]
        names += ["recall_tokens", "retrievers"]
        return {
            "backbone": getattr(self.backbone_config, "model_type", None),
            "layers": getattr(self.text_config, "num_hidden_layers", None),
            "vocab_size": self.vocab_size,
            "width": width,
            "recall_mode": self.recall_mode,
            "neural_cache": self.neural_cache_weight is not None,
            "reread": self.reread if self.single_pass else None,
            **{name: getattr(self, name) for name in names},
        }

    @property
    def single_pass(self) -> bool:
        """Whether `recall_mode` is "single_pass"."""
        return self.recall_mode == "single_pass"

    @property
    def summary_length(self) -> int:
        """j. The first j tokens of a segment form its recall query."""
        return int(round(self.segment_length * self.sum_fraction))  # noqa: RUF046 - numpy floats round to floats

    @property
    def positions_per_segment(self) -> int:
        """Number of backbone positions of a full segment: prompts, re-read tokens, sensory tokens and new tokens."""
        return (self.recall_tokens or 0) + 2 * self.memory_tokens + self.sensory_tokens + self.segment_length

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of the backbone. If the backbone is multimodal, the configuration of its text model."""
        if not isinstance(self.backbone_config, PreTrainedConfig):
            raise AttributeError("`backbone_config` is not set. HMTWrapper.from_backbone sets it.")
        return self.backbone_config.get_text_config()

    vocab_size = property(attrgetter("text_config.vocab_size"), doc="Size of the backbone's vocabulary.")
    num_hidden_layers = property(attrgetter("text_config.num_hidden_layers"), doc="Number of the backbone's layers.")
    hidden_size = property(attrgetter("text_config.hidden_size"), doc="Width of the backbone's hidden states.")


def check_loss_settings(loss_scope: str, bptt_segments: int | None) -> None:
    """Raise ValueError for a value of `loss_scope` or `bptt_segments` outside its range."""
    if loss_scope not in ("all", "last"):
        raise ValueError(f"`loss_scope` must be 'all' or 'last', got {loss_scope!r}.")
    if bptt_segments is not None and bptt_segments < 1:
        raise ValueError(f"`bptt_segments` must be at least 1, got {bptt_segments}.")


def config_from_dict(values: dict) -> PreTrainedConfig:
    """Build the backbone's configuration from a dict. If its `model_type` is not registered, raise ValueError."""
    model_type = values.get("model_type", "")
    if MODEL_CLASS is not None and MODEL_CLASS.config_class.model_type == model_type:
        return MODEL_CLASS.config_class.from_dict(values)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"The backbone has model_type {model_type!r}. This version of transformers does not support it. First "
            "import the package that registers it."
        )
    return CONFIG_MAPPING[model_type].from_dict(values)


def custom_model_class(config: Any) -> Any:
    """Return the causal LM class of a custom backbone. If checkpoints do not contain the backbone's code, return None.

    The class in a checkpoint is not registered with the Auto classes, because another checkpoint could replace it.
    """
    if MODEL_CLASS is not None and MODEL_CLASS.config_class.model_type == getattr(config, "model_type", None):
        return MODEL_CLASS
    is_custom = getattr(type(config), "_auto_class", None) is not None
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) if is_custom else None


__all__ = ["HMTConfig", "check_loss_settings"]
