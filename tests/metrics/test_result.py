"""The common behaviour of all results: texts, files, and their entries in a report."""

import json
import subprocess
from datetime import UTC, datetime

import pytest
from examples import one_of_each

from hf_longctx.metrics import CurvePoint, ForgettingCurve, LineRetrieval, NeedleGrid, PositionLoss
from hf_longctx.metrics.read import read_result
from hf_longctx.metrics.report.card import eval_results
from hf_longctx.metrics.result import Number, Result, commit


*EXAMPLES, ROPE = one_of_each()


@pytest.mark.parametrize("result", [*EXAMPLES, ROPE], ids=lambda result: type(result).__name__)
def test_saved_results(result, tmp_path):
    result.save(tmp_path / "result.json")
    again = read_result(tmp_path / "result.json")
    assert again == result and again.to_json() == result.to_json() and str(again) == str(result)
    assert Result.kinds[result.kind] is type(result)


def test_a_model_is_named_as_on_the_hub_or_by_its_folder():
    names = {"someone/fox": "someone/fox", "/data/models/fox/": "fox", "fox": "fox", None: "a model"}
    for model, name in names.items():
        assert ForgettingCurve.of_points([], {"model": model}).model_name == name


LENGTHS = "1 length, 6 repeats; the paper's, of means: >800"
FAR = "at least 800 (95 % CI; the longest tested)"
NUMBERS = [
    [
        *(
            ("forgetting_curve", f"{name}, at least (tokens, 95 % CI)", 800, FAR, LENGTHS)
            for name in ("fine memory length of the typical passage", "coarse memory length")
        ),
        ("", "share of passages copied above 99 %", 1.0, "6 of 6, the worst to 100.0%", "800 tokens"),
    ],
    [
        ("perplexity", "perplexity of 2 tokens", 15.6426, "", "4 sequences"),
        ("", "loss at 2 tokens, nats", 2.5, "", "4 sequences"),
    ],
    [("accuracy", "needle in a haystack, found: 100 tokens", 1.0, "", "1 question")],
    [("accuracy", "line retrieval, found: 10 lines", 1.0, "", "1 question")],
]


@pytest.mark.parametrize("result, numbers", list(zip(EXAMPLES, NUMBERS)), ids=[result.kind for result in EXAMPLES])
def test_what_a_report_says(result, numbers):
    assert result.measured and result.title and result.summary() and result.explanation()
    assert [(n.metric, n.name, n.value, n.interval(), n.sample) for n in result.numbers()] == numbers
    assert result.passed is None and not result.notes
    columns, rows = result.table()
    assert rows and all(len(row) == len(columns) for row in rows)


def test_luck_is_no_memory_in_an_overview():
    curve = ForgettingCurve.of_points([CurvePoint(54, [0, 0, 1] * 2, [0] * 6), CurvePoint(108, [0] * 6, [0] * 6)])
    fine, coarse, copied = curve.numbers()
    sample = "2 lengths, 6 repeats; the paper's, of means: "
    assert (fine.metric, fine.value, fine.words, fine.sample) == ("", 0, "below 54 (95 % CI)", sample + "0")
    assert (coarse.value, coarse.words, coarse.sample) == (0, "below 108 (95 % CI)", sample + "54")
    assert (copied.value, copied.words, copied.sample) == (0, "0 of 6, the worst to 0.0%", "54 tokens")


def test_the_interval_of_a_loss():
    """Student's t of few sequences; of many, 1.96 standard errors to each side."""
    assert PositionLoss.of_mean([3.0], 4).numbers()[1].interval() == ""
    intervals = {n: PositionLoss.of_mean([3.0], n, {}, [0.1]).numbers()[1].interval() for n in (2, 4, 1000)}
    assert intervals == {2: "1.729 to 4.271", 4: "2.682 to 3.318", 1000: "2.804 to 3.196"}


def test_what_a_report_says_of_a_rope_base():
    report = ROPE
    assert report.summary() == "holds at 512 tokens (max_position_embeddings): up to distance 511"
    assert report.numbers() == [Number("", "at 512 tokens", "holds", sample="B_m < 0 at 0 of 512 distances")]
    assert report.passed and report.caveat
    assert report.settings["claimed_context"] == 512
    assert report.table().rows[0][-1] == "holds" and report.table().rows[0][3] == "up to m = 511"


def test_what_is_not_measured_has_no_number():
    for result in (ForgettingCurve.of_points([]), NeedleGrid.of_parts([]), LineRetrieval.of_parts([])):
        assert not result.measured and result.numbers() == [] == result.table().rows


def test_a_dataset_has_a_name_and_an_identifier():
    assert ForgettingCurve.of_points([], {"corpus": "My Text, 2nd"}).dataset() == ("My Text, 2nd", "my-text-2nd")
    assert ForgettingCurve.of_points([], {"data_type": "random"}).dataset() == ("random tokens", "random-tokens")
    assert LineRetrieval.of_parts([]).dataset() == ("generated records", "line-retrieval")
    entry = eval_results([EXAMPLES[0].with_settings(corpus="My Text, 2nd")])[0]
    assert (entry.dataset_name, entry.dataset_type, entry.metric_args) == ("My Text, 2nd", "my-text-2nd", {"seed": 0})


# ---------------------------------------------------------------------------------------------------------------------
# Files


def git(folder, *arguments):
    identity = ["-c", "user.name=Fox", "-c", "user.email=fox@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_a_saved_result_has_its_time_and_reads_the_same(tmp_path):
    curve = ForgettingCurve.of_points([], {"seed": 3})
    before = datetime.now(UTC).replace(microsecond=0)
    curve.save(tmp_path / "curve.json")
    document = json.loads((tmp_path / "curve.json").read_text())
    assert before <= datetime.fromisoformat(document["saved"]["time"]) <= datetime.now(UTC)
    assert "saved" not in curve.to_json()
    assert ForgettingCurve.from_json((tmp_path / "curve.json").read_text()) == curve
    assert [path.name for path in tmp_path.iterdir()] == ["curve.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(PositionLoss, "to_json", lambda self: self.settings["text"])
    PositionLoss.of_mean([1.0], 1, {"text": '{"x": 1}'}).save(tmp_path / "a.json")
    with pytest.raises(ValueError, match="JSON"):
        PositionLoss.of_mean([1.0], 1, {"text": '{"x": NaN}'}).save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["x"] == 1


def test_the_commit_is_that_of_a_checkout(tmp_path):
    (tmp_path / "file").write_text("one")
    (tmp_path / "model_cards").mkdir()
    (tmp_path / "model_cards" / "speed.json").write_text("{}")
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = commit(tmp_path)
    assert len(head) == 40 and int(head, 16)
    (tmp_path / "model_cards" / "speed.json").write_text("[]")
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{head}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") is None
