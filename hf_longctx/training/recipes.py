"""Settings of trainings, their defaults, and where the defaults come from.

"FoX" as a source is arXiv 2503.02130, "HMT" 2405.06067, "Men" 2405.14591 (RoPE base), "LongLoRA" 2309.12307. This file
imports no torch, so that a command line is read at once.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..corpus import split_mixture
from .settings import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SEED, check_values, option, setting


SCHEDULES = ("cosine", "constant", "warmup_stable_decay", "step")  # step: 0.7 times every 100 steps (HMT, section 4)
DTYPES = ("auto", "float32", "bfloat16")
OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit")
RECALL_MODES = ("single_pass", "three_pass", "paper")


@dataclass
class RunSettings:
    """Settings that every training has; where one is None, the preset or the recipe decides (`ResolvedSettings`)."""

    # Of data, tokenizer and model the contents must stay, not the names.
    data: str | None = setting(
        None,
        "text file, JSONL, Parquet, CSV, folder, dataset, or tokens as .npy; several as books=0.7,web.jsonl=0.3",
        may_change=True,
    )
    tokenizer: str | None = setting(None, "folder or Hub name of a tokenizer that has an EOS", may_change=True)
    output: str | None = setting(None, "folder of the run", may_change=True)
    eval_data: str | None = setting(None, "like data; its loss is measured every eval-steps", may_change=True)
    text_column: str = setting("text", "column of a table that has the text")
    sequence_length: int | None = setting(None, "tokens of a row", bounds=POSITIVE)
    batch_tokens: int | None = setting(None, "tokens of an optimizer step, over all processes", bounds=POSITIVE)
    per_device_batch_size: int | None = setting(
        None, "rows of a forward pass in each process", bounds=POSITIVE, may_change=True
    )
    steps: int | None = setting(None, "optimizer steps", bounds=POSITIVE)
    epochs: float | None = setting(None, "in the place of steps: how often the data are read", (), POSITIVE)
    learning_rate: float | None = setting(None, "peak of the schedule", bounds=POSITIVE)
    schedule: str | None = setting(None, "after the warmup", SCHEDULES)
    warmup_steps: int | None = setting(None, "of a linear warmup")
    weight_decay: float | None = setting(None, "of matrices, not of norms, biases and gates' biases", (), NOT_NEGATIVE)
    adam_beta1: float = setting(0.9, "of AdamW (FoX, B.1)", bounds=BELOW_ONE)
    adam_beta2: float | None = setting(None, "of AdamW (default: 0.95, FoX, B.1; recipe hmt 0.999)", (), BELOW_ONE)
    max_grad_norm: float = setting(1.0, "to which gradients are clipped (FoX, B.1)", bounds=POSITIVE)
    dtype: str = setting("auto", "of the forward pass; auto: bfloat16 on an accelerator, or as the base", DTYPES)
    attention: str | None = setting(
        None,
        "any attn_implementation of the model; default of a FoX: auto, our kernels for long calls on a GPU, else sdpa",
        may_change=True,
    )
    activation_checkpointing: bool | None = setting(None, "default: for rows above 4096 tokens", may_change=True)
    checkpointed_layers: int = setting(
        1, "activation checkpointing of every n-th layer", bounds=POSITIVE, may_change=True
    )
    offload_activations: bool = setting(
        False, "checkpointed activations wait in the memory of the host", may_change=True
    )
    optimizer: str = setting("adamw", "its moments in 8 bits, and pages of the host: by bitsandbytes", OPTIMIZERS)
    compile: bool = setting(False, "the model by torch.compile")
    sequence_parallel: int = setting(1, "processes that share each row, of a FoX", bounds=POSITIVE, may_change=True)
    streaming: bool = setting(False, "pack the text while reading it, in its order, instead of once into a file")
    packing: bool = setting(True, "rows hold several documents; else chunks of one, padded")
    max_hours: float | None = setting(
        None, "after which the run stops, to go on by the same command", (), POSITIVE, may_change=True
    )
    report_to: str | None = setting(
        None, "tensorboard, wandb, trackio or others of transformers, with commas", may_change=True
    )
    seed: int = setting(0, "of new weights, dropout and the order of rows", bounds=SEED)
    save_steps: int = setting(100, "steps between checkpoints", bounds=POSITIVE, may_change=True)
    keep_checkpoints: int = setting(2, "older ones are removed", bounds=POSITIVE, may_change=True)
    keep_best: bool = setting(
        False, "keep the checkpoint with the lowest eval_loss, and write its model", may_change=True
    )
    eval_steps: int = setting(500, "steps between evaluations", bounds=POSITIVE, may_change=True)

    # Settings of some recipes only, as they are in all other trainings.
    recipe: ClassVar[str | None] = None
    carry_state: ClassVar[bool] = False
    gate_learning_rate: ClassVar[float | None] = None

    def resolve(self) -> "ResolvedSettings":
        """Return the settings with what the preset or the recipe decides.

        Raises:
            ValueError: a setting is missing, none of its choices, or out of its range.
        """
        raise NotImplementedError


class ResolvedSettings(RunSettings):
    """Settings in which nothing is left to a preset or a recipe; made by `RunSettings.resolve`."""

    data: str
    tokenizer: str
    output: str
    sequence_length: int
    batch_tokens: int
    per_device_batch_size: int
    steps: int
    learning_rate: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    adam_beta2: float
    activation_checkpointing: bool

    def complete(self):
        """Set what is None, for settings that nobody else holds, and return them."""
        check_values(self)
        if self.schedule == "step":
            self.set_defaults(warmup_steps=0)
        self.complete_recipe()
        self.set_defaults(warmup_steps=0, activation_checkpointing=self.sequence_length > 4096)
        self.check()
        return self

    def complete_recipe(self) -> None:
        """Set what the preset or the recipe decides."""
        raise NotImplementedError

    def set_defaults(self, **values: Any) -> None:
        """Set those of the values that are None."""
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def check(self) -> None:
        """Raise ValueError if a setting is missing, or if settings contradict each other."""
        for name in ("data", "tokenizer", "output"):
            if not getattr(self, name):
                raise ValueError(f"{option(name)} is missing: {self.__dataclass_fields__[name].metadata['help']}.")
        checkpointing = {"checkpointed_layers": 1, "offload_activations": False}
        for name, default in checkpointing.items():
            if not self.activation_checkpointing and getattr(self, name) != default:
                raise ValueError(f"{option(name)} belongs to --activation-checkpointing, which is off; turn it on.")
        for name in ("eval_steps", "keep_best"):
            if self.eval_data is None and getattr(self, name) != getattr(RunSettings, name):
                raise ValueError(f"{option(name)} belongs to --eval-data, which is missing.")
        if self.streaming and self.epochs:
            raise ValueError("--epochs needs to know how long the data are; leave out --streaming, or give --steps.")
        sources = split_mixture(self.data)
        for source, share in sources if self.streaming else ():
            if source.endswith(".npy"):
                raise ValueError(f"{source} holds packed tokens, which need no --streaming; leave it out.")
            if share is None and len(sources) > 1:
                raise ValueError(f"a stream has no end, so {self.data} needs shares: {source}=0.5,... for example.")
        if self.carry_state and len(sources) > 1:
            raise ValueError("--carry-state reads one text in its order, not a mixture; give one --data.")
        if self.sequence_length < 2:
            raise ValueError(
                "--sequence-length is 1; a row needs at least 2 tokens, because the first predicts the second."
            )
        if not self.packing and (self.streaming or self.sequence_parallel > 1 or self.carry_state):
            raise ValueError("--no-packing goes with none of --streaming, --sequence-parallel and --carry-state.")
        if self.sequence_length % self.sequence_parallel:
            raise ValueError(
                f"--sequence-parallel {self.sequence_parallel} does not divide the {self.sequence_length} tokens of a "
                "row; change it, or --sequence-length."
            )
        if self.warmup_steps and self.schedule == "step":
            raise ValueError(f"--schedule step has no warmup; leave out --warmup-steps {self.warmup_steps}.")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"--warmup-steps is {self.warmup_steps}; it must lie between 0 and the {self.steps} steps."
            )

    def accumulation(self, processes: int) -> int:
        """Return the forward passes of each process in an optimizer step.

        Raises:
            ValueError: the processes do not make whole passes of `batch_tokens`, or whole groups that share rows.
        """
        groups, rest = divmod(processes, self.sequence_parallel)
        if rest:
            raise ValueError(
                f"--sequence-parallel {self.sequence_parallel} does not divide the number of processes, {processes}; "
                f"start a multiple of it: torchrun --nproc-per-node {self.sequence_parallel} -m hf_longctx ..."
            )
        tokens_per_pass = self.sequence_length * self.per_device_batch_size * groups
        passes, rest = divmod(self.batch_tokens, tokens_per_pass)
        if rest:
            raise ValueError(
                f"--batch-tokens {self.batch_tokens} is not a multiple of the {tokens_per_pass} tokens of a forward pass "
                f"({self.describe_processes(processes)}, {self.per_device_batch_size} rows of {self.sequence_length} "
                "tokens each). Change --batch-tokens, --sequence-length or --per-device-batch-size."
            )
        return passes

    def describe_processes(self, processes: int) -> str:
        """Return, in words, which processes read different rows."""
        n = self.sequence_parallel
        return f"{processes} processes" if n == 1 else f"{processes // n} x {n} processes that share rows"


class Preset(NamedTuple):
    """Sizes of a new model, and how it is trained."""

    layers: int
    width: int
    heads: int
    pro_mlp: int  # width of the MLP of FoX (Pro), smaller to make up for the output gate
    learning_rate: float
    tokens: int
    sequence_length: int = 16384  # FoX, section 4.1
    batch_tokens: int = 2**19
    warmup_tokens: int = 2**28
    per_device_batch_size: int = 1
    # Initial decay times of the gates in tokens; a half-open gate, the paper's, learns slowly from a small corpus.
    decay_times: tuple[int, int] | None = None
    tied: bool = False  # input and output embeddings


SMALL: dict[str, Any] = dict(sequence_length=512, batch_tokens=2**12, warmup_tokens=2**18, per_device_batch_size=8)
PRESETS = {
    "tiny": Preset(4, 192, 6, 448, 3e-3, 2**22, **SMALL),  # ours: minutes on a CPU
    "5M": Preset(5, 256, 8, 672, 3e-3, 2**23, **SMALL, decay_times=(8, 2048), tied=True),  # ours: the demo's models
    "125M": Preset(12, 768, 12, 1792, 2e-3, 2_700_000_000),  # FoX, Tables 4 to 6
    "360M": Preset(24, 1024, 16, 2560, 2e-3, 7_500_000_000),
    "760M": Preset(24, 1536, 24, 3584, 1e-3, 16_000_000_000),
}


def llama_mlp(width: int) -> int:
    """Return the width of the MLP of a Llama and a FoX (LLaMA): 8/3 of the model's, in multiples of 256."""
    return -(-width * 8 // (3 * 256)) * 256


@dataclass
class TrainSettings(RunSettings):
    """Settings of a pretraining."""

    preset: str = setting("tiny", "size and recipe", tuple(PRESETS))
    architecture: str = setting("fox", "llama: a Transformer with RoPE, to compare with", ("fox", "llama"))
    pro: bool = setting(False, "FoX (Pro) instead of FoX (LLaMA)")
    dropout: float = setting(0.0, "of attention weights", bounds=BELOW_ONE)
    rope_base: float | None = setting(
        None, "of a llama; default: as of rope-extend (the official code of FoX: 500000)", (), POSITIVE
    )

    def resolve(self) -> "ResolvedTraining":
        return ResolvedTraining(**vars(self)).complete()


class ResolvedTraining(ResolvedSettings, TrainSettings):
    """Settings of a pretraining that are complete."""

    def complete_recipe(self) -> None:
        preset = PRESETS[self.preset]
        self.set_defaults(
            sequence_length=preset.sequence_length,
            batch_tokens=preset.batch_tokens,
            per_device_batch_size=preset.per_device_batch_size,
            learning_rate=preset.learning_rate,
            schedule="cosine",  # FoX, B.1
            weight_decay=0.1,
            adam_beta2=0.95,
        )
        self.set_defaults(steps=max(1, preset.tokens // self.batch_tokens))
        self.set_defaults(warmup_steps=min(preset.warmup_tokens // self.batch_tokens, self.steps // 10))
        if self.pro and self.architecture != "fox":
            raise ValueError(f"--pro is a FoX; --architecture {self.architecture} has no such blocks. Leave one out.")
        if self.rope_base and self.architecture != "llama":
            raise ValueError("--rope-base is of --architecture llama; a FoX has no RoPE. Leave it out.")

    def model_sizes(self) -> dict[str, Any]:
        """Return the fields of a `FoxConfig` or a `LlamaConfig` that the settings decide."""
        preset = PRESETS[self.preset]
        sizes = dict(
            hidden_size=preset.width,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            max_position_embeddings=self.sequence_length,
            attention_dropout=self.dropout,
            tie_word_embeddings=preset.tied,
        )
        if self.architecture == "llama":
            return sizes | {"intermediate_size": llama_mlp(preset.width)}
        if preset.decay_times is not None:
            sizes["decay_time_min"], sizes["decay_time_max"] = preset.decay_times
        return sizes | {"intermediate_size": preset.pro_mlp, "qk_norm_shared": True} if self.pro else sizes


class Recipe(NamedTuple):
    """Defaults of a recipe of `finetune`."""

    learning_rate: float  # with LoRA
    full_learning_rate: float  # of all parameters
    rows: int  # of an optimizer step
    steps: int
    schedule: str
    weight_decay: float
    merge: bool  # the converted model is what the adapter is for, so it is kept in one piece
    warmup_percent: int = 5  # of the steps
    adam_beta2: float = 0.95
    lora_dropout: float = 0.0


RECIPES = {
    "lora": Recipe(2e-4, 2e-5, 8, 500, "cosine", 0.0, merge=False),  # ours
    # ours; gates: see `gate_learning_rate`
    "fox-from-llama": Recipe(2e-4, 2e-5, 8, 500, "cosine", 0.0, merge=True),
    "rope-extend": Recipe(2e-5, 2e-5, 128, 1000, "constant", 0.0, merge=True),  # Men, section 5 and appendix B
    # HMT, section 4, and its code: torch's AdamW, LoRA of the queries and values (`adapters.py`). The learning rate is
    # that of Llama 2 and Mamba; the other models had 1e-5, Mistral and Yi 2e-4, all trained in full.
    "hmt": Recipe(1e-4, 1e-5, 8, 500, "step", 0.01, True, warmup_percent=0, adam_beta2=0.999, lora_dropout=0.1),
}
# Gates of a converted Llama start almost open, where their gradient is lost in the epsilon of Adam.
GATES_LEARN_FASTER = 100


@dataclass
class FinetuneSettings(RunSettings):
    """Settings of a fine-tuning."""

    model: str | None = setting(
        None, "folder or Hub name of a causal language model; or of an adapter, to train it on", may_change=True
    )
    adapter: str | None = setting(None, "folder of an adapter of the model, which is trained on", may_change=True)
    recipe: str = setting("lora", "what is done to the model", tuple(RECIPES))
    full: bool = setting(False, "train all parameters, without LoRA")
    base_dtype: str = setting(
        "auto", "of the weights that stay as they are; auto: those of the checkpoint, bfloat16 for float16", DTYPES
    )
    load_in_4bit: bool = setting(False, "the base in NF4, as QLoRA (arXiv 2305.14314), by bitsandbytes")
    load_in_8bit: bool = setting(False, "the base in int8, by bitsandbytes")
    lora_rank: int = setting(8, "r of LoRA (LongLoRA)", bounds=POSITIVE)
    lora_alpha: int = setting(32, "the adapter is scaled by alpha / r", bounds=POSITIVE)
    lora_dropout: float | None = setting(None, "of the adapter's input (default: 0, recipe hmt 0.1)", (), BELOW_ONE)
    lora_targets: str | None = setting(
        None, "names of linear layers, with commas; default: attention and MLP, for hmt queries and values"
    )
    train_in_full: str | None = setting(None, "names of modules that are trained beside LoRA; default: the recipe's")
    merge: bool | None = setting(None, "save the model with the adapter in its weights")
    decay_time: float | None = setting(
        None, "fox-from-llama: tokens in which a gate forgets by e; default: a row", (), POSITIVE
    )
    gate_learning_rate: float | None = setting(
        None, "of forget gates; fox-from-llama: 100 times the other (ours)", (), POSITIVE
    )
    rope_base: float | None = setting(
        None, "rope-extend: default: the first above which no length violates the bound", (), POSITIVE
    )
    allow_below_bound: bool = setting(False, "rope-extend: take a base that the bound rules out")
    eval_context: bool = setting(True, "rope-extend: measure loss and retrieval before and after", may_change=True)
    segment_length: int | None = setting(None, "hmt: new tokens of a segment (default: 512)", bounds=POSITIVE)
    sensory_tokens: int | None = setting(None, "hmt: tokens of the segment before that are read again (default: 32)")
    recall_mode: str | None = setting(None, "hmt: how a segment is read (default: single_pass)", RECALL_MODES)
    carry_state: bool = setting(
        False, "hmt: rows are chunks of one document each, and the memory goes from each chunk to the next"
    )

    def resolve(self) -> "ResolvedFinetuning":
        return ResolvedFinetuning(**vars(self)).complete()


def base_of_adapter(name: str) -> str | None:
    """Return the base of the adapter in a folder; None for a folder with a whole model, and for other names."""
    file = Path(name) / "adapter_config.json"
    if not file.exists() or (Path(name) / "config.json").exists():
        return None
    base = json.loads(file.read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{file} does not name the base of the adapter; give the base, and --adapter {name}.")
    return base


class ResolvedFinetuning(ResolvedSettings, FinetuneSettings):
    """Settings of a fine-tuning that are complete."""

    model: str
    merge: bool
    lora_dropout: float

    def complete_recipe(self) -> None:
        if not self.model:
            raise ValueError("MODEL is missing: folder or Hub name of a causal language model.")
        recipe = RECIPES[self.recipe]
        if self.adapter is None and (base := base_of_adapter(self.model)) is not None:
            self.adapter, self.model = self.model, base
            if (Path(self.adapter) / "tokenizer_config.json").exists():
                self.set_defaults(tokenizer=self.adapter)
        if self.recipe == "hmt":
            self.set_defaults(segment_length=512, sensory_tokens=32, recall_mode="single_pass")
        if self.sequence_length is None:
            raise ValueError("--sequence-length is missing: tokens of a row, for rope-extend the new context.")
        self.set_defaults(
            tokenizer=self.model,
            per_device_batch_size=1,
            learning_rate=recipe.full_learning_rate if self.full else recipe.learning_rate,
            batch_tokens=recipe.rows * self.sequence_length,
            steps=recipe.steps,
            schedule=recipe.schedule,
            weight_decay=recipe.weight_decay,
            merge=recipe.merge and not self.quantization,
            adam_beta2=recipe.adam_beta2,
            lora_dropout=recipe.lora_dropout,
        )
        self.set_defaults(warmup_steps=self.steps * recipe.warmup_percent // 100)
        if self.recipe == "fox-from-llama":
            self.set_defaults(
                decay_time=float(self.sequence_length), gate_learning_rate=GATES_LEARN_FASTER * self.learning_rate
            )
        self.check_recipe()

    def check_recipe(self) -> None:
        """Raise ValueError if the recipe would ignore a setting, or cannot follow it."""
        of_recipe = {"decay_time": "fox-from-llama"}
        of_recipe |= dict.fromkeys(("rope_base", "allow_below_bound", "eval_context"), "rope-extend")
        of_recipe |= dict.fromkeys(("segment_length", "sensory_tokens", "recall_mode", "carry_state"), "hmt")
        for name, recipe in of_recipe.items():
            if getattr(self, name) != self.__dataclass_fields__[name].default and recipe != self.recipe:
                raise ValueError(f"{option(name)} belongs to --recipe {recipe}; this run has --recipe {self.recipe}.")
        if self.carry_state and self.streaming:
            raise ValueError(
                "--carry-state reads many places of a text at once; leave out --streaming, which reads one."
            )
        if self.adapter is not None and (self.full or self.recipe != "lora"):
            raise ValueError(
                f"{self.adapter} holds an adapter, which only --recipe lora trains on; for "
                f"{'--full' if self.full else f'--recipe {self.recipe}'}, merge it first: `hf_longctx.training.merge(RUN)`."
            )
        if self.full or self.adapter is not None:
            of_adapter = ("lora_rank", "lora_alpha", "lora_targets", "train_in_full")
            defaults = {name: self.__dataclass_fields__[name].default for name in of_adapter}
            defaults["lora_dropout"] = RECIPES[self.recipe].lora_dropout
            if self.full:
                defaults["merge"] = RECIPES[self.recipe].merge
            ignored = [option(name) for name, default in defaults.items() if getattr(self, name) != default]
            why = "--full trains all parameters, without an adapter" if self.full else f"{self.adapter} has its own"
            if ignored:
                raise ValueError(f"{why}; leave out {', '.join(ignored)}.")
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("--load-in-4bit and --load-in-8bit contradict each other; leave one out.")
        if self.quantization and (self.full or self.merge):
            raise ValueError(
                f"{self.quantization} is of a base that stays as it is beside an adapter; leave out "
                f"{'--full' if self.full else '--merge: `hf_longctx.training.merge(RUN, MODEL)` merges into the whole one'}."
            )
        if self.base_dtype == "bfloat16" and (self.full or self.dtype == "float32"):
            raise ValueError(
                f"--base-dtype bfloat16 is of weights that are not trained, read in bfloat16; leave out "
                f"{'--full' if self.full else '--dtype float32'}, or take --base-dtype float32."
            )

    @property
    def quantization(self) -> str | None:
        """The option that quantizes the base; None without."""
        return next((option(name) for name in ("load_in_4bit", "load_in_8bit") if getattr(self, name)), None)


__all__ = [
    "PRESETS",
    "RECIPES",
    "FinetuneSettings",
    "ResolvedFinetuning",
    "ResolvedSettings",
    "ResolvedTraining",
    "RunSettings",
    "TrainSettings",
]
