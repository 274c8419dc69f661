"""Results of several models in one figure and in one table."""

from pathlib import Path

import pytest
from examples import answers, curve


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics import ForgettingCurve, LineRetrieval, PositionLoss, comparison_table
from hf_longctx.metrics.report.comparison import compare, differences, named, plot_comparison
from hf_longctx.metrics.tasks.lines import LinesPoint


LENGTHS = (80, 640, 5120)
CURVES = {
    "long": curve(1, (1, 0.25), (1, 0.25), lengths=LENGTHS, data_type="random"),
    "fades | early": curve(1, (0.5, 0.25), (0.25, 0.25), lengths=LENGTHS, data_type="order"),
    "nothing": curve((0.5, 0.5), (0.25, 0.25), lengths=LENGTHS[:2]),
}


@pytest.mark.parametrize(
    "lengths, scale", [((80, 640, 5120), "log"), ((80, 640, 1200), "linear")], ids=["geometric grid", "linear grid"]
)
def test_a_curve_is_a_line_with_its_guesses_and_its_training_context(figures, lengths, scale):
    faded = curve(1, (0.5, 0.25), 0, lengths=lengths, train_length=1283)
    plot_comparison({"a": faded, "b": CURVES["long"]}, "unused")
    (axes,) = figures[0].axes
    assert axes.get_xscale() == scale
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    assert drawn[:2] == [([*lengths], [1, 0.5, 0]), ([*lengths], [0, 0.25, 0])]
    assert drawn[2][0] == [640, 640] and len(drawn) == 5, "at (train_length - 3) / 2"


def test_names_hold_no_mathematics(words):
    """Those that matplotlib could not parse stopped pictures, pages and the Space."""
    name = "a$x_{$b"
    measured = curve(1, 1, 1, model=name, data_type=name)
    assert name in words(plot_comparison, {name: measured, "other": CURVES["long"]})
    assert name in words(compare, {name: PositionLoss.of_mean([1.0] * 3, 2)})
    assert name in words(type(measured).plot, measured)


def test_table():
    curves = CURVES | {"long": CURVES["long"].with_settings(train_length=1283, bytes_per_token=4.21)}
    header, _, *rows = comparison_table(curves).splitlines()
    assert "| fine, 95 % CI | coarse, 95 % CI | paper's fine, coarse | effective (85 % copied) |" in header
    assert rows[0] == (
        "| long | random | at least 5,120 | at least 5,120 | >5120, >5120 | 5120; at least 5,120 | 80 to 5120 | 1283 "
        "| 4.21 |"
    )
    assert rows[1].startswith(r"| fades \| early | order | 80 to 640 | 640 to 5,120 | 80, 640 | 80; 80 to below 640 |")
    assert rows[2].startswith("| nothing | - | below 80 | below 80 | 0, 0 | 0; below 80 |")


