"""hf-longctx report: it hands its options to `measure_all`, also in two processes."""

import json
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import Command
from demo_model import DEMO


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx import cli


def test_options_reach_the_report(folder, tmp_path, monkeypatch, capsys):
    """This context is too short for all but the loss."""
    text = tmp_path / "short.txt"
    text.write_text("In this line the foxes of a village met. " * 3)
    output = tmp_path / "report"
    options = f"--text {text} --context-length 20 --train-length 16 --output {output}"
    assert cli.main(["report", str(folder), *options.split()]) == 0
    out, err = capsys.readouterr()
    assert f"wrote {output}/report.html" in out and f"text: {text}" in err
    settings = json.loads((output / "loss.json").read_text())["settings"]
    assert (settings["corpus"], settings["train_length"]) == (text.name, 16)
    assert {path.name for path in output.iterdir()} >= {"report.html", "loss.json", "loss.png", "journals"}
    assert not (output / "curve.json").exists()
    for file in filter(Path.is_file, output.rglob("*")):  # none holds a path of this machine
        assert not any(str(path).encode() in file.read_bytes() for path in (folder, text)), file


def test_processes_write_one_report(tmp_path):
    """Two processes have the environment that torchrun gives them. 100 tokens are too few for needles and lines."""
    llama, text, output = DEMO.parent / "llama-demo", tmp_path / "text.txt", tmp_path / "report"
    text.write_text("".join(f"In line {i} the {i * i % 97} foxes of {i % 13} villages met. " for i in range(100)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = ["hf-longctx", "report", llama, "--text", text, "--repeats", 1, "--seed", 3, "--context-length", 100]
    with ExitStack() as stack:
        ranks = [os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        first, second = (stack.enter_context(Command([*command, "--output", output], env=env)) for env in ranks)
        assert (first.wait(300), second.wait(300)) == (0, 0), first.stderr + second.stderr
        assert first.stdout.count("report.html") == 1 and first.stderr.count("text: ") == 1
        assert not second.stdout and "text: " not in second.stderr
    curve = json.loads((output / "curve.json").read_text())["settings"]
    assert (curve["seed"], curve["repeats"]) == (3, 1)
    pictures = {path.stem for path in output.glob("*.png")}
    assert pictures & {"curve", "loss", "rope", "needle", "lines"} == {"curve", "loss", "rope"}
