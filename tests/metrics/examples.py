"""A small result of each kind."""

from transformers import LlamaConfig

from hf_longctx.metrics import CurvePoint, ForgettingCurve, LineRetrieval, NeedleGrid, PositionLoss, rope_report
from hf_longctx.metrics.retrieval.answers import Answer
from hf_longctx.metrics.tasks.lines import LinesPoint
from hf_longctx.metrics.tasks.needle import NeedleCell


def answers(*right, reply=None):
    """Answers of three tokens, each with a probability of 1/e."""
    return [Answer(-1.0, 3, r, reply, r) for r in right]


def lines(right, lines=5, tokens=90, asked=0, **settings):
    """Line retrieval with this many lines."""
    each = [tokens] * len(right), [asked] * len(right)
    return LineRetrieval.of_parts([LinesPoint(answers(*right), lines, *each)], settings)


def one_of_each(model="someone/fox", reply="7"):
    """A curve, a loss, a needle, lines and a RoPE bound."""
    settings = {"model": model, "seed": 0}
    found = [Answer(log_prob=-1.5, tokens=4, exact=False, reply=reply, matched=True)]
    return [
        ForgettingCurve.of_points([CurvePoint(800, [400] * 6, [1, 0, 1] * 2, range(0, 6000, 1000))], settings),
        PositionLoss.of_mean([3.0, 2.5], 4, settings),
        NeedleGrid.of_parts([NeedleCell(found, 100, 0.5, [40])], settings),
        LineRetrieval.of_parts([LinesPoint(found, 10, [200], [3])], settings),
        rope_report(LlamaConfig(max_position_embeddings=512, name_or_path=model), minimum_base=False),
    ]
