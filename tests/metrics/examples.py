"""A small result of each kind."""

from transformers import LlamaConfig

from hf_longctx.metrics import CurvePoint, ForgettingCurve, LineRetrieval, NeedleGrid, PositionLoss, rope_report
from hf_longctx.metrics.retrieval.answers import Answer
from hf_longctx.metrics.tasks.lines import LinesPoint
from hf_longctx.metrics.tasks.needle import NeedleCell


def answers(*right, reply=None):
    """Return answers of three tokens, each with a probability of 1/e."""
    return [Answer(-1.0, 3, r, reply, r) for r in right]


def lines(right, lines=5, tokens=90, asked=0, **settings):
    """Line retrieval with this many lines."""
    each = [tokens] * len(right), [asked] * len(right)
    return LineRetrieval.of_parts([LinesPoint(answers(*right), lines, *each)], settings)


def curve(*accuracies, lengths=(400, 800, 1600), repeats=10, **settings):
    """Return a curve whose repeats all have these copy accuracies, or pairs of copy and LM accuracies."""
    points = []
    for n, accuracy in zip(lengths, accuracies, strict=True):
        copy, lm = accuracy if isinstance(accuracy, tuple) else (accuracy, 0)
        points.append(CurvePoint(n, [round(copy * n / 2)] * repeats, [round(lm * n / 2)] * repeats))
    return ForgettingCurve.of_points(points, settings)


def step_curve(fine, lengths=(100, 200, 400, 600, 800), **options):
    """Return a curve that copies exactly up to `fine` tokens, and half of the tokens beyond."""
    return curve(*(1 if n <= fine else 0.5 for n in lengths), lengths=lengths, **options)


SMALL_CURVE = ForgettingCurve.of_points(
    [
        CurvePoint(18, [9, 9], [0, 1], [33, 1]),
        CurvePoint(20, [4, 5], [1, 0], [2, 39]),
        CurvePoint(40, [1, 0], [0, 1]),
    ],
    {"model": "some/folder/tiny", "seed": 7, "data_type": "order", "dtype": "float32"},
)


def one_of_each(model="someone/fox", reply="7"):
    """Return a curve, a loss, a needle, lines and a RoPE bound."""
    settings = {"model": model, "seed": 0}
    found = [Answer(log_prob=-1.5, tokens=4, exact=False, reply=reply, matched=True)]
    return [
        ForgettingCurve.of_points([CurvePoint(800, [400] * 6, [1, 0, 1] * 2, range(0, 6000, 1000))], settings),
        PositionLoss.of_mean([3.0, 2.5], 4, settings),
        NeedleGrid.of_parts([NeedleCell(found, 100, 0.5, [40])], settings),
        LineRetrieval.of_parts([LinesPoint(found, 10, [200], [3])], settings),
        rope_report(LlamaConfig(max_position_embeddings=512, name_or_path=model), minimum_base=False),
    ]