SETTINGS = dict(
    lengths=LENGTHS,
    data_type="order",
    corpus="PG-19",
    tokenizer="hub/one",
    protocol="reference",
    corpus_sha256="ab" * 32,
)


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, []),
        ({"data_type": "random", "corpus": "my.txt"}, ["data (order, random)", "texts (PG-19, my.txt)"]),
        ({"corpus": None, "corpus_sha256": "cd" * 32}, ["texts (PG-19, cdcdcdcd)"]),
        ({"tokenizer": "hub/two"}, []),  # of the same tokens
        (
            {"tokenizer": "hub/two", "corpus_sha256": "cd" * 32},
            ["tokenizers with tokens of different sizes (one, two)"],
        ),
        ({"protocol": "adaptive", "repeats": 3}, ["protocols (reference, adaptive)", "repeats (10, 3)"]),
        ({"lengths": (80, 640, 600_000), "seed": 3}, ["longest lengths (5120, 600000)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_not_alike_are_named(tmp_path, change, words):
    curves = {"one": curve(1, 1, 1, **SETTINGS), "two": curve(1, 1, 1, **SETTINGS | change)}
    assert differences(curves) == words
    assert compare(curves, tmp_path / "x.md").count("Different: ") == len(words)


def test_losses_of_several_lengths_are_named(tmp_path, words):
    losses = {"one": PositionLoss.of_mean([1.0] * 3, 2), "two": PositionLoss.of_mean([1.0] * 4, 2)}
    assert "different: context lengths (3, 4)" in words(compare, losses)
    text = compare(losses, tmp_path / "losses.md")
    assert "Different: context lengths (3, 4)." in text and "| two | 1.000 | 1.000 | 2.72 | 4 | 2 |" in text


def test_each_model_is_tested_against_the_first(tmp_path):
    settings = {"lengths": (400, 800), "repeats": 8, "data_type": "order", "corpus_sha256": "ab"}
    curves = {"a": curve(0.5, 0.5, **settings), "b": curve(1, 1, **settings)}
    text = compare(curves | {"other": curve(1, 1, lengths=(400, 800))}, tmp_path / "x.md")
    assert text.startswith("b copies further than a: its fine length is larger, significant. ")
    assert "| tokens | a | b | difference | 95 % CI | p | p (Holm) | pairs |" in text
    assert "| 400 | 50.0% | 100.0% | +50.0% | +49.9% to +50.1% | 0.0078 | 0.016 | 8 |" in text
    assert "| mean | 50.0% | 100.0% |" in text
    assert "other copies further than a: its fine length is larger, significant." in text.partition("\n|")[0]
    assert (
        "Not tested length by length, other against a: the differences cannot be paired: a corpus without a hash may be"
        in text
    )


def test_two_tokenizers_are_compared_in_bytes(tmp_path):
    """As many tokens are more text where tokens are longer."""
    lengths = (64, 128, 256)

    def measured(name, size, fails):
        settings = {"tokenizer": name, "corpus_sha256": name, "data_type": "order", "bytes_per_token": size}
        return curve(*(n < fails for n in lengths), lengths=lengths, **settings)

    small, large, both = measured("a", 2.0, 256), measured("b", 4.5, 256), measured("b", 4.5, 1000)
    text = compare({"small": small, "large": large}, tmp_path / "x.md")
    assert text.startswith("large copies further than small: its fine length is larger in bytes, significant.")
    text = compare({"a": both, "b": measured("a", 2.0, 1000)}, tmp_path / "x.md")
    assert text.startswith("Neither a nor b copies significantly further than the other.")


def lines(right):
    return LineRetrieval.of_parts([LinesPoint(answers(*r), n, [9 * n] * 7, [0] * 7) for n, r in right], {"seed": 0})


def test_retrieval_is_compared_too(tmp_path, words):
    results = {"a": lines([(4, [True] * 7), (64, [False] * 7)]), "b": lines([(64, [True] * 7)])}
    text = compare(results, tmp_path / "x.md")
    assert "| model | 4 lines | 64 lines |" in text and "| b | - | 100.0% |" in text
    assert "b answers more than a at 1 of 1 lengths, 64 lines, significant." in text
    assert "length of the prompt (lines)" in words(compare, results)
    with pytest.raises(ValueError, match="must contain measurements, got none from b"):
        compare(results | {"b": LineRetrieval.of_parts([])}, tmp_path / "x.md")


def test_curves_are_named_by_model_then_file():
    def curve(model):
        return ForgettingCurve.of_points([], {"model": model} if model else {})

    files = [(Path("a/x.json"), curve("fox")), (Path("b/x.json"), curve("fox")), (Path("y.json"), curve("llama"))]
    assert list(named(files)) == ["fox (x)", "fox (x)'", "llama"]
    folders = [(Path("a.json"), curve("m/llama")), (Path("b.json"), curve("someone/fox"))]
    assert list(named(folders)) == ["llama", "fox"]
    assert list(named([(Path("results/my_fox.json"), curve(None))])) == ["my_fox"]
