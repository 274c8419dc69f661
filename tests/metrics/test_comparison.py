"""Results of several models in one figure and in one table."""

from pathlib import Path

import pytest
from examples import answers, curve, step_curve


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics import CurvePoint, ForgettingCurve, LineRetrieval, PositionLoss, comparison_table, style
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
    """Names that matplotlib could not parse stopped figures, pages and the Space."""
    name = "a$x_{$b"
    measured = curve(1, 1, 1, model=name, data_type=name)
    assert name in words(plot_comparison, {name: measured, "other": CURVES["long"]})
    assert name in words(compare, {name: PositionLoss.of_mean([1.0] * 3, 2)})
    assert name in words(type(measured).plot, measured)


def test_table():
    curves = CURVES | {"long": CURVES["long"].with_settings(train_length=1283, bytes_per_token=4.21)}
    header, _, *rows = comparison_table(curves).splitlines()
    assert "| fine, 95 % CI | coarse, 95 % CI | paper's fine, coarse | measured |" in header
    assert rows[0] == ("| long | random | at least 5,120 | at least 5,120 | >5120, >5120 | 80 to 5120 | 1283 | 4.21 |")
    assert rows[1].startswith(r"| fades \| early | order | 80 to 640 | 640 to 5,120 | 80, 640 | 80 to 5120 |")
    assert rows[2].startswith("| nothing | - | below 80 | below 80 | 0, 0 | 80 to 640 |")


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
        ({"tokenizer": "hub/two"}, []),  # the tokens are the same
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
    settings |= {"tokenizer_sha256": "12"}
    curves = {"a": curve(0.5, 0.5, **settings), "b": curve(1, 1, **settings)}
    text = compare(curves | {"other": curve(1, 1, lengths=(400, 800), tokenizer_sha256="12")}, tmp_path / "x.md")
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
    """An equal number of longer tokens is a longer document."""
    lengths = (64, 128, 256)

    def measured(name, size, fails):
        settings = {"tokenizer": name, "corpus_sha256": name, "data_type": "order", "bytes_per_token": size}
        return curve(*(n < fails for n in lengths), lengths=lengths, **settings)

    small, large, both = measured("a", 2.0, 256), measured("b", 4.5, 256), measured("b", 4.5, 1000)
    text = compare({"small": small, "large": large}, tmp_path / "x.md")
    assert text.startswith("large copies further than small: its fine length is larger in bytes, significant.")
    assert "| 95 % CI | 95 % CI in bytes | tested |" in text and "| fine in bytes | coarse in bytes |" in text
    text = compare({"a": both, "b": measured("a", 2.0, 1000)}, tmp_path / "x.md")
    assert text.startswith(
        "Neither a nor b copies significantly further than the other. Both copied the longest length: measure longer ones. "
        "Fine length in bytes (95 % CI): a at least 1,152, b at least 512. "
    )


SAME_NAME = {"tokenizer": "model", "data_type": "order"}


@pytest.mark.parametrize(
    "one, other, words",
    [
        (
            {"tokenizer_sha256": "12"},
            {"tokenizer_sha256": "34"},
            "b copies further than a: its fine length is larger in bytes",
        ),
        (
            {"corpus_sha256": "ab"},
            {"corpus_sha256": "cd"},
            "b copies further than a: its fine length is larger in bytes",
        ),
        ({}, {}, "b copies further than a: its fine length is larger in bytes"),
        ({"tokenizer_sha256": "12"}, {}, "b copies further than a: its fine length is larger in bytes"),
        (
            {"tokenizer_sha256": "12"},
            {"tokenizer_sha256": "12"},
            "a copies further than b: its fine length is larger, ",
        ),
        ({"corpus_sha256": "ab"}, {"corpus_sha256": "ab"}, "a copies further than b: its fine length is larger, "),
    ],
    ids=lambda value: "-".join(value.values()) or "none" if isinstance(value, dict) else "",
)
def test_a_name_does_not_make_two_tokenizers_one(tmp_path, one, other, words):
    """a copies 128 tokens of 4.3 bytes, and b copies 64 tokens of 20 bytes."""
    sizes = {"bytes_per_token": 4.3}, {"bytes_per_token": 20.0}
    a, b = (
        step_curve(fine, lengths=(64, 128, 256), **SAME_NAME, **size, **settings)
        for fine, size, settings in ((128, sizes[0], one), (64, sizes[1], other))
    )
    assert compare({"a": a, "b": b}, tmp_path / "x.md").startswith(words)


