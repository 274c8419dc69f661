"""What a pretraining is made of: its settings, their defaults, and where the defaults come from.

"FoX" as a source is arXiv 2503.02130. This file imports no torch, so that a command line is read at once.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from .settings import check_choices, option, setting


class Preset(NamedTuple):
    """Sizes of a model, and how it is trained."""

    layers: int
    width: int
    heads: int
    pro_mlp: int  # width of the MLP of FoX (Pro), smaller to make up for the output gate
    learning_rate: float
    tokens: int
    sequence_length: int = 16384  # FoX, section 4.1
    batch_tokens: int = 2**19
    warmup_tokens: int = 2**28
    rows_at_once: int = 1


PRESETS = {
    "tiny": Preset(4, 192, 6, 448, 3e-3, 2**22, 512, 2**12, 2**18, 8),  # ours: the demo's size, minutes on a CPU
    "125M": Preset(12, 768, 12, 1792, 2e-3, 2_700_000_000),  # FoX, Tables 4 to 6
    "360M": Preset(24, 1024, 16, 2560, 2e-3, 7_500_000_000),
    "760M": Preset(24, 1536, 24, 3584, 1e-3, 16_000_000_000),
}
FROM_PRESET = ("sequence_length", "batch_tokens", "rows_at_once", "learning_rate")


@dataclass
class TrainSettings:
    """Settings of a pretraining. None: the preset decides."""

    data: str | None = setting(None, "text file, JSONL, Parquet, folder, dataset name, or tokens as .npy")
    tokenizer: str | None = setting(None, "folder or Hub name of a tokenizer that has an EOS")
    output: str | None = setting(None, "folder of the run", free=True)
    eval_data: str | None = setting(None, "like data; its loss is measured every eval-steps", free=True)
    preset: str = setting("tiny", "size and recipe", tuple(PRESETS))
    pro: bool = setting(False, "FoX (Pro) instead of FoX (LLaMA)")
    sequence_length: int | None = setting(None, "tokens of a row")
    batch_tokens: int | None = setting(None, "tokens of an optimizer step, over all processes")
    rows_at_once: int | None = setting(None, "rows of a forward pass in each process", free=True)
    steps: int | None = setting(None, "optimizer steps")
    learning_rate: float | None = setting(None, "peak of the schedule")
    schedule: str = setting("cosine", "after the warmup (FoX, B.1)", ("cosine", "constant", "warmup_stable_decay"))
    warmup_steps: int | None = setting(None, "of a linear warmup")
    weight_decay: float = setting(0.1, "of matrices, not of norms and biases (FoX, B.1)")
    adam_beta1: float = setting(0.9, "of AdamW (FoX, B.1)")
    adam_beta2: float = setting(0.95, "of AdamW (FoX, B.1)")
    max_grad_norm: float = setting(1.0, "to which gradients are clipped (FoX, B.1)")
    dropout: float = setting(0.0, "of attention weights")
    dtype: str = setting(
        "auto", "of the forward pass; auto is bfloat16 on an accelerator", ("auto", "float32", "bfloat16")
    )
    activation_checkpointing: bool | None = setting(None, "default: for rows above 4096 tokens", free=True)
    streaming: bool = setting(False, "pack the text while reading it, in its order, instead of once into a file")
    seed: int = setting(0, "of the weights and the order of rows")
    save_steps: int = setting(100, "steps between checkpoints", free=True)
    keep_checkpoints: int = setting(2, "older ones are removed", free=True)
    eval_steps: int = setting(500, "steps between evaluations", free=True)

    def resolve(self) -> "TrainSettings":
        """The settings with those of the preset.

        Raises:
            ValueError: a setting is missing, none of its choices, or out of its range.
        """
        for name in ("data", "tokenizer", "output"):
            if not getattr(self, name):
                raise ValueError(f"{option(name)} is missing: {self.__dataclass_fields__[name].metadata['help']}.")
        check_choices(self)
        preset = PRESETS[self.preset]
        run = dataclasses.replace(self)
        for name in FROM_PRESET:
            if getattr(run, name) is None:
                setattr(run, name, getattr(preset, name))
            _above_zero(run, name)
        if run.steps is None:
            run.steps = preset.tokens // run.batch_tokens
        if run.warmup_steps is None:
            run.warmup_steps = min(preset.warmup_tokens // run.batch_tokens, run.steps // 10)
        if run.activation_checkpointing is None:
            run.activation_checkpointing = run.sequence_length > 4096
        for name in ("steps", "save_steps", "keep_checkpoints", "eval_steps", "max_grad_norm"):
            _above_zero(run, name)
        if not 0 <= run.dropout < 1:
            raise ValueError(f"--dropout is {run.dropout}; it must be at least 0 and below 1.")
        if not 0 <= run.warmup_steps <= run.steps:
            raise ValueError(f"--warmup-steps is {run.warmup_steps}; it must lie between 0 and the {run.steps} steps.")
        return run

    def accumulation(self, processes: int) -> int:
        """Forward passes of each process in an optimizer step.

        Raises:
            ValueError: the processes do not make whole passes of `batch_tokens`.
        """
        at_once = self.sequence_length * self.rows_at_once * processes
        passes, rest = divmod(self.batch_tokens, at_once)
        if rest:
            raise ValueError(
                f"--batch-tokens {self.batch_tokens} is no multiple of the {at_once} tokens that are read at once "
                f"({processes} processes, {self.rows_at_once} rows of {self.sequence_length} tokens each). Change "
                "--batch-tokens, --sequence-length or --rows-at-once."
            )
        return passes

    def model_sizes(self) -> dict[str, Any]:
        """What the settings decide of a `FoxConfig`."""
        preset = PRESETS[self.preset]
        sizes = dict(
            hidden_size=preset.width,
            num_hidden_layers=preset.layers,
            num_attention_heads=preset.heads,
            max_position_embeddings=self.sequence_length,
            attention_dropout=self.dropout,
        )
        return sizes | {"intermediate_size": preset.pro_mlp, "qk_norm_shared": True} if self.pro else sizes


def _above_zero(settings, name):
    value = getattr(settings, name)
    if not value > 0:
        raise ValueError(f"{option(name)} is {value}; it must be above 0.")


__all__ = ["PRESETS", "Preset", "TrainSettings"]
