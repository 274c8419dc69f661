"""Mistakes with measured and saved results: each row raises one clear error, or is harmless."""

import json

import numpy as np
import pytest
from mistakes import harmless, refused

from hf_longctx.metrics import (
    CurvePoint,
    ForgettingCurve,
    PositionLoss,
    comparison_table,
    read_result,
)


POINTS = [CurvePoint(100, [50] * 3, [1] * 3), CurvePoint(200, [100] * 3, [1] * 3)]
CURVE = ForgettingCurve.of_points(POINTS, {"model": "fox"})


def counts(copy, lm=(0, 0), length=8, begins=None):
    return lambda: CurvePoint(length, copy, lm, begins)


def curve_text(**change):
    """Return the JSON of a curve with changes in its first point."""
    document = json.loads(CURVE.to_json())
    document["scores"][0][1] |= change
    return json.dumps(document)


MEASURED = [
    refused("length 0", counts([0], [0], length=0), "length must be at least 1, got 0"),
    refused("more right than scored", counts([5, 4]), "copy_correct at length 8 must be at most 4, got 5"),
    refused("negative count", counts([4, 4], [0, -1]), "lm_correct at length 8"),
    refused("another number of LM counts", counts([4, 4], [0]), "2 copy counts, 1 LM counts"),
    refused("another number of begins", counts([4, 4], begins=[3]), r"one entry per repeat.*begin_locs=\(3,\)"),
    refused(
        "a length twice",
        lambda: ForgettingCurve.of_points([POINTS[0], POINTS[0]]),
        "got two of length 100",
    ),
    refused("loss of no position", lambda: PositionLoss.of_mean([], 1), "loss must be one finite number"),
    refused("no sequences", lambda: PositionLoss.of_mean([3.0], 0), "sequences must be at least 1, got 0"),
    refused(
        "error of fewer positions",
        lambda: PositionLoss.of_mean([3.0, 2.0], 2, {}, [0.1]),
        "`error` must contain 2 non-negative",
    ),
    refused("negative error", lambda: PositionLoss.of_mean([3.0], 2, {}, [-0.1]), "non-negative numbers"),
    harmless("counts of NumPy", lambda: (CurvePoint(8, np.array([4]), np.array([1])).copy_correct, (4,))),
    harmless(
        "points out of order", lambda: ([p.length for p in ForgettingCurve.of_points(POINTS[::-1]).points], [100, 200])
    ),
]

ARGUMENTS = [
    refused("misspelt reading", lambda: CURVE.interval("Fine"), "one of .*'fine', 'coarse'.*'Fine'"),
    refused("confidence in per cent", lambda: CURVE.interval("fine", 95), "between 0 and 1, got 95"),
    refused("unknown protocol", lambda: CURVE.with_settings(protocol="fast").interval("fine"), "protocol must be"),
    refused(
        "table of an empty curve",
        lambda: comparison_table({"fox": ForgettingCurve.of_points([])}),
        "got none from fox",
    ),
]


def saved(name, text, says):
    """Return a row for `read_result` of a file with this text."""

    def read(folder):
        (folder / "result.json").write_text(text)
        return read_result(folder / "result.json")

    return refused(name, read, f"result.json is not a result file of hf-longctx: .*({says})")


KINDS = '"metric" must be one of forgetting_curve, lines, needle'
TEXT = '{"metric": "%s", "format": 2, "settings": {}, "missing": [], "scores": [%s]}'
OLD = '{"metric": "forgetting_curve", "format": 1, "settings": {}, "points": []}'
FILES = [
    saved("empty file", "", "Expecting value"),
    saved("result of lm-eval", '{"results": {"arc": {"acc": 1}}}', KINDS),
    saved("newer format", CURVE.to_json().replace('"format": 2', '"format": 9'), "must be 2, got 9"),
    saved("older format", OLD, "format of a forgetting_curve result must be 2, got 1. Read it with the version"),
    saved("count above the scored tokens", curve_text(copy=[999] * 3), "copy_correct at length 100"),
    saved(
        "loss without sequences", TEXT % ("position_loss", '["mean", {"loss": [1.0]}]'), "lacks the field 'sequences'"
    ),
    saved(
        "loss with NaN",
        TEXT % ("position_loss", '["mean", {"loss": [NaN], "sequences": 1, "texts": 1, "error": null}]'),
        "finite number",
    ),
    saved("cell without answers", TEXT % ("needle", '[[100, 0.5], {"positions": [3]}]'), "lacks the field 'answers'"),
    refused("curve for a loss", lambda _: PositionLoss.from_json(CURVE.to_json()), "not a result of position_loss"),
]


def compared(results, name="x.png"):
    from hf_longctx.metrics.report.comparison import compare

    return lambda folder: compare(results, folder / name)


def pictures():
    return [
        refused(
            "picture of no curve",
            lambda folder: ForgettingCurve.of_points([]).plot(folder / "x.png"),
            "nothing was measured",
        ),
        refused("comparison of nothing", compared({}), "must be from one metric .*got none"),
    ]


@pytest.mark.parametrize("mistake", MEASURED + ARGUMENTS, ids=str)
def test_results(mistake):
    mistake.check()


@pytest.mark.parametrize("mistake", FILES, ids=str)
def test_files(mistake, tmp_path):
    mistake.check(tmp_path)


@pytest.mark.parametrize("mistake", pictures(), ids=str)
def test_pictures(mistake, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")
    mistake.check(tmp_path)
