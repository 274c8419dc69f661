"""A run loses nothing that it has: what is there is compared first, and moved before something takes its place."""

import shutil

import pytest
import torch
from demo_model import DEMO, VOCABULARY


pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_longctx.training.model_init import check_borders
from hf_longctx.training.recipes import FinetuneSettings, TrainSettings
from hf_longctx.training.run import train


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.usefixtures("small_model"),
]
TEXT = "The fox forgets what it no longer needs. " * 40
SIZES = dict(sequence_length=64, batch_tokens=64, per_device_batch_size=1, save_steps=1)


def settings(folder, **changes):
    here = dict(data=str(folder / "text.txt"), tokenizer=str(DEMO), output=str(folder / "run"), steps=2)
    return TrainSettings(**here | SIZES | changes)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A folder with a text and a run that was stopped before its model was saved."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "text.txt").write_text(TEXT)
    train(settings(folder, schedule="constant", warmup_steps=0))
    shutil.copytree(folder, folder / "finished")
    shutil.rmtree(folder / "run" / "model")
    return folder


@pytest.fixture
def stopped(stopped_run, tmp_path):
    shutil.copytree(stopped_run, tmp_path / "copy", ignore=shutil.ignore_patterns("finished"))
    return tmp_path / "copy"


def constant(folder, **changes):
    return settings(folder, schedule="constant", warmup_steps=0, **changes)


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".in_use"}


@pytest.mark.parametrize("changes, says", [(dict(data="nofile.txt"), "nofile"), (dict(batch_tokens=2**16), "65536")])
def test_a_mistake_in_a_command_that_begins_again_loses_nothing(changes, says, stopped):
    before = files(stopped / "run")
    with pytest.raises((ValueError, OSError), match=says):
        train(constant(stopped, **changes), resume="never")
    assert before.items() <= files(stopped / "run").items()


def test_a_run_that_begins_again_keeps_the_checkpoints_of_the_old_one(stopped):
    old = files(stopped / "run" / "checkpoints")
    (stopped / "text.txt").write_text(TEXT.replace("fox", "cat"))
    train(constant(stopped, seed=1), resume="never")
    kept = files(stopped / "run" / "old-1" / "checkpoints")
    assert sorted(kept.values()) == sorted(old.values())
    assert (stopped / "run" / "model").exists() and not list((stopped / "run" / "data").glob("new_*"))


def test_a_run_goes_on_with_its_tokens_when_the_text_is_gone_and_refuses_another_text(stopped, capsys):
    tokens = stopped / "run" / "data" / "tokens.npy"
    packed = tokens.read_bytes()
    (stopped / "text.txt").write_text(TEXT + "And more.")
    with pytest.raises(ValueError, match=r"is not the text that the run .* by --data .*tokens.npy"):
        train(constant(stopped))
    assert tokens.read_bytes() == packed
    (stopped / "text.txt").unlink()
    assert train(constant(stopped)) == 0
    assert f"the run goes on with the tokens it has packed, {tokens}" in capsys.readouterr().err


def test_another_stream_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    train(settings(tmp_path, streaming=True))
    shutil.rmtree(tmp_path / "run" / "model")
    (tmp_path / "text.txt").write_text(TEXT[::-1])
    with pytest.raises(ValueError, match=r"other settings \(--data: "):
        train(settings(tmp_path, streaming=True))


def test_copies_of_checkpoints_are_left_alone_and_renamed_ones_refused(stopped):
    checkpoints = stopped / "run" / "checkpoints"
    shutil.copytree(checkpoints / "checkpoint-2", checkpoints / "checkpoint-2-backup")
    (checkpoints / "checkpoint-2").rename(checkpoints / "checkpoint-6")
    with pytest.raises(ValueError, match=r"checkpoint-6 was saved after step 2; name it checkpoint-2 again"):
        train(constant(stopped))
    (checkpoints / "checkpoint-6").rename(checkpoints / "checkpoint-2")
    assert train(constant(stopped)) == 0
    assert (checkpoints / "checkpoint-2-backup" / "trainer_state.json").exists()


def test_lines_of_metrics_that_a_power_cut_has_taken_are_counted(stopped, capsys):
    metrics = stopped / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0] + "\n")
    assert train(constant(stopped)) == 0
    assert "metrics.jsonl lacks the lines of 1 steps before step 2" in capsys.readouterr().err


def test_a_last_step_that_breaks_the_weights_writes_no_model(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    broken = dict(learning_rate=1e38, weight_decay=1e38, steps=1, schedule="constant", warmup_steps=0)
    with pytest.raises(FloatingPointError, match=r"after the last step .* is not finite"):
        train(settings(tmp_path, **broken))
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    "changes, says", [({"num_hidden_layers": 2}, "layers.1"), ({"intermediate_size": 8}, "shape")]
)
def test_a_base_that_lacks_weights_is_refused(changes, says, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(tmp_path / "base")
    LlamaConfig(**sizes | {"num_hidden_layers": 1} | changes).save_pretrained(tmp_path / "base")
    run = settings(tmp_path)
    with pytest.raises(ValueError, match=rf"lacks weights that its config.json describes.*{says}"):
        train(
            FinetuneSettings(
                model=str(tmp_path / "base"), data=run.data, tokenizer=str(DEMO), output=run.output, **SIZES
            )
        )


TINY = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2)
HEADS = TINY | dict(num_attention_heads=2, num_key_value_heads=2, intermediate_size=32)
LEAKY = [
    (OPTForCausalLM, OPTConfig(**TINY, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=16)),
    (MambaForCausalLM, MambaConfig(**TINY, state_size=4)),
]


@pytest.mark.parametrize("kind, config", LEAKY, ids=["opt", "mamba"])
def test_a_model_that_reads_on_behind_a_document_is_not_trained_on_packed_ones(kind, config, tmp_path):
    torch.manual_seed(0)
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(TEXT[: 41 * (number % 3 + 1)])
    config.vocab_size = VOCABULARY
    kind(config).save_pretrained(tmp_path / "base")
    here = dict(model=str(tmp_path / "base"), data=str(tmp_path / "text"), tokenizer=str(DEMO))
    run = FinetuneSettings(output=str(tmp_path / "run"), steps=1, **here | SIZES)
    with pytest.raises(ValueError, match=r"reads on behind the end of a document.*--no-packing"):
        train(run)
    run.packing = False
    assert train(run) == 0


def test_borders_are_kept_by_models_that_count_positions_and_have_no_cache():
    torch.manual_seed(0)
    for model in (Qwen3ForCausalLM(Qwen3Config(**HEADS, head_dim=8)), LlamaForCausalLM(LlamaConfig(**HEADS))):
        check_borders(model.eval())
    ids, positions = torch.arange(1, 16)[None], torch.cat([torch.arange(6), torch.arange(9)])[None]
    with torch.no_grad():
        cached, packed = (model(ids, position_ids=positions, use_cache=flag).logits for flag in (True, False))
    assert (cached - packed).abs().max() > 1e-3, "with a cache, transformers sees no borders: Trainer makes none"
