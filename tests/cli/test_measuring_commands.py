"""The commands curve, loss, needle and lines: from options to JSON and figure."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from demo_model import VOCABULARY
from transformers import AutoModelForCausalLM

from hf_longctx import cli
from hf_longctx.metrics import ForgettingCurve, LineRetrieval, LocalReader, read_result


# Options that measure a tiny model quickly
QUICK = {
    "curve": "--max-length 30 --points 3 --repeats 2 --text stdlib",
    "loss": "--context-length 40 --sequences 3 --text stdlib",
    "needle": "--lengths 400 450 --depths 3 --no-replies --text stdlib",
    "lines": "--lines 3,10 --repeats 2 --no-replies",
}
MORE = {
    "curve": "--log-lengths --train-length 64 --bos-token-id 5 --eos-token-id 6",
    "loss": "--train-length 32 --bos-token-id 5",
    "needle": "--mode standard --repeats 2",
}
SETTINGS = {
    "curve": dict(lengths=[8, 15, 30], repeats=2, train_length=64, bos_token_id=5, eos_token_id=6, seed=3),
    "loss": dict(context_length=40, train_length=32, bos_token_id=5),
    "needle": dict(lengths=[400, 450], depths=[0, 0.5, 1], replies=False, mode="standard", repeats=2, seed=3),
    "lines": dict(lines=[3, 10], repeats=2, replies=False, seed=3),
}


pytestmark = pytest.mark.usefixtures("undrawn")


def measure(folder, output, command, options=""):
    """Run a command; return its exit status and the result in OUTPUT.json, with a figure next to it."""
    status = cli.main([command, str(folder), "--output", str(output), *options.split()])
    assert output.with_name(f"{output.name}.png").read_bytes().startswith(b"\x89PNG")
    return status, read_result(output.with_name(f"{output.name}.json"))


@pytest.mark.filterwarnings("ignore:.* more than the 64")
@pytest.mark.parametrize("command", QUICK)
def test_a_command_measures_a_cache(folder, tmp_path, capsys, command):
    """The full cache gives the model's own result, except that a curve scores all tokens."""
    options = f"{QUICK[command]} --journal {tmp_path}/journal"
    _, whole = measure(folder, tmp_path / "whole", command, options)
    for i, cache in enumerate(("full", "hf_longctx.fox.PrunedCache:0")):
        _, result = measure(folder, tmp_path / "cache", command, f"{options}{i} --cache {cache}")
        assert result.settings["cache"] == cache and result.settings["cache_bytes"] > 0
        if command == "loss":
            assert result.loss == pytest.approx(whole.loss, rel=1e-5)
        elif command == "curve":
            assert [p.scored_tokens for p in result.points] == [8, 19, 30]
        else:
            assert result.parts == pytest.approx(whole.parts) or result.rates() == whole.rates()
    assert cli.main(["compare", str(tmp_path / "whole.json"), str(tmp_path / "cache.json"), "--output",
                     str(tmp_path / "both.md")]) == 0  # fmt: skip


@pytest.mark.filterwarnings("ignore:.* more than the 64")
@pytest.mark.parametrize("command", QUICK)
def test_a_command_writes_and_tells_what_it_measured(folder, tmp_path, capsys, command):
    output = tmp_path / "new folder" / "result"
    options = f"{QUICK[command]} {MORE.get(command, '')} --seed 3 --journal {tmp_path}/journal"
    status, result = measure(folder, output, command, options)
    out, err = capsys.readouterr()
    assert status == 0 and f"{result.summary()}\nwrote {output}.json\nwrote {output}.png\n" in out
    assert result.settings["tokenizer"] == folder.name
    assert {name: result.settings.get(name) for name in SETTINGS[command]} == SETTINGS[command]
    assert command != "loss" or result.sequences == 3
    assert (tmp_path / "journal").read_text().count("\n") > 1
    if command != "lines":
        assert "text: Python language reference" in err and result.settings["corpus"].startswith("Python")


@pytest.mark.filterwarnings("ignore:.* more than the 64")
def test_defaults_end_where_the_claim_does(folder, tmp_path):
    _, loss = measure(folder, tmp_path / "loss", "loss", "--sequences 1 --text stdlib")
    assert loss.context_length == 64
    _, lines = measure(folder, tmp_path / "lines", "lines", "--repeats 1")
    assert [point.lines for point in lines.points] == [5] and lines.points[0].answers[0].reply is not None


