"""scripts.evidence.hmt_neural_cache at a tiny size: it runs, and finished excerpts are not measured again."""

import json


OPTIONS = "--segment-length 16 --sensory-tokens 4 --segments 5 --earliest 2 --seeds 0 2"


def test_an_experiment_keeps_its_parts(load, smollm2, tmp_path, capsys, monkeypatch):
    module = load("hmt_neural_cache")
    arguments = [*OPTIONS.split(), *f"--work {tmp_path}/work --output {tmp_path}/x.json".split()]
    module.main(arguments)
    first, result = capsys.readouterr().out, json.loads((tmp_path / "x.json").read_text())
    assert len(result["rows"]) == 2 and "|---|" in first
    assert str(tmp_path) not in json.dumps(result["settings"])
    monkeypatch.setattr(module, "one_stretch", None)  # measuring again would then fail
    module.main(arguments)
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == result["rows"]
