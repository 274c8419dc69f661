"""A run compares its settings with those of its folder before it changes a file."""

import shutil

import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from faults import SIZES as SMALL
from faults import log, make
from safetensors.torch import load_file, save_file
from small_llama import SIZES, save_llama
from transformers import (
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
)
from transformers.training_args import OptimizerNames

from hf_longctx.training.config import FinetuneConfig, PretrainConfig, parse
from hf_longctx.training.run import train
from hf_longctx.training.run_folder import COMPLETE


TEXT = "The fox forgets what it no longer needs. " * 40


def settings(folder, **changes):
    here = dict(data=str(folder / "text.txt"), tokenizer=str(DEMO), output_dir=str(folder / "run"))
    return make(here | dict(max_length=64, max_steps=2, save_steps=1) | changes)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A folder with a text and a run that was stopped before its model was saved."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "text.txt").write_text(TEXT)
    train(settings(folder))
    shutil.rmtree(folder / "run" / "model")
    return folder


@pytest.fixture
def stopped(stopped_run, tmp_path):
    shutil.copytree(stopped_run, tmp_path / "copy")
    return tmp_path / "copy"


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".in_use"}


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(gradient_accumulation_steps=2**10), "sequences of 64 tokens, but an optimizer step needs 1024"),
        (dict(learning_rate=0.1), "contains a run with other settings .learning_rate: 0.001 -> 0.1"),
        (dict(seed=1), "data_seed: 42 -> 1.* seed: 42 -> 1"),
        (dict(set=[*SMALL, "attention_dropout=0.5"]), r"other settings .model: "),
        (dict(model="fox-tiny"), r"other settings .*model: "),
    ],
)
def test_a_mistake_in_a_command_that_resumes_loses_nothing(changes, says, stopped):
    before = files(stopped / "run")
    with pytest.raises((ValueError, OSError), match=says):
        train(settings(stopped, **changes))
    assert before == files(stopped / "run")


