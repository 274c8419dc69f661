"""hf-longctx report: everything on one page, with what failed, and only once."""

import json
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli
from hf_longctx.metrics import PositionLoss


OPTIONS = ["--text", "stdlib", "--repeats", "1", "--train-length", "512"]


@pytest.fixture(scope="module")
def llama(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    sizes = dict(vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=640)).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


@pytest.mark.slow
def test_everything_is_measured_once(llama, tmp_path, monkeypatch, capsys):
    output = tmp_path / "report"
    command = ["report", str(llama), *OPTIONS, "--context-length", "600", "--output", str(output)]
    assert cli.main(command) == 0
    for name in ("curve", "loss", "needle", "lines", "rope"):
        assert json.loads((output / f"{name}.json").read_text())["saved"]["time"]
    page = (output / "report.html").read_text()
    assert page.count("<img") == 4 and "Not measured" not in page
    settings = json.loads((output / "loss.json").read_text())["settings"]
    assert settings["corpus"].startswith("Python language reference") and settings["train_length"] == 512
    card = ModelCard.load(output / "model_card.md").data
    assert card.model_name == llama.name and len(card.eval_results) == 5
    longest = json.loads((output / "curve.json").read_text())["points"][-1]["length"]
    assert longest == (600 - 3) // 2
    lengths = {cell["length"] for cell in json.loads((output / "needle.json").read_text())["cells"]}
    assert min(lengths) > 218 and max(lengths) <= 600

    monkeypatch.setattr(cli.report, "measure", lambda *_: pytest.fail("it is measured again"))
    monkeypatch.chdir(llama.parent)
    assert cli.main(["report", llama.name, *command[2:]]) == 0
    assert capsys.readouterr().err.count("measured before") == 5
    assert cli.main([*command, "--seed", "1"]) == 1
    assert "a report with another seed" in capsys.readouterr().err


@pytest.mark.slow
def test_what_fails_is_named_and_tried_again(folder, tmp_path, capsys):
    """FoX has no RoPE, and this context is too short for all but the loss."""
    text = tmp_path / "short.txt"
    text.write_text("In this line the foxes of a village met. " * 3)
    output = tmp_path / "report"
    options = ["--text", str(text), "--context-length", "20", "--output", str(output)]
    assert cli.main(["report", str(folder), *options]) == 0
    page = (output / "report.html").read_text()
    assert page.count("Not measured") == 4 and "has no rotary" in page and "up to 8 is too small" in page
    assert {path.name for path in output.glob("*.json")} == {"arguments.json", "loss.json"}


def test_nothing_to_measure(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere"), "--output", str(tmp_path / "report")]) == 1
    error = capsys.readouterr().err
    assert error.count("error: ") == 1 and "nowhere" in error


@pytest.fixture
def quick(monkeypatch):
    """Every measurement is a result at once, and what was measured is listed."""
    measured = []

    def measure(name, args, folder, rank):
        measured.append(name)
        PositionLoss([3.0, 2.5], 1).save(folder / f"{name}.json")

    monkeypatch.setattr(cli.report, "measure", measure)
    monkeypatch.setattr(cli.report, "write_rope", lambda args, file: measure("rope", args, file.parent, 0))
    return measured


def test_a_report_is_of_one_state_of_model_and_text(llama, tmp_path, quick, capsys):
    model, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(llama, model)
    text.write_text("In this line the foxes of a village met. " * 3)
    command = ["report", str(model), "--text", str(text), "--output", str(tmp_path / "report")]
    assert cli.main(command) == 0 and len(quick) == 5
    text.write_text("In that line the foxes of a village met. " * 3)
    assert cli.main(command) == 1
    assert "another text (its content or its tokenizer changed). Take" in capsys.readouterr().err
    text.write_text("In this line the foxes of a village met. " * 3)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert cli.main(command) == 1
    assert "another state of the model" in capsys.readouterr().err
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "report" / "loss.json").unlink()
    assert cli.main(command) == 0 and quick[5:] == ["loss"]


def test_a_report_that_failed_at_once_blocks_nothing(llama, tmp_path, quick):
    output = tmp_path / "report"
    (output / "unfinished").mkdir(parents=True)
    (output / "arguments.json").write_text('{"model": "a name with a typo"}')
    (output / "unfinished" / "loss.jsonl").write_text("its first line\n")
    assert cli.main(["report", str(llama), "--text", "stdlib", "--output", str(output)]) == 0
    assert len(quick) == 5 and not (output / "unfinished" / "loss.jsonl").exists()
    assert json.loads((output / "arguments.json").read_text())["model"] == str(llama)


@pytest.mark.slow
def test_processes_write_one_report(llama, tmp_path):
    output = tmp_path / "report"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hf_longctx", "report"]
    command += [str(llama), *OPTIONS, "--context-length", "600", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("report.html") == 1 and run.stderr.count("text: ") == 1
    assert {path.stem for path in output.glob("*.png")} == {"curve", "loss", "needle", "lines"}
    assert not list((output / "unfinished").iterdir())