def test_random_data_need_no_text(folder, tmp_path):
    options = "--data-type random --points 2 --repeats 1 --tokens-per-pass 70 --protocol adaptive"
    status, curve = measure(folder, tmp_path / "curve", "curve", options)
    assert status == 0 and curve.points[-1].length == (64 - 3) // 2 and curve.settings["protocol"] == "adaptive"
    assert curve.settings["tokens_per_pass"] == 70
    assert not {"corpus", "train_length"} & curve.settings.keys()
    assert curve.settings["id_range"] == [10, VOCABULARY - 1]
    status, curve = measure(folder, tmp_path / "curve", "curve", f"{options} --id-range 20 30")
    assert status == 0 and curve.settings["id_range"] == [20, 30]


def test_an_ending_is_taken_for_one_and_the_json_stays_where_the_disk_is_full(folder, tmp_path, capsys, monkeypatch):
    arguments = ["lines", str(folder), *QUICK["lines"].split(), "--output", f"{tmp_path}/a.b.svg"]
    assert cli.main(arguments) == 0 and f"wrote {tmp_path}/a.b.svg" in capsys.readouterr().out
    (tmp_path / "a.b.svg").unlink()
    monkeypatch.setattr(LineRetrieval, "plot", Mock(side_effect=OSError(28, "No space left on device")))
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert read_result(tmp_path / "a.b.json").summary() in out and "wrote" in out
    assert "No space left on device" in err and [path.name for path in tmp_path.iterdir()] == ["a.b.json"]


def test_an_interrupted_curve_says_so(folder, tmp_path, capsys, monkeypatch):
    predict = LocalReader.predict

    def stop(reader, inputs, prefix, positions):
        if inputs.shape[1] > 30:
            raise KeyboardInterrupt
        return predict(reader, inputs, prefix, positions)

    monkeypatch.setattr(LocalReader, "predict", stop)
    status, curve = measure(folder, tmp_path / "curve", "curve", QUICK["curve"])
    assert status == 130 and [p.length for p in curve.points] == [8]
    assert curve.settings["lengths"] == [8, 19, 30] and curve.settings["interrupted"] == "Ctrl-C"
    assert curve.missing == {19: "interrupted", 30: "interrupted"}
    assert "2 lengths from 19 to 30 not measured: interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, counts",
    [("curve", [12, 116, 116]), ("loss", [3]), ("needle", [6]), ("lines", [4])],
)
def test_a_dry_run_prints_the_number_of_requests(folder, tmp_path, capsys, monkeypatch, command, counts):
    """A curve has 3 lengths (8, 19, 30), 2 passages and 2 inputs, with 4, 10 and 15 scored tokens."""
    monkeypatch.setattr("hf_longctx.cli.shared.load_weights", Mock(side_effect=AssertionError))
    options = [*QUICK[command].split(), "--dry-run", "--output", str(tmp_path / "none")]
    assert cli.main([command, str(folder), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines[1:]] == counts and not [*tmp_path.iterdir()]


def test_a_served_model(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "metrics")
    from endpoint_server import serving

    model = AutoModelForCausalLM.from_pretrained(folder)
    options = "--max-length 20 --points 2 --repeats 2 --text stdlib"
    _, local = measure(folder, tmp_path / "local", "curve", options)
    with serving(model, names=("a", "b")) as server:
        _, served = measure(folder, tmp_path / "served", "curve", f"{options} --endpoint {server.url} --served-as b")
        assert (
            isinstance(served, ForgettingCurve) and served.points == local.points and served.settings["model"] == "b"
        )
        assert cli.main(["curve", str(folder), *options.split(), "--endpoint", server.url]) == 2
        assert "Name the model: --served-as" in capsys.readouterr().err
    monkeypatch.setenv("KEY", "secret")
    with serving(model, key="secret") as server:
        options += f" --endpoint {server.url} --api-key-env KEY --timeout 60 --retries 0 --concurrency 2"
        _, served = measure(folder, tmp_path / "served", "curve", options)
    assert served.points == local.points