def test_settings_are_read_as_they_were_written_without_secrets(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    args = settings(tmp_path, max_steps=1, hub_token="secret", optim=OptimizerNames.SGD)
    train(args)
    again = parse(PretrainConfig, ["--config", str(tmp_path / "run" / "config.yaml")])
    public = {name: value for name, value in args.given.items() if name != "hub_token"}
    assert again.given | public == again.given
    assert again.hub_token is None


def test_what_the_losses_do_not_depend_on_may_change(stopped):
    (stopped / "text.txt").rename(stopped / "moved.txt")
    changes = dict(data=str(stopped / "moved.txt"), save_steps=2, report_to="none", attn_implementation="eager")
    assert train(settings(stopped, **changes)) == 0


def test_a_run_refuses_another_text_and_resumes_with_its_tokens(stopped):
    before = files(stopped / "run")
    (stopped / "text.txt").write_text(TEXT + "And more.")
    (tokens,) = (stopped / "run" / "data").glob("*.npy")
    with pytest.raises(ValueError, match=r"other settings \(data: "):
        train(settings(stopped))
    assert before.items() <= files(stopped / "run").items()
    assert train(settings(stopped, data=str(tokens))) == 0


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A folder with a text and a finished fine-tuning of a small Llama."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    save_llama(folder / "llama")
    assert train(finetuning(folder)) == 0
    return folder


@pytest.fixture
def finished(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "copy")
    return tmp_path / "copy"


def finetuning(folder, **changes):
    base = dict(recipe="lora", model=str(folder / "llama"), tokenizer=str(folder / "llama"))
    return settings(folder, **base | dict(gradient_accumulation_steps=1) | changes)


def other_text(folder):
    (folder / "text.txt").write_text(TEXT + "And more.")


def other_weights(folder):
    weights = load_file(folder / "llama" / "model.safetensors")
    weights["model.layers.0.self_attn.v_proj.weight"] += 1
    save_file(weights, folder / "llama" / "model.safetensors", {"format": "pt"})


def other_eos(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(folder / "llama")


FINISHED = {
    "steps": (dict(max_steps=4), "max_steps: 2 -> 4.*train the finished model further.*--model .*run/model"),
    "epochs": (dict(max_steps=-1, num_train_epochs=2), "max_steps: 2 -> -1"),
    "rate": (dict(learning_rate=1.0), "learning_rate: 0.0002 -> 1.0"),
    "seed": (dict(seed=1), "seed: 42 -> 1"),
    "length": (dict(max_length=32), "max_length: 64 -> 32"),
    "packing": (dict(packing=False), "packing: True -> False"),
    "rank": (dict(lora_r=4), "lora_r: 8 -> 4"),
    "all parameters": (dict(use_peft=False), "use_peft: True -> False"),
    "recipe": (dict(recipe="fox-from-llama", merge=False), "model: "),
    "step": (dict(gradient_accumulation_steps=2), "sequences_per_step: 1 -> 2"),
    "merge": (dict(merge=True), "merge: False -> True"),
    "text": (other_text, "data: "),
    "weights": (other_weights, "model: "),
    "tokenizer": (other_eos, "tokenizer: "),
}


@pytest.mark.parametrize("change", FINISHED)
def test_a_finished_run_is_not_repeated_with_other_settings_data_or_weights(change, finished):
    change, says = FINISHED[change]
    before = files(finished / "run")
    changes = change if isinstance(change, dict) else {}
    if not changes:
        change(finished)
    with pytest.raises(ValueError, match=rf"(?s)contains a finished run with other settings \(.*{says}"):
        train(finetuning(finished, **changes))
    assert before.items() <= files(finished / "run").items()


def test_a_finished_run_that_is_repeated_is_finished(finished, capsys):
    before = files(finished / "run")
    moved = finished.rename(finished.with_name("moved"))  # paths do not matter
    with_config = ["--config", str(moved / "run" / "config.yaml"), "--output_dir", str(moved / "run")]
    of_files = [
        "--data",
        str(moved / "text.txt"),
        "--model",
        str(moved / "llama"),
        "--tokenizer",
        str(moved / "llama"),
    ]
    free = dict(report_to="none", save_steps=2, logging_first_step=True, attn_implementation="eager")
    for run in (finetuning(moved), finetuning(moved, **free), parse(FinetuneConfig, [*with_config, *of_files])):
        assert train(run) == 0
        assert f"{moved / 'run'} is finished: the model is in" in capsys.readouterr().err
    shutil.rmtree(moved / "run" / "checkpoint-2")
    assert train(finetuning(moved)) == 0 and "is finished" in capsys.readouterr().err
    assert {path.relative_to(finished): x for path, x in before.items() if "checkpoint-2" not in str(path)} == {
        path.relative_to(moved): x for path, x in files(moved / "run").items()
    }
    (moved / "run" / "run.json").unlink()
    with pytest.raises(ValueError, match="contains files that do not belong to a run"):
        train(finetuning(moved))


def test_until_its_model_is_saved_a_run_may_be_merged_or_not(finished):
    shutil.rmtree(finished / "run" / "model")
    assert train(finetuning(finished, merge=True)) == 0
    with pytest.raises(ValueError, match="merge: True -> False"):
        train(finetuning(finished))


def test_incomplete_checkpoints_are_removed_and_copies_left_alone(stopped):
    run, expected = stopped / "run", log(stopped / "run")
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-2-backup")
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-7")
    (run / "checkpoint-7" / COMPLETE).unlink()  # a killed run leaves such a checkpoint
    assert train(settings(stopped)) == 0 and not (run / "checkpoint-7").exists()
    assert log(run) == expected and (run / "checkpoint-2-backup" / "trainer_state.json").exists()


@pytest.mark.parametrize(
    "changes, says", [({"num_hidden_layers": 2}, "layers.1"), ({"intermediate_size": 8}, "shape")]
)
def test_a_base_that_lacks_weights_is_refused(changes, says, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    save_llama(tmp_path / "base")
    LlamaConfig(**SIZES | changes).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=rf"does not contain weights that its config.json requires.*{says}"):
        train(settings(tmp_path, recipe="lora", model=str(tmp_path / "base"), gradient_accumulation_steps=1))


def test_a_model_that_reads_across_boundaries_is_not_trained_on_packed_ones(tmp_path):
    torch.manual_seed(0)
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(TEXT[: 41 * (number % 3 + 1)])
    MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4)
    ).save_pretrained(tmp_path / "base")
    here = dict(recipe="lora", model=str(tmp_path / "base"), data=str(tmp_path / "text"), max_steps=1)
    here |= dict(lora_target_modules=["in_proj"], gradient_accumulation_steps=1)
    with pytest.raises(ValueError, match=r"reads across document boundaries.*--packing false"):
        train(settings(tmp_path, **here))
    assert train(settings(tmp_path, packing=False, **here)) == 0


def test_a_new_model_that_is_not_causal_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path / "config")
    with pytest.raises(ValueError, match="is not causal"):
        train(settings(tmp_path, model=str(tmp_path / "config"), set=[]))
