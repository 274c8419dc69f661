"""The commands, on a small model with random weights."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_longctx import __version__, cli


def test_train_demo_leaves_a_model_and_its_log(folder):
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_fox.py"} <= {
        p.name for p in folder.iterdir()
    }
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2]


def test_curve_writes_picture_and_numbers(folder, tmp_path, capsys):
    output = tmp_path / "new folder" / "curve"
    options = ["--max-length", "30", "--points", "3", "--repeats", "2", "--output", str(output)]
    assert cli.main(["curve", str(folder), *options]) == 0
    result = json.loads((output.parent / "curve.json").read_text())
    assert [p["length"] for p in result["points"]] == [8, 19, 30]
    assert (output.parent / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "fine length" in capsys.readouterr().out


def test_random_data_need_no_text(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.shared, "load_tokens", lambda *_: pytest.fail("a text is read"))
    options = ["--data-type", "random", "--points", "2", "--repeats", "1", "--output", str(tmp_path / "curve")]
    assert cli.main(["curve", str(folder), *options]) == 0
    result = json.loads((tmp_path / "curve.json").read_text())
    assert result["points"][-1]["length"] == (64 - 3) // 2
    assert not {"corpus", "train_length"} & result["settings"].keys()


def test_a_killed_curve_goes_on_from_its_journal(folder, tmp_path):
    options = ["--max-length", "30", "--points", "3", "--repeats", "2", "--output", str(tmp_path / "curve")]
    options += ["--journal", str(tmp_path / "curve.jsonl"), "--protocol", "nested"]
    assert cli.main(["curve", str(folder), *options]) == 0
    journal = tmp_path / "curve.jsonl"
    whole, first = journal.read_bytes(), json.loads((tmp_path / "curve.json").read_text())
    assert first["settings"]["protocol"] == "nested" and first["settings"]["tokenizer"] == str(folder)
    journal.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    assert cli.main(["curve", str(folder), *options]) == 0
    assert journal.read_bytes() == whole
    assert json.loads((tmp_path / "curve.json").read_text())["points"] == first["points"]


def test_curve_with_a_journal_goes_on(folder, tmp_path, monkeypatch):
    options = ["--max-length", "30", "--repeats", "3", "--protocol", "adaptive", "--tokens-per-pass", "40"]
    options += ["--journal", str(tmp_path / "journal"), "--output", str(tmp_path / "curve")]
    assert cli.main(["curve", str(folder), *options]) == 0
    first, journal = (json.loads((tmp_path / "curve.json").read_text()), (tmp_path / "journal").read_bytes())
    assert first["settings"]["protocol"] == "adaptive"
    assert len(json.loads(journal.splitlines()[0])["settings"]["lengths"]) == 23  # of 32 points between 8 and 30
    monkeypatch.setattr("hf_longctx.metrics.run.engine.Engine.__init__", None)  # nothing is left to measure
    assert cli.main(["curve", str(folder), *options]) == 0
    assert json.loads((tmp_path / "curve.json").read_text())["points"] == first["points"]
    assert (tmp_path / "journal").read_bytes() == journal


def test_rope_tells_the_verdict(tmp_path, capsys):
    LlamaConfig(max_position_embeddings=4096).save_pretrained(tmp_path)
    assert cli.main(["rope", str(tmp_path)]) == 0
    assert "10000" in capsys.readouterr().out
    assert cli.main(["rope", str(tmp_path), "--json", "--context-length", "1000"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_generate_continues_the_prompt(folder, capsys):
    assert cli.main(["generate", str(folder), "The import statement", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("The import statement")


def test_gates_draws_a_picture(folder, tmp_path, capsys):
    output = tmp_path / "new folder" / "gates.png"
    assert cli.main(["gates", str(folder), "--tokens", "40", "--layers", "0", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    assert "40 tokens" in capsys.readouterr().out
    assert cli.main(["gates", str(folder), "--tokens", "40", "--layers", "99"]) == 1
    assert "layers is [99]" in capsys.readouterr().err


def test_convert_there_and_back_and_from_a_llama(folder, tmp_path, capsys):
    theirs, ours = tmp_path / "official", tmp_path / "fox"
    assert cli.main(["convert", str(folder), str(theirs), "--to", "official"]) == 0
    assert json.loads((theirs / "config.json").read_text())["model_type"] == "forgetting_transformer-project_fox"
    assert cli.main(["convert", str(theirs), str(ours), "--from", "official"]) == 0
    capsys.readouterr()
    said = []
    for model in (folder, ours):
        assert cli.main(["generate", str(model), "The import statement", "--max-new-tokens", "3"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]

    llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    llama.save_pretrained(tmp_path / "llama")
    options = ["--from", "llama", "--decay-time", "4096"]
    assert cli.main(["convert", str(tmp_path / "llama"), str(tmp_path / "opened"), *options]) == 0
    assert json.loads((tmp_path / "opened" / "config.json").read_text())["decay_time_max"] == 4096.0


def test_a_short_corpus_is_named_with_its_longest_length(folder, tmp_path, capsys):
    text = tmp_path / "short.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 5)
    tokens = len(AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"])
    assert cli.main(["curve", str(folder), "--text", str(text), "--max-length", "500"]) == 1
    assert str(tokens // 3) in capsys.readouterr().err


def test_the_curve_up_to_a_position_limit_is_kept(folder, tmp_path, capsys):
    limited = tmp_path / "gpt2"
    config = GPT2Config(
        vocab_size=1024, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    GPT2LMHeadModel(config).save_pretrained(limited)
    AutoTokenizer.from_pretrained(folder).save_pretrained(limited)
    options = ["--max-length", "40", "--points", "3", "--repeats", "2", "--output", str(tmp_path / "curve")]
    assert cli.main(["curve", str(limited), *options]) == 1
    printed = capsys.readouterr()
    assert "longest measurable length is 30" in printed.err and ".curve" not in printed.err
    assert "length 40 not measured: beyond the model's 64 positions" in printed.out
    kept = json.loads((tmp_path / "curve.json").read_text())
    assert [p["length"] for p in kept["points"]] == [8, 24]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["curve", "{tmp}"], r"config\.json"),
        (["curve", "{bare}"], r"model\.safetensors"),
        (["generate", "{folder}", "  "], "prompt is empty"),
        (["rope", "{folder}"], "RoPE"),
        (["curve", "{folder}", "--text", "{tmp}"], r"no \*.txt file"),
        (["curve", "{folder}", "--text", "{tmp}/nowhere.txt"], "nowhere.txt is no file or folder"),
        (
            ["convert", "{folder}", "{tmp}/fla", "--to", "fla"],
            r"cannot be written for flash-linear-attention: .*k_shift",
        ),
        (["convert", "{bare}", "{tmp}/new", "--to", "official"], r"lacks model\.safetensors"),
    ],
    ids=[
        "no model",
        "no weights",
        "empty prompt",
        "no RoPE",
        "folder without texts",
        "no such text",
        "not representable",
        "no weights to convert",
    ],
)
def test_expected_errors_are_one_message(folder, tmp_path, tmp_path_factory, capsys, arguments, message):
    bare = tmp_path_factory.mktemp("without weights")
    for file in folder.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, bare)
    names = dict(folder=folder, tmp=tmp_path, bare=bare)
    assert cli.main([a.format(**names) for a in arguments]) == 1
    _, _, error = capsys.readouterr().err.rpartition("hf-longctx: error: ")
    assert re.search(message.format(**names), error)


def test_dtypes_are_named(capsys):
    with pytest.raises(SystemExit):
        cli.main(["loss", "model", "--dtype", "foo"])
    assert "choose from" in capsys.readouterr().err


def test_help_reads_well(capsys):
    for command in ([], *([name] for name in cli.COMMANDS)):
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, "--help"])
        assert stop.value.code == 0
        assert "None" not in capsys.readouterr().out


def test_the_package_can_be_run_as_a_module():
    run = subprocess.run([sys.executable, "-m", "hf_longctx", "--version"], capture_output=True, text=True)
    assert run.stdout == f"hf-longctx {__version__}\n"
