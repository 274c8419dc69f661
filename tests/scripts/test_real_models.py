"""scripts.evidence.real_models on a tiny model: rows are filled by the commands, kept, and drawn."""

import json
from types import SimpleNamespace

import pytest

from hf_longctx.cli import main


pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install 'hf-longctx[plot]'")

MANIFEST = """
[[group]]
curve = "--text stdlib --lengths {lengths} --repeats 2"
lengths = "8"
loss = "--text stdlib --context-length 16 --sequences 2"
needle = "--text stdlib --lengths 300 --depths 0.5 --no-replies"
lines = "--lines 2 --repeats 2 --no-replies"
models = [
    { model = "tiny", source = "{models}/model", claimed = "2k", lengths = "8 1000" },
    { model = "absent", source = "{models}/absent", claimed = "2k" },
    { model = "of the paper", source = "who/what", claimed = "4k", fine = "0", coarse = "2.7k", has_rope = false },
]
"""


@pytest.mark.usefixtures("smollm2")
def test_rows_are_filled_by_the_commands_and_kept(load, tmp_path, capsys, monkeypatch):
    module, ran = load("real_models"), []
    (tmp_path / "manifest.toml").write_text(MANIFEST)
    monkeypatch.setattr(module, "MANIFEST", tmp_path / "manifest.toml")
    monkeypatch.setattr(module, "MODELS", tmp_path)

    def call(command, **options):
        ran.append(command[3])
        capsys.readouterr()
        return SimpleNamespace(returncode=main(command[3:]), stdout=capsys.readouterr().out)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=call, PIPE=None))
    folders = ["--work", f"{tmp_path}/work", "--output", f"{tmp_path}/x.json", "--picture", f"{tmp_path}/x.png"]
    module.main(["--models", "tiny", "absent", *folders])
    tiny, absent, paper = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert ran == 2 * ["curve", "loss", "needle", "lines", "rope"]
    assert (tiny["missing"], absent["missing"]) == ("", "curve, loss, needle, lines, rope")
    assert tiny["rope"][0]["base"] == 10_000 and "~/.cache/hf_longctx/model --text stdlib" in tiny["commands"][0]
    assert str(tmp_path) not in json.dumps([tiny, absent, paper]) and (tmp_path / "x.png").exists()
    cells = module.describe(tiny)
    assert cells["copied"][1000] == module.read(tiny, "curve").points[1].copy_mean and len(tiny["loss"]) == 8
    assert cells["minutes"] == 0, "the commands ran in this process"
    assert cells["bounds"].startswith("violated at 21.1% of the distances, from 91 tokens on")
    assert "| of the paper | 4k |" in module.table({"rows": [tiny, absent, paper]})

    module.main(["--models", "of the paper", *folders])  # this run fails, and the other rows are retained
    kept = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert kept[:2] == [tiny, absent] and kept[2]["missing"] == "curve, loss, needle, lines"
    module.main(["--models", "tiny", *folders])
    assert len(ran) == 14 and json.loads((tmp_path / "x.json").read_text())["rows"][0] == tiny
