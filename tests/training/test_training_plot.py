"""Losses and gates of runs become a picture."""

import json

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.training.plot import QUANTILES, plot_runs


def write_run(folder, gates, losses):
    folder.mkdir()
    lines = [{"step": i, "loss": loss} | dict.fromkeys(QUANTILES, 5.0 + i) for i, loss in enumerate(losses, 1)]
    lines = lines if gates else [{"step": line["step"], "loss": line["loss"]} for line in lines]
    lines.insert(2, {"step": 2, "eval_loss": 3.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    return str(folder)


def test_runs_are_drawn_together(tmp_path):
    runs = [write_run(tmp_path / "fox", True, [5, 4, 3.5]), write_run(tmp_path / "llama", False, [5, 4.5, 4])]
    sizes = {}
    for count in (1, 2):
        output = tmp_path / f"{count}.png"
        plot_runs(runs[:count], output)
        sizes[count] = output.stat().st_size
    assert sizes[2] > sizes[1] > 10_000


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl; give the folder of a run"):
        plot_runs([tmp_path], tmp_path / "a.png")
    run = write_run(tmp_path / "new", True, [])
    with pytest.raises(ValueError, match="has no step yet"):
        plot_runs([run], tmp_path / "a.png")
