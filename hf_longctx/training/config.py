"""Settings of a training run: transformers' `TrainingArguments` with additional fields."""

import argparse
import difflib
import inspect
import re
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import yaml
from transformers import HfArgumentParser, PreTrainedConfig, TrainingArguments

from .recipes import RECIPES, Recipe


FOLDER = Path(__file__).parent
PRESETS = {file.stem: file for file in sorted((FOLDER / "presets").glob("*.json"))}
TRAIN_RECIPES = {file.stem: file.read_text() for file in sorted((FOLDER / "recipes" / "train").glob("*.yaml"))}
# Options of TrainingArguments that --help shows
SHOWN = {
    "output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "weight_decay", "adam_beta2",
    "max_grad_norm", "bf16", "torch_compile", "activation_checkpointing", "seed", "save_steps", "save_total_limit",
    "eval_steps", "load_best_model_at_end", "report_to",
}  # fmt: skip
ALL_OPTIONS = (
    "Every other field of transformers' TrainingArguments is an option, too: "
    "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"
)
Config = TypeVar("Config", bound="RunConfig")


class Loader(yaml.SafeLoader):
    """A YAML loader that parses 1e-4 as a float."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows nonempty defaults and keeps the description's line breaks."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def required(text: str) -> Any:
    return field(kw_only=True, metadata={"help": text})


def option(default: Any, text: str, **parser_options: Any) -> Any:
    """Return a dataclass field with a default, a help text and further arguments for `add_argument`."""
    return field(default=default, metadata={"help": text, **parser_options})


@dataclass
class RunConfig(TrainingArguments):
    """Settings of every run.

    AdamW, weight decay and the cosine follow FoX (arXiv 2503.02130, appendix B.1). The recipe fox-paper adds the
    paper's warmup, learning rate and batch.
    """

    output_dir: str = required("Folder of the run")
    lr_scheduler_type: str = option("cosine", "Learning-rate schedule")
    weight_decay: float = option(0.1, "Weight decay; norms and biases are exempt")
    adam_beta2: float = option(0.95, "AdamW beta2")
    bf16: bool | None = option(None, "Compute in bfloat16 (default: true on an accelerator)", nargs="?", const=True)
    per_device_train_batch_size: int = option(1, "Sequences per forward pass on each device")
    per_device_eval_batch_size: int | None = option(
        None, "Sequences per evaluation pass on each device (default: the training batch size)"
    )
    torch_compile: bool | None = option(
        None, "Compile each decoder layer (default: true for a new model on CUDA)", nargs="?", const=True
    )
    save_steps: float = option(100, "Steps between checkpoints")
    save_total_limit: int | None = option(2, "Number of checkpoints to keep, at least 2")
    eval_steps: float | None = option(500, "Steps between evaluations on `eval_data`")
    logging_steps: float = option(1, "Steps between log entries")
    prediction_loss_only: bool = option(True, "Return only the loss from evaluations")
    logging_nan_inf_filter: bool = option(False, "Omit non-finite losses from the log")
    ddp_find_unused_parameters: bool | None = option(False, "Detect parameters without a gradient in DDP")
    ddp_timeout: int = option(
        7 * 24 * 3600,
        "Timeout of collectives in seconds; must exceed the time that one process needs to pack the data",
    )

    data: str = required(
        "Training data, one of: a .txt, .md, .jsonl, .parquet or .csv file; a folder; a dataset; token ids (.npy); "
        "stdlib; a mixture, such as books=0.7,web.jsonl=0.3"
    )
    eval_data: str | None = option(None, "Evaluation data, in any format of `data`")
    text_column: str | None = option(
        None, "Table column to train on (default: the conversations if the table has any, else `text`)"
    )
    tokenizer: str | None = option(None, "Folder or Hub name of the tokenizer (default: the model's tokenizer)")
    max_length: int = option(2048, "Tokens per sequence")
    packing: bool = option(True, "Pack several documents into a sequence; they do not attend to each other")
    attn_implementation: str | None = option(
        None, "Attention implementation (default: auto for a FoX on a GPU, else the model's default)"
    )
    sequence_parallel: int = option(1, "Number of processes that share a sequence; FoX only")
    recipe: str | None = option(None, "Recipe that changes the defaults of other settings")
    set: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of the model's config, such as forget_gate=fixed hidden_size=64"},
    )

    command = ""  # subcommand of hf-longctx

    def __post_init__(self):
        if self.recipe is not None and self.recipe not in self.recipe_defaults():
            raise ValueError(f"`recipe` must be one of {', '.join(self.recipe_defaults())}, got {self.recipe!r}.")
        defaults = {e.name: e.default if e.default_factory is MISSING else e.default_factory() for e in fields(self)}
        recipe = {} if self.recipe is None else read_recipe(self.recipe, type(self))
        # settings whose values differ from the recipe's defaults, or from ours
        self.given = {
            name: value
            for name, value in vars(self).items()
            if name in defaults and value != (defaults | recipe)[name] and (value is not None or name in recipe)
        }
        logs = self.logging_strategy == "steps" and self.logging_steps == 1
        if not logs or self.save_only_model or self.save_total_limit == 1:
            raise ValueError(
                "`logging_steps` must be 1, `logging_strategy` must be 'steps', `save_only_model` must be false and "
                "`save_total_limit` must be at least 2. Otherwise a killed run loses its log or its last checkpoint."
            )
        if self.resume_from_checkpoint not in (None, "true", "True", True):
            raise ValueError(
                f"`resume_from_checkpoint` must be true, got {self.resume_from_checkpoint}. A run resumes from its "
                "last checkpoint. To resume from an earlier checkpoint, delete the later ones."
            )
        if self.max_length < 1:
            raise ValueError(f"`max_length` must be positive, got {self.max_length}.")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise ValueError(
                f"`max_steps` must be positive, got {self.max_steps}. To train by epochs, give `max_steps`=-1 and a "
                "positive `num_train_epochs`."
            )
        if not self.packing and self.sequence_parallel > 1:
            raise ValueError(
                f"`sequence_parallel`={self.sequence_parallel} requires `packing`=true, got false. Remove "
                "`packing`=false, or omit `sequence_parallel`."
            )
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.bf16 is None:
            self.bf16 = not (self.use_cpu or self.fp16)
        if self.torch_compile is None:
            on_cuda = torch.cuda.is_available() and not self.use_cpu
            self.torch_compile = self.command == "train" and on_cuda and self.sequence_parallel == 1
        # We compile single layers. Trainer would compile the whole model, and the first step would be slower.
        self.compile_layers = self.torch_compile and not (self.torch_compile_backend or self.torch_compile_mode)
        self.torch_compile = self.torch_compile and not self.compile_layers
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self.per_device_train_batch_size
        if self.eval_data is not None and self.eval_strategy == "no":
            self.eval_strategy = "steps"
        if self.data_seed is None:
            self.data_seed = self.seed  # all processes need the same data order, but different dropout
        super().__post_init__()
        for name, number in (("`max_length`", self.max_length), ("the number of processes", self.world_size)):
            if number % self.sequence_parallel:
                raise ValueError(f"`sequence_parallel` must divide {name} ({number}), got {self.sequence_parallel}.")
        processes = self.world_size // self.sequence_parallel
        self.sequences_per_step = self.per_device_train_batch_size * self.gradient_accumulation_steps * processes

    @classmethod
    def from_recipe(cls: type[Config], name: str, **values: Any) -> Config:
        """Create the settings of a recipe; `values` take precedence over the recipe."""
        settings: dict[str, Any] = {"recipe": name, **read_recipe(name, cls), **values}
        return cls(**settings)

    @classmethod
    def recipe_defaults(cls) -> dict[str, str]:
        """Return the recipes of a command by name. The values are their defaults, as YAML."""
        return {}

    @classmethod
    def describe_recipes(cls) -> str:
        """Return the recipes that change the model, for `--help`."""
        return ""

    def get_recipe(self) -> Recipe:
        """Return the recipe that adapts the model."""
        return Recipe()

    def config_fields(self, kind: type[PreTrainedConfig]) -> dict[str, Any]:
        """Return the model-config fields that `set` overrides, with their new values.

        Raises:
            ValueError: the config class `kind` does not have one of these fields.
        """
        values = {}
        names = inspect.signature(kind).parameters
        for entry in self.set:
            name, equals, value = entry.partition("=")
            if not equals:
                raise ValueError(f"`set` must be NAME=VALUE (such as hidden_size=512), got {entry!r}.")
            if name not in names:
                raise ValueError(f"--set {entry}: {kind.__name__} has no field {name}. {nearest(name, names)}")
            values[name] = yaml.load(value, Loader)
        return values


@dataclass
class PretrainConfig(RunConfig):
    """Settings for pretraining."""

    learning_rate: float = option(1e-3, "Peak learning rate")

    tokenizer: str = required("Folder or Hub name of a tokenizer that has an EOS token")
    model: str = option(
        "fox-tiny", f"Config of the new model: a config.json, a folder or Hub name, or one of {', '.join(PRESETS)}"
    )

    command = "train"

    @classmethod
    def recipe_defaults(cls):
        return TRAIN_RECIPES


@dataclass
class FinetuneConfig(RunConfig):
    """Settings for fine-tuning. `FinetuneConfig.from_recipe(name, ...)` creates the settings of a recipe.

    LoRA and quantization settings are named as in TRL's `ModelConfig`.
    """

    learning_rate: float = option(2e-4, "Peak learning rate; use about 2e-5 without LoRA")
    weight_decay: float = option(0.0, "Weight decay; norms and biases are exempt")
    recipe: str | None = option("lora", "Recipe that sets defaults and adapts the model")

    model: str = required("Folder or Hub name of a causal language model")
    use_peft: bool = option(True, "Train LoRA adapters instead of all parameters")
    lora_r: int = option(8, "LoRA rank")
    lora_alpha: int = option(32, "LoRA alpha; adapters are scaled by alpha / r")
    lora_dropout: float = option(0.0, "LoRA dropout")
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Names of the modules with LoRA (default: all linear layers)"}
    )
    lora_modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Names of further modules to train, without LoRA (default: set by the recipe)"}
    )
    merge: bool = option(False, "Merge the adapter into the saved model; after QLoRA, into the unquantized base")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", "Data type of frozen weights")
    load_in_4bit: bool = option(False, "Quantize the base to NF4 (QLoRA); needs bitsandbytes")
    load_in_8bit: bool = option(False, "Quantize the base to int8; needs bitsandbytes")
    decay_time: float | None = option(
        None, "fox-from-llama: the new gates' decay time, in tokens (default: 1e5 contexts of the model)"
    )
    keep: float = option(0.25, "windows: share of the key/value cache to keep in a context of `keep_context` tokens")
    keep_context: int | None = option(
        None, "windows: length of this context, in tokens (default: the model's context)"
    )
    gate_lr_ratio: float = option(1.0, "Learning rate of forget gates as a multiple of `learning_rate`")
    lr_decay_every: int | None = option(None, "Multiply the learning rate by 0.7 every N steps (HMT, section 4)")

    command = "finetune"

    def __post_init__(self):
        super().__post_init__()
        for option in sorted({option for recipe in RECIPES.values() for option in recipe.options} & self.given.keys()):
            readers = [name for name, recipe in RECIPES.items() if option in recipe.options]
            if self.recipe not in readers:
                raise ValueError(
                    f"`{option}` requires `recipe`={' or '.join(map(repr, readers))}, got {self.recipe!r}. Remove "
                    f"`{option}`."
                )

    @classmethod
    def recipe_defaults(cls):
        return {name: recipe.defaults for name, recipe in RECIPES.items()}

    @classmethod
    def describe_recipes(cls):
        lines = [f"  {name:16}{(recipe.__doc__ or '').partition(chr(10))[0]}" for name, recipe in RECIPES.items()]
        return "\n".join(["Recipes:", *lines, "", ""])

    def get_recipe(self):
        return Recipe() if self.recipe is None else RECIPES[self.recipe]


def read_yaml(file: str | Path, kind: type[RunConfig]) -> dict[str, Any]:
    """Read settings from a YAML file.

    Raises:
        ValueError: the file is not a YAML mapping, or has an unknown setting.
    """
    try:
        return parse_yaml(Path(file).read_text(), str(file), kind)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not YAML: {error}") from error


def read_recipe(name: str, kind: type[RunConfig]) -> dict[str, Any]:
    """Return the defaults of a recipe. An unknown recipe does not have any; `RunConfig` raises an error for it."""
    text = kind.recipe_defaults().get(name)
    return parse_yaml(text, f"recipe {name}", kind) if text else {}


def parse_yaml(text: str, place: str, kind: type[RunConfig]) -> dict[str, Any]:
    """Parse settings in YAML. Raise ValueError if they are not a mapping, or if there is an unknown setting."""
    try:
        values = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{place} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{place} must contain settings, in lines such as `max_steps: 1000`.")
    for name in values:
        if name not in kind.__dataclass_fields__:
            raise ValueError(f"{name} in {place} is not a setting. {nearest(name, kind.__dataclass_fields__)}")
    return values


def nearest(name: str, names: Any) -> str:
    """Return "Did you mean ...?" with the most similar name. If none is similar, return ""."""
    close = difflib.get_close_matches(str(name), names, 1)
    return f"Did you mean {close[0]}?" if close else ""


def make_parser(kind: type[RunConfig], **options: Any) -> HfArgumentParser:
    """Return a parser for all settings. The help shows our own settings, those in `SHOWN`, and the recipes."""
    known: Any = dict(allow_abbrev=False, formatter_class=HelpFormatter, epilog=kind.describe_recipes() + ALL_OPTIONS)
    parser = HfArgumentParser(kind, **known, **options)  # ty: ignore[invalid-argument-type]
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; command-line options take precedence")
    inherited = TrainingArguments.__dataclass_fields__.keys() - SHOWN
    for action in parser._actions:
        if action.dest in inherited or action.option_strings[0].startswith("--no_"):
            action.help = argparse.SUPPRESS
        elif action.dest == "recipe":
            action.help = f"{action.help}: {', '.join(kind.recipe_defaults())}"
        if action.dest in kind.__dataclass_fields__:
            # the parser also accepts the spelling with hyphens, but the help omits it
            action.option_strings = action.option_strings[:1]
            action.metavar = {int: "N", float: "X"}.get(action.type, "BOOL" if action.nargs == "?" else None)
    return parser


def parse(kind: type[Config], argv: list[str], **options: Any) -> Config:
    """Parse settings. The order of precedence is: options, `--config FILE`, `--recipe`, defaults.

    Args:
        kind: `PretrainConfig` or `FinetuneConfig`.
        argv: command-line options.
        options: arguments of `ArgumentParser`, such as `description`.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    early.add_argument("--recipe")
    found, _ = early.parse_known_args(argv)
    values = {} if found.config is None else read_yaml(found.config, kind)
    recipe: Any = found.recipe or values.get("recipe") or kind.__dataclass_fields__["recipe"].default
    values = read_recipe(recipe, kind) | values
    parser = make_parser(kind, **options)
    parser.set_defaults(**values)
    for action in parser._actions:
        action.required = action.required and action.dest not in values
    settings: Any = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    return settings[0]


__all__ = ["PRESETS", "FinetuneConfig", "PretrainConfig", "RunConfig", "make_parser", "parse"]
