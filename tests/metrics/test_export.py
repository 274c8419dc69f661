"""Results as Every Eval Ever and the Hub collect them."""

import json
import uuid
from datetime import UTC, datetime

import pytest
import yaml
from examples import lines
from huggingface_hub import parse_eval_result_entries

from hf_longctx import cli
from hf_longctx.metrics import CurvePoint, ForgettingCurve, PositionLoss
from hf_longctx.metrics.report.export import every_eval_ever, hub_eval_results, scores


SETTINGS = {
    "model": "alice/fox",
    "corpus": "a book",
    "seed": 0,
    "weights_sha256": "ab",
    "versions": {"transformers": "5.23.0"},
}
CURVE = ForgettingCurve(
    [CurvePoint(n, [n // 2 if n < 800 else n // 4] * 10, [0] * 10) for n in (200, 400, 800)], SETTINGS
)
NOTHING = ForgettingCurve([CurvePoint(n, [n // 4] * 10, [n // 4] * 10) for n in (200, 400)], SETTINGS)
LOSS = PositionLoss([3.0, 2.0, 1.0], 4, SETTINGS, error=[0.5, 0.5, 0.5])
LINES = lines([True] * 8, **SETTINGS)
OPTIONS = dict(model_id="alice/fox", organization="Lab", retrieved=datetime(2026, 1, 2, tzinfo=UTC))


def test_an_upper_end_is_never_a_score():
    """A length that is below 200 for sure is at least 0, and a table that sorts by it puts it last."""
    for result in (CURVE, NOTHING):
        lengths = [score for score in scores(result) if score.unit == "tokens"]
        sure = [result.interval(method) for method in ("fine", "coarse")]
        assert [(score.value, score.high) for score in lengths[:2]] == [(found.low, found.high) for found in sure]
    assert lengths[0].value == 0 and lengths[0].high == 200
    unsure = ForgettingCurve([CurvePoint(200, [99, 50], [49, 99])], SETTINGS)
    assert [score.task for score in scores(unsure)] == ["copy_accuracy.200"]


def test_rates_have_errors():
    rate = scores(ForgettingCurve([CurvePoint(200, [100, 80, 90, 100, 70, 100, 100], [0] * 7)], SETTINGS))[-1]
    assert rate.value == pytest.approx(640 / 700) and rate.samples == 7
    assert rate.error == pytest.approx(0.0459, abs=1e-4)
    assert rate.low < rate.value < rate.high == 1
    (line,) = scores(LINES)
    assert (line.value, line.high) == (1, 1) and line.low == pytest.approx(0.676, abs=1e-3)
    end, perplexity = scores(LOSS)
    assert end.error == 0.5 and end.high - end.value == pytest.approx(3.182 * 0.5, rel=1e-3) and end.lower_is_better
    assert perplexity.low is None


def strings(details):
    return all(isinstance(value, str) for value in details.values())


def test_every_eval_ever():
    """What the schema 0.3.0 asks for; `scripts/clients every` runs its own validator."""
    measured = datetime(2026, 1, 1, tzinfo=UTC)
    path, record = every_eval_ever([CURVE, LOSS, LINES], relationship="third_party", measured=measured, **OPTIONS)
    assert path.startswith("data/hf-longctx/alice/fox/") and uuid.UUID(path[26:-5]).version == 4
    assert path == every_eval_ever([CURVE, LOSS, LINES], **OPTIONS)[0] != every_eval_ever([CURVE], **OPTIONS)[0]
    json.dumps(record, allow_nan=False)
    assert {"schema_version", "evaluation_id", "retrieved_timestamp", "source_metadata", "eval_library"} < set(record)
    assert record["evaluation_timestamp"] == "1767225600" and record["retrieved_timestamp"] == "1767312000"
    assert record["source_metadata"]["evaluator_relationship"] == "third_party"
    model = record["model_info"]
    assert (model["id"], model["developer"], model["inference_engine"]["version"]) == ("alice/fox", "alice", "5.23.0")
    assert strings(model["additional_details"]) and model["additional_details"]["weights_sha256"] == "ab"
    entries = {entry["evaluation_name"]: entry for entry in record["evaluation_results"]}
    fine = entries["hf_longctx.forgetting_curve.fine_length"]
    assert fine["score_details"]["score"] == 400
    found = fine["score_details"]["uncertainty"]
    assert found["confidence_interval"] == {
        **{"lower": 400, "upper": 800, "confidence_level": 0.95},
        "method": "tests of the repeats, closed over lengths",
    }
    assert (
        "confidence_interval"
        not in entries["hf_longctx.forgetting_curve.coarse_length"]["score_details"]["uncertainty"]
    )
    loss = entries["hf_longctx.position_loss.loss.3"]
    assert loss["metric_config"]["lower_is_better"] and loss["metric_config"]["max_score"] == "Infinity"
    for entry in entries.values():
        assert strings(entry["generation_config"]["additional_details"])
        assert strings(entry["source_data"]["additional_details"]) and entry["source_data"]["dataset_name"]


def test_the_hub_reads_its_entries():
    entries = parse_eval_result_entries(hub_eval_results([CURVE, LINES], "alice/curve", source_url="https://x.org"))
    assert [(e.task_id, e.value) for e in entries] == [
        *(("fine_length", 400), ("coarse_length", 800), ("effective_length", 400)),
        ("line_retrieval.5", 1.0),
    ]
    assert entries[0].notes.endswith("; 10 samples; 95 % interval 400 to 800")
    assert entries[0].source_name == "hf-longctx" and entries[0].date is None


@pytest.mark.parametrize(
    "results, options, message",
    [
        ([CURVE], {"model_id": "fox"}, "'fox' is no name of a model on the Hub"),
        ([CURVE], {"relationship": "friend"}, "relationship must be one of first_party, "),
        ([ForgettingCurve([], {})], {}, "nothing was measured: no length measured"),
    ],
)
def test_what_is_not_exported(results, options, message):
    with pytest.raises(ValueError, match=message):
        every_eval_ever(results, **OPTIONS | options)


def test_command(tmp_path, capsys):
    CURVE.save(tmp_path / "curve.json")
    LOSS.save(tmp_path / "loss.json")
    files = [str(tmp_path / name) for name in ("curve.json", "loss.json")]
    options = ["--organization", "Lab", "--benchmark", "alice/curve", "--output", str(tmp_path / "out")]
    assert cli.main(["export", *files, *options]) == 0
    (record,) = tmp_path.glob("out/data/hf-longctx/alice/fox/*.json")
    assert "evaluation_timestamp" in json.loads(record.read_text())
    entries = yaml.safe_load((tmp_path / "out/.eval_results/hf-longctx.yaml").read_text())
    assert entries[0]["dataset"] == {"id": "alice/curve", "task_id": "fine_length"} and entries[0]["date"]
    assert capsys.readouterr().out.count("wrote ") == 2
    CURVE.with_settings(model="bob/fox").save(tmp_path / "loss.json")
    assert cli.main(["export", *files, *options]) == 2 and cli.main(["export", *files]) == 2
    errors = capsys.readouterr().err
    assert "several models: alice/fox, bob/fox" in errors and "say for whom: --organization NAME" in errors
