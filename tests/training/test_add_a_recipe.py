"""The recipe of CONTRIBUTING.md is a single file: settings, help, resuming, merging and saving follow."""

import re
from pathlib import Path

import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from faults import losses, make
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_longctx.cli import main
from hf_longctx.training import LongContextTrainer
from hf_longctx.training.config import FinetuneConfig, parse
from hf_longctx.training.recipes import RECIPES, Recipe, register_recipe
from hf_longctx.training.run import train


GUIDE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILE = re.search(r"^## Add a training recipe\n.*?^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[1]


class TwiceTrainer(LongContextTrainer):
    """Double the loss, train on the first sequence only, and save a file."""

    def __init__(self, *args, train_dataset, **options):
        super().__init__(*args, train_dataset=[train_dataset[0]] * len(train_dataset), **options)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert inputs["input_ids"].equal(torch.stack([self.train_dataset[0]["input_ids"]]).to(model.device))
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        assert outputs.logits.shape[:2] == inputs["input_ids"].shape
        return (2 * loss, outputs) if return_outputs else 2 * loss

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        Path(output_dir, "twice.json").write_text("{}")


class Twice(Recipe):
    """Train the norms on twice the loss."""

    defaults = "use_peft: false\nlearning_rate: 0.0"
    options = ("decay_time",)
    trainer = TwiceTrainer

    def load(self, args, config):
        model = super().load(args, config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model


@pytest.fixture
def added(monkeypatch):
    """Register the recipe of CONTRIBUTING.md and a recipe with its own trainer. They are forgotten after the test."""
    for name in ("short-window", "twice"):
        monkeypatch.setitem(RECIPES, name, Recipe())
    exec(compile(FILE, "short_window.py", "exec"), {"__name__": "short_window"})
    register_recipe("twice")(Twice)


@pytest.fixture
def settings(tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=2, num_hidden_layers=1, max_position_embeddings=64)
    MistralForCausalLM(MistralConfig(**sizes, sliding_window=48)).save_pretrained(tmp_path / "mistral")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "llama")
    (tmp_path / "text.txt").write_text("The fox forgets what it no longer needs. " * 40)

    def make_settings(recipe, **changes):
        here = dict(model=str(tmp_path / "mistral"), data=str(tmp_path / "text.txt"), tokenizer=str(DEMO))
        here |= dict(output_dir=str(tmp_path / "run"), max_length=32, max_steps=2, gradient_accumulation_steps=1)
        return make(here | dict(recipe=recipe) | changes)

    return make_settings


def test_it_changes_the_model_that_is_trained_and_saved(added, settings, tmp_path):
    assert train(settings("short-window")) == 0
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "mistral")
    assert (before.config.sliding_window, saved.config.sliding_window) == (48, 16)
    assert not torch.equal(saved.model.norm.weight, before.model.norm.weight)
    with pytest.raises(ValueError, match=r"finished run with other settings \(model: "):
        train(settings("short-window", set=["sliding_window=8"]))
    with pytest.raises(ValueError, match="short-window requires a model with a sliding window, got a llama"):
        train(settings("short-window", model=str(tmp_path / "llama"), output_dir=str(tmp_path / "other")))


def test_settings_and_help_know_it(added, tmp_path, capsys):
    words = ["--data", "a", "--model", "b", "--output_dir", str(tmp_path), "--recipe", "short-window"]
    args = parse(FinetuneConfig, [*words, "--max_steps", "7"])
    assert (args.learning_rate, args.max_steps, args.merge) == (1e-4, 7, True)
    assert "max_steps" in args.given and not {"learning_rate", "merge"} & args.given.keys()
    with pytest.raises(SystemExit, match="0"):
        main(["finetune", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "short-window Give a Mistral a sliding window of half the sequence length, and train its norms." in said


def test_its_trainer_has_the_loss_the_sequences_and_the_files(added, settings, tmp_path):
    once = settings("lora", use_peft=False, learning_rate=0.0, max_steps=1, output_dir=str(tmp_path / "once"))
    assert train(once) == train(settings("twice", decay_time=1.0)) == 0
    assert losses(tmp_path / "run")[0] == pytest.approx(losses(tmp_path / "run")[1])
    assert losses(tmp_path / "run")[0] != pytest.approx(losses(tmp_path / "once")[0], rel=0.5)
    assert (tmp_path / "run" / "model" / "twice.json").exists()
    args = settings("twice")
    args.sequence_parallel = 2
    args.output_dir = str(tmp_path / "shared")
    with pytest.raises(ValueError, match="`sequence_parallel` must be 1 for the recipe twice, got 2"):
        train(args)
