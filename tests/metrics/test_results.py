"""Saved results of every metric are read again, whatever they are of."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_longctx.metrics import (
    CurvePoint,
    ForgettingCurve,
    LineRetrieval,
    NeedleGrid,
    PositionLoss,
    RopeReport,
    rope_report,
)
from hf_longctx.metrics.results import KINDS, model_name, named, read_result
from hf_longctx.metrics.retrieval.answers import Answer
from hf_longctx.metrics.retrieval.haystack import NeedleCell
from hf_longctx.metrics.retrieval.lines import LinesPoint


ANSWERS = [Answer(log_prob=-1.5, tokens=4, exact=False, reply=" sit in the park", matched=True)]
EXAMPLES = [
    ForgettingCurve([CurvePoint(8, [4, 4], [1, 0], [3, 5])], {"model": "someone/fox"}),
    PositionLoss([3.0, 2.5], 4, {"model": "someone/fox"}),
    NeedleGrid([NeedleCell(ANSWERS, 100, 0.5, [40])], {"model": "someone/fox"}),
    LineRetrieval([LinesPoint(ANSWERS, 10, [200], [3])], {"model": "someone/fox"}),
]


@pytest.mark.parametrize("result", EXAMPLES, ids=lambda result: type(result).__name__)
def test_saved_results(result, tmp_path):
    result.save(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == result
    assert type(result) in KINDS.values()


def test_a_rope_report(tmp_path):
    report = rope_report(LlamaConfig(max_position_embeddings=512), minimum_base=False)
    (tmp_path / "rope.json").write_text(report.to_json())
    again = read_result(tmp_path / "rope.json")
    assert isinstance(again, RopeReport) and again == report and str(again) == str(report)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "result.json is no saved result of ours: Expecting"),
        ("[1]", "expected a result of forgetting_curve"),
        ('{"metric": "bleu"}', "expected a result of forgetting_curve"),
        ('{"format": 1, "settings": {}, "points": [{"length": 8}]}', "it lacks 'copy_correct'"),
        ('{"format": 99, "settings": {}, "points": []}', "Upgrade"),
        ('{"claimed_context": 1, "groups": []}', "it lacks 'model'"),
    ],
    ids=["no JSON", "a list", "another metric", "half a curve", "newer format", "half a report"],
)
def test_other_files_are_named(tmp_path, text, message):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_result(tmp_path / "result.json")


def test_names():
    def curve(model):
        return ForgettingCurve([], {"model": model} if model else {})

    assert model_name(curve("someone/fox")) == "someone/fox"
    assert model_name(curve("/data/models/fox/")) == "fox"
    assert model_name(curve(None), "results/my_fox.json") == "my_fox"
    files = [(Path("a/x.json"), curve("fox")), (Path("b/x.json"), curve("fox")), (Path("y.json"), curve("llama"))]
    assert list(named(files)) == ["fox (x)", "fox (x)'", "llama"]