def test_lengths_in_unknown_units_are_not_compared(tmp_path):
    a, b = (step_curve(fine, lengths=(64, 128, 256), **SAME_NAME) for fine in (128, 64))
    text = compare({"a": a, "b": b}, tmp_path / "x.md")
    assert text.startswith("The lengths of a and b cannot be compared: their tokenizers may be different")
    assert "further" not in text


@pytest.mark.parametrize(
    "one, other, words",
    [
        ({"tokenizer_sha256": "12"}, {"tokenizer_sha256": "34"}, ["tokenizers with tokens of different sizes (model 12, model 34)"]),
        ({"corpus_sha256": "ab"}, {"corpus_sha256": "cd"}, ["texts or tokenizers (book.txt ab, book.txt cd)"]),
        (
            {"corpus_sha256": "ab", "tokenizer_sha256": "12"},
            {"corpus_sha256": "cd", "tokenizer_sha256": "12", "tokenizer": "other"},
            ["texts (book.txt ab, book.txt cd)"],
        ),
        ({"tokenizer_sha256": "12"}, {"tokenizer_sha256": "12", "tokenizer": "other"}, []),
    ],
)  # fmt: skip
def test_hashes_show_what_names_hide(one, other, words):
    curves = {name: curve(1, 1, 1, **SAME_NAME | {"corpus": "book.txt"} | s) for name, s in (("a", one), ("b", other))}
    assert differences(curves) == words


def test_losses_and_needles_with_other_tokens_are_printed_with_their_bytes(tmp_path):
    sizes = {"a": {"bytes_per_token": 2.0, "tokenizer_sha256": "12"}, "b": {"bytes_per_token": 4.5}}
    losses = {name: PositionLoss.of_mean([1.0] * 4, 2, settings) for name, settings in sizes.items()}
    text = compare(losses, tmp_path / "losses.md")
    assert "| tokens | bytes | sequences |" in text and "| 4 | 18 | 2 |" in text
    results = {
        name: LineRetrieval.of_parts([LinesPoint(answers(*[True] * 40), 4, [36] * 40, [0] * 40)], settings)
        for name, settings in sizes.items()
    }
    text = compare(results, tmp_path / "lines.md")
    assert (
        "| b | 100.0% | 4.5 |" in text and "| b | ours | 85.0% | 36 | at least 36 | at least 162 | 36 to 36 |" in text
    )


def test_the_axis_of_different_tokens_is_in_bytes(figures):
    sizes = {"a": {"bytes_per_token": 2.0, "tokenizer_sha256": "12"}, "b": {"bytes_per_token": 4.5}}
    plot_comparison({name: curve(1, 1, 1, lengths=LENGTHS, **s) for name, s in sizes.items()}, "unused")
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "length of the passage to copy (bytes)"
    assert list(axes.get_lines()[2].get_xdata()) == [360, 2880, 23040]


def test_the_number_of_needed_samples_replaces_unknown_rows(tmp_path):
    """Six perfect passages at each of two lengths: the sign test needs seven for an error rate of 1.25 %."""
    curves = {name: curve(1, 1, lengths=(64, 128), repeats=6, tokenizer_sha256="12") for name in ("a", "b")}
    text = compare(curves, tmp_path / "x.md")
    assert "| a | RULER" not in text and "unknown: more answers are needed" not in text
    assert (
        "The effective length of a is unknown from 6 samples per length. Needed at the same shares, by rule: ours: 7, "
        "RULER: 7, NoLiMa: 8." in text
    )


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


