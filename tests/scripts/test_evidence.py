"""scripts/evidence at tiny sizes: every one runs, and what is measured is kept."""

import json

import pytest


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

TINY = {  # rows of the result, and options
    "hmt_facts": (
        9,
        "--segment-length 64 --sensory-tokens 4 --first-steps 1 --steps 2 --rows 2 --asked 2 --most-facts 2 "
        "--most-asked 4 --rounds 2 --seeds 0",
    ),
    "hmt_wrapping": (5, "--lengths 16 --sensory-tokens 4 --segments 3 --texts 2 --reply-segment 64 --new-tokens 4"),
    "hmt_neural_cache": (
        2,
        "--segment-length 16 --sensory-tokens 4 --segments 5 --earliest 2 --seeds 0 2",
    ),
    "hmt_perplexity": (
        9,
        "--segment-length 16 --sensory-tokens 4 --first-steps 1 --steps 2 --rows 2 --segments 2 --text-length 64 "
        "--texts 4 --seeds 0",
    ),
}


@pytest.mark.usefixtures("undrawn")  # test_real_models.py draws one
@pytest.mark.parametrize("name", TINY)
def test_an_experiment_keeps_its_parts(name, load, smollm2, tmp_path, capsys, monkeypatch):
    module = load(name)
    folders = f"--work {tmp_path}/work --output {tmp_path}/x.json --picture {tmp_path}/x.png"
    arguments = [*TINY[name][1].split(), *folders.split()]
    module.main(arguments)
    first, result = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())
    assert len(result["rows"]) == TINY[name][0] and "|---|" in first
    assert str(tmp_path) not in json.dumps(result["settings"])
    monkeypatch.setattr(module, "torch", None)  # what is kept is not computed again
    module.main(arguments)
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == result["rows"]


def test_seven_billion_at_a_tiny_size(load, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'hf-longctx[quantized]'")
    size = "--layers 1 --hidden 128 --recipes lora hmt"
    load("seven_billion").main([*size.split(), "--work", f"{tmp_path}/work", "--output", f"{tmp_path}/x.json"])
    first, second = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert first["killed"] and not second["killed"] and second["step_seconds"] > 0
    assert first["peak"] > first["libraries"] > 0 and len(first["losses"]) == len(second["losses"]) == 2
