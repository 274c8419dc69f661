"""The snippet for a model card is what huggingface_hub reads."""

import pytest
import yaml
from examples import one_of_each
from huggingface_hub import ModelCard

from hf_longctx.metrics import CurvePoint, ForgettingCurve
from hf_longctx.metrics.report.card import card_snippet, eval_results


CURVE = ForgettingCurve.of_points(
    [CurvePoint(800, [400] * 2, [1, 0]), CurvePoint(1600, [600] * 2, [1, 0])],
    {"seed": 5, "repeats": 2, "corpus": "PG 19: test"},
)
_, LOSS, *RETRIEVALS, ROPE = one_of_each()
RESULTS = [CURVE, ForgettingCurve.of_points(CURVE.points, {"data_type": "random"}), LOSS, *RETRIEVALS]


def test_the_hub_reads_what_we_wrote():
    text = card_snippet("fox: a 'model'", [*RESULTS, ROPE], picture="curve.png")
    card = ModelCard(text, ignore_metadata_errors=False)
    assert card.data.model_name == "fox: a 'model'"
    entries = {(e.dataset_name, e.metric_name): (e.metric_type, e.metric_value) for e in card.data.eval_results}
    assert entries == {
        ("PG 19: test", "coarse memory length, at least (tokens, 95 % sure)"): ("forgetting_curve", 1600),
        ("random tokens", "coarse memory length, at least (tokens, 95 % sure)"): ("forgetting_curve", 1600),
        ("text", "perplexity of 2 tokens"): ("perplexity", round(float(LOSS.perplexity[-1]), 4)),
        ("text", "needle in a haystack, found: 100 tokens"): ("accuracy", 1.0),
        ("generated records", "line retrieval, found: 10 lines"): ("accuracy", 1.0),
    }
    assert "![How far fox: a 'model' remembers](curve.png)" in card.text
    assert "RoPE bound: " in card.text and "at 512 tokens" in card.text


def test_arguments_are_kept():
    assert [entry.metric_args for entry in eval_results([CURVE])] == [{"seed": 5, "repeats": 2}]
    header = card_snippet("fox", [CURVE]).split("---")[1]
    (index,) = yaml.safe_load(header)["model-index"]
    assert index["results"][0]["dataset"] == {"name": "PG 19: test", "type": "pg-19-test"}


def test_nothing_to_say():
    with pytest.raises(ValueError, match="without a number for a model card"):
        card_snippet("fox", [ForgettingCurve.of_points([])])


EVIL = 'fox"><script>alert(1)</script>\n---\nlicense: [x](y) `z` **'


def test_a_name_cannot_end_the_header_or_become_markup():
    curve = ForgettingCurve.of_points(CURVE.points, {"corpus": EVIL})
    text = card_snippet(EVIL, [curve, ROPE], picture="curve.png")
    card = ModelCard(text, ignore_metadata_errors=False)
    assert card.data.model_name == " ".join(EVIL.split()) and "license" not in card.data.to_dict()
    html = pytest.importorskip("markdown_it").MarkdownIt("commonmark").render(card.text)
    assert "<script" not in html and "<code" not in html and "<a " not in html and html.count("<img") == 1
    assert "\n---\n" not in card.text and "max\\_position\\_embeddings" in card.text