def of_cache(cache, copied, tokens=250, cache_bytes=None, **settings):
    """Return a curve of 250 tokens, all scored, with a repeat for each count of copied tokens."""
    sizes = {"cache_tokens": tokens + 1, "cache_bytes": cache_bytes} if cache_bytes else {}
    point = CurvePoint(tokens, copied, [0] * len(copied), range(0, 300 * len(copied), 300), whole=cache is not None)
    settings = SAME | {"cache": cache} | sizes | settings
    return ForgettingCurve.of_points([point], {name: value for name, value in settings.items() if value is not None})


SAME = {"model": "some/smollm", "data_type": "order", "corpus_sha256": "c", "weights_sha256": "w"}
FULL = of_cache("full", [245, 246, 247, 244, 248, 245], cache_bytes=1000)
QUANTIZED = of_cache("quantized:4", [239, 240, 242, 237, 243, 241], cache_bytes=156)


def test_a_comparison_says_what_a_cache_forgets(tmp_path):
    few = of_cache("window:50", [50, 51], cache_bytes=200)
    results = named([(Path(f"{i}.json"), result) for i, result in enumerate((FULL, QUANTIZED, few))])
    assert [*results] == ["full", "quantized:4", "window:50"]
    text = compare(results, tmp_path / "table.md")
    lost, far, *_ = text.split("\n\n")
    assert lost.startswith(
        "quantized:4 forgets 2.2 points of 250 tokens (95 % CI 1.6 to 2.8), with 16 % of the bytes. "
    )
    assert lost.endswith("full copies more than quantized:4 at 1 of 1 lengths, 250 tokens, significant.")
    assert "window:50 forgets 78.0 points of 250 tokens (6 repeats are needed for a 95 % CI), with 20 % of" in far
    assert "caches (full, quantized:4, window:50)" in text
    back = compare({"quantized:4": QUANTIZED, "full": FULL}, tmp_path / "table.md")
    assert back.startswith(
        "full retains 2.2 points more than quantized:4 of 250 tokens (95 % CI 1.6 to 2.8), with 641 %"
    )


def test_a_size_is_compared_with_the_cache_of_the_same_context(tmp_path):
    longer = of_cache("quantized:4", [239] * 6, cache_bytes=156, cache_tokens=501)
    assert "(95 % CI" in compare({"a": FULL, "b": longer}, tmp_path / "table.md")
    assert "of the bytes" not in compare({"a": FULL, "b": longer}, tmp_path / "table.md")
    other = of_cache("quantized:4", [239] * 6, cache_bytes=156, weights_sha256="x")
    assert "forgets" not in compare({"a": FULL, "b": other}, tmp_path / "table.md")


def test_curves_that_score_other_tokens_are_not_compared(tmp_path):
    """The second half of a passage is complete in a cache of the newest half."""
    plain = of_cache(None, [120] * 6)
    text = compare(named([(Path("full.json"), plain), (Path("a.json"), QUANTIZED)]), tmp_path / "table.md")
    assert text.startswith("full and quantized:4 cannot be compared: one result scores all tokens of a passage")
    assert "Measure the full cache with --cache full" in text and "forgets" not in text and "copies" not in text
    assert "Different: caches (full, quantized:4)." in text
    assert "Different: scored tokens (second half, all)." in text


def test_what_lines_lose_is_compared_without_another_run_of_the_full_cache(tmp_path):
    point = [LinesPoint(answers(*right), 5, [90] * 8, [0] * 8) for right in ([True] * 8, [True] + [False] * 7)]
    full, window = (LineRetrieval.of_parts([p], SAME | {"seed": 0}) for p in point)
    results = named([(Path("x"), full), (Path("y"), window.with_settings(cache="window:9"))])
    assert [*results] == ["full", "window:9"]
    text = compare(results, tmp_path / "table.md")
    assert text.startswith("window:9 forgets 87.5 points of 5 lines (95 % CI ")
    assert "Line retrieval of smollm, window:9" in style.heading(results["window:9"]).replace("some/", "")
    mixed = named([(Path("x"), full.with_settings(model="other")), (Path("y"), results["window:9"])])
    assert [*mixed] == ["other", "smollm, window:9"]
