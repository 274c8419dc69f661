"""The commands loss, needle and lines."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx import cli
from hf_longctx.metrics import ForgettingCurve, LineRetrieval, NeedleGrid, PositionLoss


def measure(folder, output, command, *options):
    status = cli.main([command, str(folder), "--output", str(output), *options])
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return status, output.with_suffix(".json").read_text()


def test_loss(folder, tmp_path, capsys):
    status, text = measure(folder, tmp_path / "new" / "loss", "loss", "--context-length", "40", "--sequences", "2")
    assert status == 0
    result = PositionLoss.from_json(text)
    assert (result.context_length, result.sequences) == (40, 2)
    out, err = capsys.readouterr()
    assert result.summary() in out and result.settings["tokenizer"] == str(folder)
    assert "text: Python language reference" in err
    assert f"wrote {tmp_path}/new/loss.png and {tmp_path}/new/loss.json" in out


@pytest.mark.filterwarnings("ignore:the longest length needs")
def test_needle(folder, tmp_path, capsys):
    options = [
        "--lengths",
        "400",
        "450",
        "--depths",
        "3",
        "--no-replies",
        "--score",
        "probability",
        "--mode",
        "standard",
    ]
    status, text = measure(folder, tmp_path / "needle", "needle", *options, "--text", "stdlib", "--seed", "3")
    assert status == 0
    result = NeedleGrid.from_json(text)
    assert (result.lengths, result.depths) == ([400, 450], [0, 0.5, 1])
    assert (result.settings["mode"], result.settings["seed"]) == ("standard", 3)
    assert result.summary() in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:a record of 10 lines needs")
def test_lines(folder, tmp_path):
    status, text = measure(folder, tmp_path / "lines", "lines", "--lines", "3", "10", "--repeats", "2")
    assert status == 0
    result = LineRetrieval.from_json(text)
    assert [point.lines for point in result.points] == [3, 10]
    assert all(answer.reply is not None for point in result.points for answer in point.answers)


@pytest.mark.filterwarnings("ignore:a record of 5 lines needs")
def test_default_lines(folder, tmp_path):
    _, text = measure(folder, tmp_path / "lines", "lines", "--repeats", "1", "--no-replies")
    assert [point.lines for point in LineRetrieval.from_json(text).points] == [5]


@pytest.mark.filterwarnings("ignore:a record of 2 lines needs")
@pytest.mark.parametrize("command", ["loss --context-length 20 --sequences 1", "lines --lines 2 --no-replies"])
def test_one_process_of_several_writes(folder, tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr(cli.shared, "join_processes", lambda: 1)
    name, *options = command.split()
    assert cli.main([name, str(folder), *options, "--output", str(tmp_path / "result")]) == 0
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


def test_default_lengths_of_needles(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert cli.needle.default_lengths(800, tokenizer, "easy") == [288, 384, 480, 576, 672, 768]
    assert cli.needle.default_lengths(64, tokenizer, "easy") == [32]  # too short, which is an error of its own


def test_a_served_model(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "metrics")
    from endpoint_server import serving

    model = AutoModelForCausalLM.from_pretrained(folder)
    options = ["--max-length", "20", "--points", "2", "--repeats", "2", "--text", "stdlib"]
    _, text = measure(folder, tmp_path / "local", "curve", *options)
    with serving(model, names=("a", "b")) as server:
        served = ["--endpoint", server.url, "--served-as", "b"]
        _, same = measure(folder, tmp_path / "served", "curve", *options, *served)
        assert cli.main(["curve", str(folder), *options, "--endpoint", server.url]) == 1
    assert ForgettingCurve.from_json(same).points == ForgettingCurve.from_json(text).points
    assert json.loads(same)["settings"]["model"] == "b"


def test_an_interrupted_run_is_written_and_resumed(folder, tmp_path, monkeypatch, capsys):
    from hf_longctx.metrics.loss import measure as loss_measure

    losses, calls = loss_measure.token_losses, []

    def fail(*arguments):
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return losses(*arguments)

    monkeypatch.setattr(loss_measure, "token_losses", fail)
    options = ["--context-length", "40", "--sequences", "3", "--journal", str(tmp_path / "journal")]
    status, text = measure(folder, tmp_path / "loss", "loss", *options)
    assert status == 130
    assert PositionLoss.from_json(text).sequences == 2
    status, text = measure(folder, tmp_path / "loss", "loss", *options)
    assert (status, PositionLoss.from_json(text).sequences, len(calls)) == (0, 3, 4)
    assert json.loads(text)["settings"]["context_length"] == 40


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["loss", "{folder}", "--context-length", "100000000"], "fewer than context_length=100000000"),
        (["loss", "{folder}", "--context-length", "0"], "context_length (0)"),
        (["needle", "{folder}", "--depths", "1"], "--depths is 1; it must be at least 2"),
        (["needle", "{folder}", "--no-replies", "--score", "match_rate"], "looks into replies, and there are none"),
        (["needle", "{folder}", "--lengths", "100"], "length 100 is too short"),
        (["lines", "{folder}", "--lines", "0"], "a record has from 1 to"),
    ],
)
def test_errors_are_one_line(folder, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main([argument.format(folder=folder) for argument in arguments]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]
