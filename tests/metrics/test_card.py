"""Results as evaluations that huggingface_hub writes into a model card and reads again."""

from examples import one_of_each
from huggingface_hub import ModelCard, ModelCardData

from hf_longctx.metrics import CurvePoint, ForgettingCurve
from hf_longctx.metrics.report.card import eval_results


CURVE = ForgettingCurve.of_points(
    [CurvePoint(800, [400] * 2, [1, 0]), CurvePoint(1600, [600] * 2, [1, 0])],
    {"seed": 5, "repeats": 2, "corpus": "PG 19: test"},
)


def test_the_hub_reads_what_we_wrote():
    """All numbers with a name at the Hub; the RoPE bound and a curve without points have none."""
    _, loss, *others = one_of_each()
    random = ForgettingCurve.of_points(CURVE.points, {"data_type": "random"})
    written = eval_results([CURVE, random, loss, *others, ForgettingCurve.of_points([])])
    header = ModelCardData(model_name="fox: a 'model'", eval_results=written).to_yaml()
    card = ModelCard(f"---\n{header}\n---\n", ignore_metadata_errors=False)
    assert card.data.model_name == "fox: a 'model'"
    entries = {(e.dataset_name, e.metric_name): (e.metric_type, e.metric_value) for e in card.data.eval_results}
    assert entries == {
        ("PG 19: test", "coarse memory length, at least (tokens, 95 % CI)"): ("forgetting_curve", 1600),
        ("random tokens", "coarse memory length, at least (tokens, 95 % CI)"): ("forgetting_curve", 1600),
        ("text", "perplexity of 2 tokens"): ("perplexity", round(float(loss.perplexity[-1]), 4)),
        ("text", "needle in a haystack, found: 100 tokens"): ("accuracy", 1.0),
        ("generated records", "line retrieval, found: 10 lines"): ("accuracy", 1.0),
    }
    assert (written[0].metric_args, written[0].dataset_type) == ({"seed": 5, "repeats": 2}, "pg-19-test")
