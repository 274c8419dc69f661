"""Hierarchical Memory Transformer (HMT): a wrapper that adds segment recurrence and memory recall to any causal LM.

He et al., "HMT: Hierarchical Memory Transformer for Long Context Language Processing", arXiv 2405.06067. A sequence is
split into segments of L' new tokens. Each segment is one short pass of the backbone over these embeddings:

    [prompt, the last k tokens of the previous segment, the segment's tokens, prompt]

The hidden state at the closing prompt becomes the segment's *memory embedding*. The prompt of a segment is recalled
from the memories of the previous segments. A *summary pass* over the first j tokens of the segment computes a query.
The query attends to the memories. The cost is linear in the length of the sequence. An `HMTState` of bounded size
passes information from segment to segment. Retrievers select what a segment reads from the previous segments
(`retriever_hmt.py`).

`recall_mode="paper"` implements this algorithm exactly (`paper_hmt.py`). However, the prompt depends on the first j
tokens and is read *before* them. The loss of these tokens is too low, and they cannot be generated.
`score_from=config.summary_length` excludes them from the loss.

`recall_mode="single_pass"` (default) reads every position once, and recalls in the middle of a segment
(`single_pass_hmt.py`). Each row has its own segment boundaries, and padding does not change the results
(`packing_hmt.py`). Paper mode reads padding as tokens, like the official code.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import cached_file
from transformers.utils.generic import can_return_tuple
from transformers.utils.quantization_config import QuantizationMethod

from .backbone_hmt import Backbone
from .call_hmt import Call
from .checks_hmt import check_call, same_state
from .configuration_hmt import HMTConfig, check_loss_settings, custom_model_class
from .generation_hmt import HMTGenerationMixin
from .memory_hmt import SIMILARITY_GAIN, TEMPERATURE, HMTMemory
from .output_hmt import HMTOutput
from .packing_hmt import PackedRows
from .paper_hmt import read as read_paper
from .reader_hmt import Reader, basis_of
from .single_pass_hmt import read as read_single_pass
from .state_hmt import HMTState


class HMTWrapper(PreTrainedModel, HMTGenerationMixin):
    """A causal LM with sensory, short-term and long-term memory. Build one with `from_backbone`.

    Args:
        config: an `HMTConfig`.
        backbone: a causal LM, or a PEFT model of one (default: an untrained model of `config.backbone_config`).

    Raises:
        TypeError, ValueError: the backbone is not supported (`Backbone`, `HMTConfig.check`).
    """

    config: HMTConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    reads_in_segments = True  # the backbone's maximum number of positions limits a segment, not the input
    _keep_in_fp32_modules_strict = [r"^memory\."]
    _keys_to_ignore_on_save = ["memory._extra_state"]  # config.json contains these settings; only adapters need them
    _keys_to_ignore_on_load_missing = [r"memory\._extra_state"]
    _is_stateful = True  # disables assisted generation, because a state cannot be cropped
    _supports_sdpa = True  # the backbone checks its attention implementation itself
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: HMTConfig, backbone: nn.Module | None = None):
        built_here = backbone is None
        if config._is_used:
            config = deepcopy(config)
        if backbone is None:
            if config.backbone_config is None:
                raise ValueError(
                    "`config.backbone_config` must be set, got None. Use HMTWrapper.from_backbone(model_or_name, "
                    "config)."
                )
            custom = custom_model_class(config.backbone_config)
            build = custom._from_config if custom else AutoModelForCausalLM.from_config
            backbone = build(config.backbone_config)
        lm = Backbone(backbone)
        config.backbone_config = lm.model.config
        config.check(lm.positions)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if getattr(config, name) is None:
                setattr(config, name, getattr(config.backbone_config, name, None))
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.gradient_checkpointing = False
        self.backbone = backbone
        self.lm = lm
        recall_dim = (config.recall_dim or lm.width) if config.recall else None
        settings = partial(config.signature, lm.width)
        self.memory = HMTMemory(lm.width, config.memory_tokens, recall_dim, config.single_pass, settings)
        self._versions = lm.versions()
        quantizer: Any = getattr(lm.model, "hf_quantizer", None)
        if quantizer is not None and quantizer.quantization_config.quant_method == QuantizationMethod.BITS_AND_BYTES:
            # bitsandbytes does not rename parameters, so a checkpoint of the wrapper can contain quantized weights
            self.hf_quantizer, config.quantization_config = quantizer, quantizer.quantization_config
        if not built_here:
            self.generation_config = deepcopy(lm.model.generation_config)
            for module in backbone.modules():  # these weights are already loaded, or initialized by PEFT
                module._is_hf_initialized = True  # ty: ignore[invalid-assignment] (transformers' flag)
        self.post_init()
        self._reader = Reader(config, lm, self.memory)
        config.write()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.config.write()

    @property
    def reader(self) -> Reader:
        """What this model has settled. If a part that it depends on was replaced, it is settled again."""
        if "_is_replica" in self.__dict__:
            raise NotImplementedError(
                "HMTWrapper does not support torch.nn.DataParallel. Start one process per GPU (torchrun, accelerate "
                "launch), or make only one GPU visible: CUDA_VISIBLE_DEVICES=0."
            )
        if not self._reader.is_settled or self._reader.basis != basis_of(self.lm, self.memory):
            self._reader = Reader(self.config, self.lm, self.memory)
        return self._reader

    def configure(self, **changes: Any) -> None:
        """Change fields of `HMTConfig` of this model.

        Raises:
            ValueError: a name is not a field, the parameters depend on it, or the model does not support the value.
                The settings then stay as they were.
        """
        self.config.check_names(changes)
        before = {name: getattr(self.config, name) for name in changes}
        for name in changes.keys() & {"backbone_config", "recall", "recall_dim", "recall_mode", "memory_tokens"}:
            if changes[name] != before[name]:
                raise ValueError(
                    f"`{name}` must be {before[name]!r}, got {changes[name]!r}. The parameters depend on this setting. "
                    "Build a new model with HMTWrapper.from_backbone(model.backbone, config), or set the value when "
                    f"loading: from_pretrained(folder, {name}=...)."
                )
        try:
            self.config.write(**changes)
            self._reader = Reader(self.config, self.lm, self.memory)
        except Exception:
            self.config.write(**before)
            raise

    def initialize_weights(self) -> None:
        """Initialize the backbone as a standalone model, and then the memory.

        Inside a wrapper, transformers skips modules without parameters, but they may fill buffers of their children.
        """
        if isinstance(self.backbone, PreTrainedModel):
            self.backbone.initialize_weights()
        super().initialize_weights()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, HMTMemory):
            return super()._init_weights(module)
        std = self.lm.embedding_std()  # initial prompts have the scale of token embeddings
        for name in ("initial", "summary_token"):
            if hasattr(module, name):
                init.normal_(getattr(module, name), std=std)
        if hasattr(module, "initial") and hasattr(module, "summary_token"):
            # With equal prompts, the query of j tokens equals the memory of a segment that consists of these tokens.
            init.copy_(module.summary_token, module.initial)
        if self.config.recall:
            gain = 1 if module.single_pass else SIMILARITY_GAIN
            for projection in (module.wq, module.wk):  # initially, recall searches for the most similar memory
                init.copy_(projection, gain * torch.eye(*projection.shape))
            if module.single_pass:
                init.constant_(module.log_temperature, math.log(TEMPERATURE))

    # ------------------------------------------------------------------------------------------------ forward

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        state: HMTState | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        score_from: int | None = None,
        loss_scope: str | None = None,
        bptt_segments: int | None = None,
        cuda_graphs: bool | None = None,
        output_recall: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        cache: HMTState | None = None,
        past_key_values: HMTState | None = None,
        **kwargs,
    ) -> HMTOutput:
        """Read tokens from the start of a sequence, or continue the sequence of `state`.

        Args:
            input_ids: (B, T), long.
            attention_mask: (B, T), 1 on tokens and 0 on padding. Logits are 0 on padding. Padding may be on either
                side. With a state, rows that are all padding are allowed. Paper mode requires padding on the left.
            labels: token ids, (B, T), usually equal to `input_ids`. This method shifts the labels. Labels of -100 are
                not scored. In each call, the first token of each row is not scored.
            state: `HMTState` of an earlier call. Splitting a sequence over several calls gives the same result as a
                single call. In paper mode, a call must not end within the first j tokens of a segment. After a
                backward pass through the earlier call, pass `state.detach()`.
            use_cache: whether to return the state (default: True with a state, otherwise False).
            logits_to_keep: an int n returns the logits of the last n positions (0: all). A long tensor (n,) lists the
                positions. The loss always includes all labels. If `logits_to_keep` is 1, the GPU or CPU memory for
                logits does not grow with T. In training, this requires gradient checkpointing.
            score_from: position within a segment. The loss excludes predictions made before this position.
            loss_scope: replaces this field of `HMTConfig` in this call.
            bptt_segments: replaces this field of `HMTConfig` in this call.
            cuda_graphs: replaces this field of `HMTConfig` in this call.
            output_recall: whether to return recall scores, distances and memories.
            num_items_in_batch: number of scored labels in the whole batch, over devices and accumulation steps.
                `Trainer` passes it.
            cache: alias of `state`.
            past_key_values: alias of `state`, used before transformers 5.24.

        Returns:
            An `HMTOutput`.

        Raises:
            ValueError: one of: the input is empty or has the wrong shape; the padding or an argument is not supported;
                the state is from another model.
        """
        reader = self.reader
        if cache is not None or past_key_values is not None:
            state = same_state(state, cache, past_key_values)
            if attention_mask is not None and input_ids is not None:  # of the whole sequence
                attention_mask = attention_mask[:, -input_ids.shape[1] :]
        use_cache = state is not None if use_cache is None else use_cache
        loss_scope = reader.config.loss_scope if loss_scope is None else loss_scope
        bptt_segments = reader.config.bptt_segments if bptt_segments is None else bptt_segments
        check_loss_settings(loss_scope, bptt_segments)
        arguments = input_ids, attention_mask, labels, state, use_cache, logits_to_keep, score_from
        mask = check_call(reader, *arguments, keywords=kwargs)
        assert input_ids is not None
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self._warn_if_memory_is_frozen()
        if state is None:
            state = self.new_state(len(input_ids), device=input_ids.device)
        rows = PackedRows(reader, state, input_ids, mask, logits_to_keep, bptt_segments)
        if labels is not None:
            rows.add_targets(labels, loss_scope, score_from)
        call = Call(
            reader,
            rows,
            loss_function=None if labels is None else self.loss_function,
            checkpoint=self._gradient_checkpointing_func if trains and self.gradient_checkpointing else None,
            cuda_graphs=reader.config.cuda_graphs if cuda_graphs is None else cuda_graphs,
            output_recall=output_recall,
        )
        read = read_single_pass if reader.single_pass else read_paper
        state = self.memory(partial(read, call, state, use_cache))  # accelerate loads offloaded weights in such a call
        return call.output(state, use_cache, num_items_in_batch)

    def _warn_if_memory_is_frozen(self) -> None:
        """Warn if only adapters of the backbone are trained."""
        if any(p.requires_grad for p in self.memory.parameters()):
            return
        if any(p.requires_grad and ".lora_" in name for name, p in self.backbone.named_parameters()):
            warnings.warn(
                "Only adapters of the backbone are trained, and the memory stays frozen. Pass "
                'modules_to_save=["memory"] to LoraConfig, unless the memory has been trained before.',
                stacklevel=3,
            )

    def new_state(self, batch_size: int = 1, device: torch.device | str | None = None) -> HMTState:
        """Create an empty state for a batch. A call without a `state` creates its own. Default: the model's device."""
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
        device = self.device if device is None else device
        like = self.lm.embed(torch.zeros(1, 1, dtype=torch.long, device=device))
        tail = torch.zeros(batch_size, self.config.sensory_tokens, dtype=torch.long, device=device)
        memory = self.reader.retrievers.empty(batch_size, like)
        return HMTState(memory, tail, (0,) * batch_size, self.reader.signature)

    # ---------------------------------------------------------------------------------------- generation, training

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Enable checkpointing of whole segments. To checkpoint the layers too, enable it on `model.backbone`."""
        if every_n_layers != 1:
            raise ValueError(
                f"`every_n_layers` must be 1, got {every_n_layers}. HMTWrapper checkpoints segments, not layers."
            )
        reentrant = getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant")
        if enable and reentrant and self.config.single_pass:
            raise ValueError(
                "`use_reentrant` must be False, got True. Reentrant checkpointing loses the gradients of the keys and "
                "values between the passes of a segment. Pass gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        self.gradient_checkpointing = enable
        self._gradient_checkpointing_func = gradient_checkpointing_func

    def get_input_embeddings(self) -> nn.Embedding:
        return self.lm.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.lm.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm.model.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm.model.set_output_embeddings(value)

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Module:
        return self.lm.model.resize_token_embeddings(*args, **kwargs)

    # --------------------------------------------------------------------------------------------- building, saving

    @classmethod
    def from_backbone(
        cls,
        backbone: nn.Module | str | Path,
        config: HMTConfig | None = None,
        *,
        revision: str | None = None,
        **kwargs,
    ) -> "HMTWrapper":
        """Wrap a causal LM. The memory parameters are untrained.

        If the backbone is in half precision, the memory parameters are in float32.

        Args:
            backbone: a causal LM, or its name or path. A model is not copied.
            config: an `HMTConfig` (default: `HMTConfig()`). It is copied.
            revision: revision of the backbone on the Hub.
            kwargs: arguments of `AutoModelForCausalLM.from_pretrained`; only with a name or path.

        Raises:
            TypeError: the backbone is not a causal LM of transformers.
            ValueError: one of: kwargs are given with a model; the backbone or the configuration is not supported.
        """
        config = HMTConfig() if config is None else deepcopy(config)
        if not isinstance(backbone, str | Path):
            if kwargs or revision is not None:
                raise ValueError(
                    f"{sorted(kwargs) or 'revision'} only apply to a backbone given by name or path. Omit them."
                )
        else:
            config.backbone_name_or_path = str(backbone)
            backbone = AutoModelForCausalLM.from_pretrained(backbone, revision=revision, **kwargs)
            config.backbone_revision = revision or getattr(backbone.config, "_commit_hash", None)
        model = cls(config, backbone=backbone)
        model.memory.to(model.lm.device, torch.promote_types(model.lm.model.dtype, torch.float32))
        return model.train(backbone.training)

    def save_pretrained(self, save_directory: str | Path, *args, state_dict: dict | None = None, **kwargs) -> None:
        """Save configuration and weights. With `config.backbone_in_checkpoint=False`, save only the memory's weights.

        Raises:
            ValueError: with `config.backbone_in_checkpoint=False`, `config.backbone_name_or_path` is not set or the
                backbone's weights have changed.
            NotImplementedError: the backbone is a PEFT model, or a library other than bitsandbytes has quantized it.
        """
        weights = self.state_dict() if state_dict is None else state_dict
        if not self.config.backbone_in_checkpoint:
            if self.config.backbone_name_or_path is None:
                raise ValueError(
                    "If backbone_in_checkpoint=False, `config.backbone_name_or_path` must be set, got None. Set it, "
                    "or set backbone_in_checkpoint=True."
                )
            changed = [n for n, version in self.lm.versions().items() if version > self._versions.get(n, 0)]
            if changed and self.lm.model is self.backbone:  # PEFT saves adapters separately
                raise ValueError(
                    f"{len(changed)} parameters of the backbone have changed, such as {changed[0]}. "
                    "backbone_in_checkpoint=False would lose these changes. Set config.backbone_in_checkpoint=True, "
                    "or freeze the backbone: model.backbone.requires_grad_(False)."
                )
            weights = {name: value for name, value in weights.items() if name.startswith("memory.")}
        elif self.lm.model is not self.backbone:
            raise NotImplementedError(
                "The backbone is a PEFT model. Use one of three ways. (1) Merge it before wrapping: "
                "backbone.merge_and_unload(). (2) Wrap first, then call get_peft_model(wrapper, ...). (3) Save its "
                "adapters separately, and set config.backbone_in_checkpoint=False."
            )
        elif getattr(self.lm.model, "hf_quantizer", None) is not None and getattr(self, "hf_quantizer", None) is None:
            raise NotImplementedError(
                "The backbone is quantized, and its weights cannot be read back from a checkpoint of the wrapper. Set "
                "config.backbone_in_checkpoint=False to save only the memory. from_pretrained(..., "
                "quantization_config=...) then loads the backbone from config.backbone_name_or_path."
            )
        super().save_pretrained(save_directory, *args, state_dict=weights, **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *args,
        config: PreTrainedConfig | str | Path | None = None,
        backbone_trust_remote_code: bool = False,
        **kwargs,
    ) -> "HMTWrapper":
        """Load a checkpoint. If it contains only the memory, also load the backbone named in its config.

        The arguments are the same as in transformers. `trust_remote_code` applies to code in this checkpoint,
        including the code of a FoX backbone. Code in the backbone's repository runs only with
        `backbone_trust_remote_code=True`.

        If the checkpoint contains only the memory, the loading info (`output_loading_info=True`) describes only the
        backbone and uses its parameter names. The memory's weights must be complete.

        Raises:
            ValueError: one of: settings and a configuration object are both given; the checkpoint is not from an HMT;
                the backbone has custom code that is not trusted.
        """
        path = pretrained_model_name_or_path
        hmt_config: Any = config  # Any, because remote code has its own HMTConfig
        hub_names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        hub = {name: kwargs[name] for name in hub_names if name in kwargs}
        settings = {k: v for k, v in kwargs.items() if k in HMTConfig.__dataclass_fields__ and k != "dtype"}
        if not isinstance(config, PreTrainedConfig):
            hmt_config = HMTConfig.from_pretrained(path if config is None else config, **hub, **settings)
        elif settings:
            raise ValueError(
                f"{sorted(settings)} cannot be combined with a config object. Set them in the object, or omit "
                "`config` to apply them to the saved config."
            )
        if hmt_config.backbone_in_checkpoint:
            loaded: Any = super().from_pretrained(path, *args, config=config, **kwargs)
            model: HMTWrapper = loaded[0] if isinstance(loaded, tuple) else loaded
            _ = model.reader  # raises ValueError if the backbone does not support the settings
            return loaded
        # Arguments that apply to this checkpoint and not to its backbone. AutoModel adds some of them.
        hmt_names = {"subfolder", "code_revision", "adapter_kwargs", "_commit_hash", *settings}
        backbone_kwargs = {
            "attn_implementation": hmt_config._attn_implementation,  # AutoModel stores this argument there
            "quantization_config": getattr(hmt_config, "quantization_config", None),
            **{name: value for name, value in kwargs.items() if name not in hmt_names},
            "revision": hmt_config.backbone_revision,
            "trust_remote_code": backbone_trust_remote_code,
        }
        loader = custom_model_class(hmt_config.backbone_config) or AutoModelForCausalLM
        try:
            backbone = loader.from_pretrained(str(hmt_config.backbone_name_or_path), **backbone_kwargs)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ValueError(
                f"The backbone {hmt_config.backbone_name_or_path!r} has custom code. trust_remote_code applies only "
                "to the HMT checkpoint. Read the code of the backbone, then pass backbone_trust_remote_code=True."
            ) from error
        backbone, *loading_info = backbone if isinstance(backbone, tuple) else (backbone,)
        hmt_config.name_or_path = str(path)  # as in transformers; PEFT reads an adapter's base model from it
        model = cls.from_backbone(backbone, hmt_config)
        saved = load_file(str(cached_file(path, "model.safetensors", **hub)))
        weights: dict[str, Any] = {name.removeprefix("memory."): value for name, value in saved.items()}
        model.memory.load_state_dict(weights | {"_extra_state": model.memory.get_extra_state()})
        with suppress(OSError):  # if none is saved, use the backbone's generation config
            model.generation_config = GenerationConfig.from_pretrained(path, **hub)
        if loading_info:  # with output_loading_info=True
            return model.eval(), *loading_info  # ty: ignore[invalid-explicit-return] - as transformers does
        return model.eval()


__all__ = ["HMTOutput", "HMTWrapper"]
