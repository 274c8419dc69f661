"""The command line takes precedence over a file, a file over a recipe, and a recipe over the defaults."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from hf_longctx import FoxConfig
from hf_longctx.cli import main
from hf_longctx.training.config import (
    PRESETS,
    SHOWN,
    FinetuneConfig,
    PretrainConfig,
    make_parser,
    parse,
)
from hf_longctx.training.models import make_config, make_model


NEEDED = dict(data="text.txt", tokenizer="gpt2", output_dir="run")
WORDS = ["--data", "text.txt", "--tokenizer", "gpt2", "--output_dir", "run"]


class Tokenizer:
    pad_token_id = bos_token_id = eos_token_id = 1
    size = 50257

    def __len__(self):
        return self.size


def test_the_command_line_goes_before_the_file_and_the_file_before_the_recipe(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("learning_rate: 1e-4\nweight_decay: 0\nmax_steps: 7\npacking: false\nrecipe: hmt\nmerge: false\n")
    words = [*WORDS, "--model", "llama", "--config", str(file), "--max-steps", "9", "--packing", "true"]
    args = parse(FinetuneConfig, words)
    assert (args.learning_rate, args.weight_decay, args.max_steps) == (1e-4, 0, 9)
    assert args.packing and not args.merge
    assert (args.recipe, args.adam_beta2, args.lora_target_modules) == ("hmt", 0.999, ["q_proj", "v_proj"])
    assert args.bf16 == torch.accelerator.is_available() and parse(FinetuneConfig, [*words, "--bf16"]).bf16 is True


def test_help_shows_our_options_and_the_usual_ones_and_says_where_the_rest_is(capsys):
    for command, kind in (("train", PretrainConfig), ("finetune", FinetuneConfig)):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        said = capsys.readouterr().out
        own = kind.__dataclass_fields__.keys() - TrainingArguments.__dataclass_fields__.keys()
        shown = own | (SHOWN & kind.__dataclass_fields__.keys())
        assert all(f"--{name}" in said for name in shown) and "--adam_epsilon" not in said
        assert "transformers.TrainingArguments" in said and f"hf-longctx {command} --" in said
        assert make_parser(kind).parse_args([*WORDS, "--model", "a", "--adam_epsilon", "1"]).adam_epsilon == 1


# Table 6 counts the head, but not the input embedding. The models of 5m are compared, with a vocabulary of 4096.
@pytest.mark.parametrize(
    "preset, millions",
    [
        ("fox-125m", 124),
        ("fox-360m", 360),
        ("fox-760m", 757.6),
        ("fox-pro-5m", 4.26),
        ("transformer-pro-5m", 4.25),
        ("llama-5m", 4.26),
    ],
)
def test_the_presets_have_the_papers_sizes(preset, millions):
    tokenizer = Tokenizer()
    tokenizer.size = 4096 if preset.endswith("-5m") else tokenizer.size
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(PretrainConfig(**NEEDED, model=preset), tokenizer))
    size = model.num_parameters() - model.get_input_embeddings().weight.numel()
    assert size / 1e6 == pytest.approx(millions, rel=3e-3)


def test_the_recipe_of_the_paper_has_its_tokens_and_warmup():
    """The official config of 125M: 2,684,354,560 tokens, of which 268,435,456 warm up, and 32 sequences a step."""
    args = PretrainConfig.from_recipe("fox-paper", **NEEDED)
    tokens = args.sequences_per_step * args.max_length
    assert (args.max_steps * tokens, args.warmup_steps * tokens) == (2_684_354_560, 268_435_456)
    assert (args.learning_rate, args.weight_decay, args.adam_beta2, args.max_grad_norm) == (2e-3, 0.1, 0.95, 1.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_config(preset):
    config = make_config(PretrainConfig(**NEEDED, model=preset, max_length=16384), Tokenizer())
    assert config.max_position_embeddings == 16384 and config.vocab_size == 50257
    if "pro" in preset:
        pro = FoxConfig.pro()
        assert all(getattr(config, name) == getattr(pro, name) for name in ("output_gate", "k_shift", "qk_norm"))
    gates = {"transformer": "none", "llama": None}.get(preset.split("-")[0], "full")
    assert getattr(config, "forget_gate", None) == gates


def test_short_sequences_do_not_shorten_the_context_of_a_new_model(tmp_path):
    """This holds for a config with the default context, and for a config that calls it `n_positions`."""
    for name in ("gpt2", "llama"):
        (tmp_path / f"{name}.json").write_text(f'{{"model_type": "{name}"}}')
        config = make_config(
            PretrainConfig(**NEEDED, model=str(tmp_path / f"{name}.json"), max_length=64), Tokenizer()
        )
        assert config.max_position_embeddings == type(config)().max_position_embeddings > 64
        longer = PretrainConfig(**NEEDED, model=str(tmp_path / f"{name}.json"), max_length=4096)
        assert make_config(longer, Tokenizer()).max_position_embeddings == 4096


def test_the_model_is_any_config_and_its_fields_are_typed(tmp_path):
    LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1).save_pretrained(tmp_path)
    rope = "rope_parameters={rope_type: default, rope_theta: 5e5}"
    for model in (tmp_path, tmp_path / "config.json"):
        args = PretrainConfig(**NEEDED, model=str(model), set=["num_hidden_layers=2", rope], seed=3)
        model = make_model(args, make_config(args, Tokenizer()))
        assert len(model.model.layers) == 2 and model.config.rope_parameters["rope_theta"] == 5e5
        assert model.config.max_position_embeddings == 2048 and model.dtype == torch.float32
