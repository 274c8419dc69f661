"""The memory that `--estimate` tells from a configuration, beside that of the run itself.

    python -m scripts.bench.estimate

Each model has random weights, and is trained by `hf-longctx finetune` in a fresh process on a CPU. Measured is the
resident memory at the peak of the second step, less that before the weights were read.
"""

import os
import tempfile
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from hf_longctx.corpus import stdlib_text
from hf_longctx.training import run as training
from hf_longctx.training.estimate import KINDS, estimate
from hf_longctx.training.recipes import FinetuneSettings
from scripts.bench import common


TABLE = """
| model | settings | estimated MB | measured MB | estimated / measured |
| {model} | {settings} | {estimated:.0f} | {measured:.0f} | {ratio:.2f} |
"""
DEMO = common.ROOT / "model_cards" / "fox-demo"
SIZES = dict(
    vocab_size=16000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=1024,
)
MODELS = {  # type, fields that differ, settings of the run
    "llama": ("llama", {}, dict(sequence_length=512)),
    "qwen2": ("qwen2", {}, dict(sequence_length=1024, activation_checkpointing=True)),
    "gemma2": ("gemma2", dict(tie_word_embeddings=True), dict(sequence_length=256, full=True)),
    "mistral": ("mistral", {}, dict(sequence_length=512, recipe="fox-from-llama")),
    "gpt2": ("gpt2", dict(n_embd=512, n_layer=6), dict(sequence_length=256, per_device_batch_size=2)),
}


class PeakOfLastStep(TrainerCallback):
    """Measures the resident memory of each step."""

    def on_step_begin(self, args, state, control, **kwargs):
        Path("/proc/self/clear_refs").write_text("5")

    def on_step_end(self, args, state, control, **kwargs):
        self.megabytes = common.resident_mb()


def make_settings(folder, kind, fields, settings, scale):
    """`scale` divides the width."""
    sizes = SIZES | {name: max(16, SIZES[name] // scale) for name in ("hidden_size", "intermediate_size", "head_dim")}
    config = AutoConfig.for_model(kind, **sizes | fields)
    if not (Path(folder) / "config.json").exists():
        AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder)
    text = Path(folder) / "text.txt"
    text.write_text(stdlib_text("held_out")[:200_000])
    rows = settings.get("per_device_batch_size", 1)
    return FinetuneSettings(
        model=str(folder),
        data=str(text),
        tokenizer=str(DEMO),
        output=str(Path(folder) / "run"),
        steps=2,
        batch_tokens=rows * settings["sequence_length"],
        merge=None if settings.get("full") else False,
        **settings,
    )


def measured_mb(settings):
    """MB at the peak of the last step of a run."""
    torch.set_num_threads(1)
    peak, make_model, before = PeakOfLastStep(), training.make_model, []

    def make_and_note(*args):
        before.append(common.resident_mb("VmRSS"))
        return make_model(*args)

    def make_trainer(*args, build=training.make_trainer):
        trainer = build(*args)
        trainer.add_callback(peak)
        return trainer

    with mock.patch.multiple(training, make_model=make_and_note, make_trainer=make_trainer):
        training.train(settings)
    return peak.megabytes - before[0]


def measure(args):
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed leaves the process, and is no part of a later peak
    for model in args.models:
        kind, fields, settings = MODELS[model]
        with tempfile.TemporaryDirectory() as folder:
            run = make_settings(folder, kind, fields, settings, args.scale)
            found = estimate(run)
            measured = common.in_fresh_process(measured_mb, run)
        estimated = found.peak / 2**20
        parts = {name: getattr(found, name) / 2**20 for name in KINDS}
        words = [f"{name} {value}" for name, value in settings.items()]
        yield {
            "model": model,
            "settings": ", ".join(words).replace("_", " "),
            "estimated": estimated,
            "measured": measured,
            "ratio": estimated / measured,
            "parts_mb": parts,
        }


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, models=list(MODELS), scale=1)
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
