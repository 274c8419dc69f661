"""hf-longctx report: it hands its options to `measure_all`, also in two processes."""

import json
import subprocess
import sys

import pytest
from demo_model import VOCABULARY
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli


def test_options_reach_the_report(folder, tmp_path, monkeypatch, capsys):
    """This context is too short for all but the loss."""
    text = tmp_path / "short.txt"
    text.write_text("In this line the foxes of a village met. " * 3)
    output = tmp_path / "report"
    options = f"--text {text} --context-length 20 --train-length 16 --repeats 2 --seed 3 --output {output}"
    assert cli.main(["report", str(folder), *options.split()]) == 0
    out, err = capsys.readouterr()
    assert f"wrote {output}/report.html and {output}/model_card.md" in out and f"text: {text}" in err
    arguments = json.loads((output / "arguments.json").read_text())
    assert {"context_length": 20, "train_length": 16, "repeats": 2, "seed": 3}.items() <= arguments.items()
    assert (arguments["model"], arguments["text"]) == (str(folder), str(text))
    settings = json.loads((output / "loss.json").read_text())["settings"]
    assert (settings["corpus"], settings["train_length"]) == (str(text), 16)


def test_nothing_to_measure(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere"), "--output", str(tmp_path / "report")]) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "nowhere" in error


@pytest.mark.slow
def test_processes_write_one_report(folder, tmp_path):
    llama, text, output = tmp_path / "llama", tmp_path / "text.txt", tmp_path / "report"
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=640)).save_pretrained(llama)
    AutoTokenizer.from_pretrained(folder).save_pretrained(llama)
    text.write_text("".join(f"In line {i} the {i * i % 97} foxes of {i % 13} villages met. " for i in range(100)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hf_longctx", "report"]
    command += [str(llama), "--text", str(text), "--repeats", "1", "--context-length", "256", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("report.html") == 1 and run.stderr.count("text: ") == 1
    assert {path.stem for path in output.glob("*.png")} == {
        "curve",
        "loss",
        "needle",
        "rope",
    }  # 256 tokens are too few for lines
    assert not (output / "unfinished").exists()
