"""Settings come from the defaults, a recipe over them, a file over it, and the command line over all."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from hf_longctx import FoxConfig, FoxForCausalLM
from hf_longctx.cli import main
from hf_longctx.training.config import (
    PRESETS,
    SHOWN,
    FinetuneConfig,
    PretrainConfig,
    make_parser,
    parse,
    setting_names,
    write_yaml,
)
from hf_longctx.training.models import new_config, new_model


NEEDED = dict(data="text.txt", tokenizer="gpt2", output_dir="run")
WORDS = ["--data", "text.txt", "--tokenizer", "gpt2", "--output_dir", "run"]


class Tokenizer:
    pad_token_id = bos_token_id = eos_token_id = 1

    def __len__(self):
        return 50257


def test_the_command_line_goes_before_the_file_and_the_file_before_the_recipe(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("learning_rate: 1e-4\nweight_decay: 0\nmax_steps: 7\npacking: false\nrecipe: hmt\nmerge: false\n")
    words = [*WORDS, "--model", "llama", "--config", str(file), "--max-steps", "9", "--packing", "true"]
    args = parse(FinetuneConfig, words)
    assert (args.learning_rate, args.weight_decay, args.max_steps, args.packing, args.merge) == (
        1e-4,
        0,
        9,
        True,
        False,
    )
    assert (args.recipe, args.adam_beta2, args.lora_target_modules) == ("hmt", 0.999, ["q_proj", "v_proj"])
    assert args.bf16 == torch.accelerator.is_available() and parse(FinetuneConfig, [*words, "--bf16"]).bf16 is True


def test_settings_are_read_as_they_were_written(tmp_path):
    words = [
        *WORDS,
        "--model",
        "llama",
        "--recipe",
        "rope-extend",
        "--set",
        "head_dim=8",
        "--no_packing",
        "--optim",
        "sgd",
    ]
    args = parse(FinetuneConfig, words)
    (tmp_path / "config.yaml").write_text(write_yaml(args))
    again = parse(FinetuneConfig, ["--config", str(tmp_path / "config.yaml")])
    assert again.to_dict() == args.to_dict() and "adam_epsilon" not in args.given
    assert "secret" not in write_yaml(PretrainConfig(**NEEDED, hub_token="secret"))


def test_help_shows_our_options_and_the_usual_ones_and_says_where_the_rest_is(capsys):
    for command, kind in (("train", PretrainConfig), ("finetune", FinetuneConfig)):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        said = capsys.readouterr().out
        own = setting_names(kind) - setting_names(TrainingArguments)
        shown = own | (SHOWN & setting_names(kind))
        assert all(f"--{name}" in said for name in shown) and "--adam_epsilon" not in said
        assert "transformers.TrainingArguments" in said and f"hf-longctx {command} --" in said
        assert make_parser(kind).parse_args(["--adam_epsilon", "1"]).adam_epsilon == 1


def test_the_recipe_of_fox_is_the_papers():
    args = PretrainConfig.from_recipe("fox-paper", **NEEDED)
    assert args.max_length * args.gradient_accumulation_steps == 2**19
    assert args.max_steps == 2_700_000_000 // 2**19 and args.warmup_steps == 2**28 // 2**19
    assert (args.lr_scheduler_type, args.weight_decay, args.adam_beta2, args.max_grad_norm) == ("cosine", 0.1, 0.95, 1)


# Table 6 counts the head, but not the input embedding.
@pytest.mark.parametrize("preset, millions", [("fox-125m", 124), ("fox-360m", 360), ("fox-760m", 757.6)])
def test_the_presets_have_the_papers_sizes(preset, millions):
    with torch.device("meta"):
        model = FoxForCausalLM(new_config(PretrainConfig(**NEEDED, model=preset), Tokenizer()))
    size = model.num_parameters() - model.get_input_embeddings().weight.numel()
    assert size / 1e6 == pytest.approx(millions, rel=3e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_config(preset):
    config = new_config(PretrainConfig(**NEEDED, model=preset, max_length=16384), Tokenizer())
    assert config.max_position_embeddings == 16384 and config.vocab_size == 50257
    if "pro" in preset:
        pro = FoxConfig.pro()
        assert all(getattr(config, name) == getattr(pro, name) for name in ("output_gate", "k_shift", "qk_norm"))
    assert getattr(config, "forget_gate", None) == {"transformer": "none", "llama": None}.get(
        preset.split("-")[0], "full"
    )


def test_models_that_are_compared_have_the_same_size():
    sizes = {}
    for preset in ("fox-pro-5m", "llama-5m"):
        config = new_config(PretrainConfig(**NEEDED, model=preset), Tokenizer())
        config.vocab_size = 4096
        with torch.device("meta"):
            sizes[preset] = AutoModelForCausalLM.from_config(config).num_parameters()
    assert sizes["fox-pro-5m"] == pytest.approx(sizes["llama-5m"], rel=0.01) == pytest.approx(5.3e6, rel=0.01)


def test_the_model_is_any_config_and_its_fields_are_typed(tmp_path):
    LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1).save_pretrained(tmp_path)
    rope = "rope_parameters={rope_type: default, rope_theta: 5e5}"
    for model in (tmp_path, tmp_path / "config.json"):
        args = PretrainConfig(**NEEDED, model=str(model), set=["num_hidden_layers=2", rope], seed=3)
        model = new_model(args, Tokenizer())
        assert len(model.model.layers) == 2 and model.config.rope_parameters["rope_theta"] == 5e5
        assert model.config.max_position_embeddings == 2048 and model.dtype == torch.float32
    with pytest.raises(
        ValueError, match=r"num_hidden_layer, which LlamaConfig does not have. Did you mean num_hidden_l"
    ):
        new_config(PretrainConfig(**NEEDED, model=str(tmp_path), set=["num_hidden_layer=2"]), Tokenizer())
    with pytest.raises(ValueError, match=r"LlamaConfig: .*hidden_size"):
        new_config(PretrainConfig(**NEEDED, model=str(tmp_path), set=["hidden_size=wide"]), Tokenizer())


def test_a_memory_is_trained_as_in_its_paper():
    memory = FinetuneConfig.from_recipe("hmt", **NEEDED, model="llama")
    assert (memory.lr_scheduler_type, memory.lr_decay_every, memory.warmup_steps) == ("constant", 100, 0)
    assert (memory.learning_rate, memory.gradient_accumulation_steps, memory.weight_decay) == (1e-4, 8, 0.01)
    assert (memory.lora_r, memory.lora_alpha, memory.lora_dropout, memory.adam_beta2) == (8, 32, 0.1, 0.999)
    other = FinetuneConfig.from_recipe("lora", **NEEDED, model="llama")
    assert (other.warmup_steps, other.adam_beta2, other.lora_dropout) == (0.05, 0.95, 0.0)
