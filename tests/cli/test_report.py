"""hf-longctx report: everything on one page, with what failed, and only once."""

import json

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli


OPTIONS = ["--text", "stdlib", "--repeats", "1", "--train-length", "512"]


@pytest.fixture(scope="module")
def llama(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    sizes = dict(vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=512)).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


@pytest.mark.slow
def test_everything_is_measured_once(llama, tmp_path, monkeypatch, capsys):
    output = tmp_path / "report"
    command = ["report", str(llama), *OPTIONS, "--context-length", "400", "--output", str(output)]
    assert cli.main(command) == 0
    for name in ("curve", "loss", "needle", "rope"):
        assert json.loads((output / f"{name}.json").read_text())["saved"]["time"]
    page = (output / "report.html").read_text()
    assert page.count("<img") == 3 and "Not measured" not in page
    settings = json.loads((output / "loss.json").read_text())["settings"]
    assert settings["corpus"].startswith("Python language reference") and settings["train_length"] == 512
    card = ModelCard.load(output / "model_card.md").data
    assert card.model_name == llama.name and len(card.eval_results) == 4
    longest = json.loads((output / "curve.json").read_text())["points"][-1]["length"]
    assert longest == (400 - 3) // 2
    lengths = {cell["length"] for cell in json.loads((output / "needle.json").read_text())["cells"]}
    assert min(lengths) > 218 and max(lengths) <= 400

    monkeypatch.setattr(cli.shared, "load_model", lambda args: pytest.fail("the model is loaded again"))
    assert cli.main(command) == 0
    assert capsys.readouterr().err.count("measured before") == 4
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
    assert page.count("Not measured") == 3 and "has no rotary" in page and "up to 8 is too small" in page
    assert {path.name for path in output.glob("*.json")} == {"arguments.json", "loss.json"}


def test_nothing_to_measure(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere"), "--output", str(tmp_path / "report")]) == 1
    error = capsys.readouterr().err
    assert "error: nothing could be measured. Forgetting curve: " in error and "nowhere" in error
