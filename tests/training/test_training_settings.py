"""Settings come from the preset, a file over it, and the command line over both."""

from pathlib import Path

import pytest

from hf_longctx.cli import main, parser
from hf_longctx.metrics import rope_context_bound
from hf_longctx.training.recipes import PRESETS, FinetuneSettings, TrainSettings
from hf_longctx.training.settings import read_settings, write_settings


NEEDED = dict(data="text.txt", tokenizer="gpt2", output="run")


def test_the_command_line_goes_before_the_file_and_the_file_before_the_preset(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("learning_rate: 1e-4\nweight_decay: 0\nsteps: 7\npro: true\neval_data: ~/x.txt\n")
    options = vars(parser().parse_args(["train", "--steps", "9", "--no-pro", "--data", "x.txt"]))
    settings = read_settings(TrainSettings, file, options | NEEDED).resolve()
    assert (settings.learning_rate, settings.weight_decay, settings.steps, settings.pro) == (1e-4, 0, 9, False)
    assert settings.batch_tokens == PRESETS["tiny"].batch_tokens
    assert settings.eval_data == str(Path.home() / "x.txt")


def test_names_that_people_type_are_taken(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("dtype: bf16\n")
    options = ["--schedule", "wsd", "--learning_rate", "1e-4", "--data=my_text", "--config", f"{tmp_path}/config.yaml"]
    assert main(["train", *options, "--print-config"]) == 0
    said = capsys.readouterr().out
    assert "schedule: warmup_stable_decay\n" in said and "dtype: bfloat16\n" in said
    assert "learning_rate: 0.0001\n" in said and "data: my_text\ntokenizer: TOKENIZER\n" in said


def test_settings_are_read_as_they_were_written(tmp_path):
    settings = TrainSettings(**NEEDED, preset="360M", pro=True).resolve()
    (tmp_path / "config.yaml").write_text(write_settings(settings))
    assert read_settings(TrainSettings, tmp_path / "config.yaml", {}).resolve() == settings == settings.resolve()


@pytest.mark.parametrize("preset, steps, warmup", [("125M", 5149, 512), ("360M", 14305, 512), ("760M", 30517, 512)])
def test_the_presets_are_the_papers(preset, steps, warmup):
    settings = TrainSettings(**NEEDED, preset=preset).resolve()
    assert (settings.steps, settings.warmup_steps) == (steps, warmup)
    assert settings.accumulation(processes=8) == 4


# Table 6 counts the head, but not the input embedding.
@pytest.mark.parametrize("preset, pro, millions", [("125M", False, 124), ("360M", False, 360), ("760M", False, 757.6)])
def test_the_presets_have_the_papers_sizes(preset, pro, millions):
    import torch

    from hf_longctx import FoxConfig, FoxForCausalLM

    settings = TrainSettings(**NEEDED, preset=preset, pro=pro).resolve()
    make = FoxConfig.pro if pro else FoxConfig
    with torch.device("meta"):
        model = FoxForCausalLM(make(vocab_size=50257, **settings.model_sizes()))
    size = model.num_parameters() - model.get_input_embeddings().weight.numel()
    assert size / 1e6 == pytest.approx(millions, rel=3e-3)


def test_a_llama_of_the_size_of_a_fox_can_be_trained_beside_it():
    from hf_longctx.training.model_init import build_new_model

    class Tokenizer:
        pad_token_id = bos_token_id = eos_token_id = 1

        def __len__(self):
            return 4096

    sizes = {}
    for options in (dict(pro=True), dict(architecture="llama")):
        settings = TrainSettings(**NEEDED, preset="5M", **options).resolve()
        model = build_new_model(settings, Tokenizer())
        sizes[model.config.model_type] = model.num_parameters()
    assert rope_context_bound(base=model.config.rope_parameters["rope_theta"], head_dim=32) >= 511
    assert sizes["fox"] == pytest.approx(sizes["llama"], rel=0.01)
    assert sizes["fox"] == pytest.approx(5.3e6, rel=0.01)


def test_a_memory_is_trained_as_in_its_paper():
    memory = FinetuneSettings(**NEEDED, model="llama", recipe="hmt", sequence_length=1024).resolve()
    assert (memory.schedule, memory.warmup_steps, memory.adam_beta2, memory.weight_decay) == ("step", 0, 0.999, 0.01)
    assert (memory.learning_rate, memory.batch_tokens, memory.sensory_tokens) == (1e-4, 8 * 1024, 32)
    assert (memory.lora_rank, memory.lora_alpha, memory.lora_dropout) == (8, 32, 0.1)
    other = FinetuneSettings(**NEEDED, model="llama", sequence_length=1024).resolve()
    assert (other.warmup_steps, other.adam_beta2, other.lora_dropout) == (25, 0.95, 0.0)
