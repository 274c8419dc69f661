"""Which tokens were copied wrong: rows of bits, and where they are kept and drawn."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama

from hf_longctx import cli
from hf_longctx.metrics import CurvePoint, ForgettingCurve, forgetting_curve, read_result
from hf_longctx.metrics.curve.errors import pack, unpack
from hf_longctx.metrics.report.page import write_report


FOX = Path(__file__).resolve().parents[2] / "model_cards" / "fox-demo"


@pytest.mark.parametrize("scored", [1, 8, 1001])
def test_rows_come_back(scored):
    wrong = np.random.default_rng(scored).random((3, scored)) < 0.3
    assert (unpack(pack(wrong), scored) == wrong).all()
    for rows in (["0"], ["zz" * -(-scored // 8)], [3], ["00" * (scored // 8 + 2)]):
        with pytest.raises(ValueError, match="hexadecimal digits"):
            unpack(rows, scored)


def curve(wrong, **settings):
    rows = {2 * n: pack(w) for n, w in wrong.items()}
    points = [CurvePoint(2 * n, (n - w.sum(1)).tolist(), [0] * len(w)) for n, w in wrong.items()]
    return ForgettingCurve(points, settings, wrong=rows)


def test_a_file_keeps_them(tmp_path):
    wrong = {n: np.random.default_rng(n).random((4, n)) < 0.2 for n in (20, 45)}
    measured = curve(wrong)
    measured.save(tmp_path / "x.json")
    again = read_result(tmp_path / "x.json")
    assert again == measured and all((again.wrong_tokens(2 * n) == w).all() for n, w in wrong.items())
    assert "samples" not in ForgettingCurve(measured.points).document()
    document = json.loads(measured.to_json())
    document["samples"][0]["wrong"][0] = "ffffff"[:-1] + "0"
    with pytest.raises(ValueError, match=r"length 40: samples have \[20, .* wrong tokens, its counts"):
        ForgettingCurve.from_json(json.dumps(document))


@pytest.mark.parametrize("protocol", ["reference", "adaptive"])
def test_wrong_tokens_are_those_that_the_model_mistakes(protocol):
    model = tiny_llama()
    corpus = np.random.default_rng(0).integers(3, 31, 400)
    options = dict(lengths=[8, 24], repeats=5, bos_token_id=1, eos_token_id=2, protocol=protocol)
    measured = forgetting_curve(model, corpus, samples=True, **options)
    plain = forgetting_curve(model, corpus, **options)
    assert measured.points == plain.points and not plain.wrong and "samples" not in plain.settings
    for p in measured.points:
        for row, begin in zip(measured.wrong_tokens(p.length), p.begin_locs):
            target = corpus[begin : begin + p.length]
            ids = torch.tensor([[1, *target, 1, *target, 2]])
            with torch.no_grad():
                predicted = model(ids).logits[0].argmax(-1).numpy()
            end = 2 * p.length + 1
            assert (row == (predicted[end - len(row) : end] != target[-len(row) :])).all()


def test_the_page_and_the_command_show_where(tmp_path, words, request):
    wrong = {20: np.zeros((4, 20), bool), 45: np.tile(np.arange(45) >= 40, (4, 1))}
    measured = curve(wrong, model="fox")
    shown = words(measured.more_pictures()["errors"])
    assert "Copying errors of fox" in shown and " 100 " in shown and "tokens copied wrong" in shown
    request.getfixturevalue("undrawn")
    write_report([measured], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("<img") == 2
    text = tmp_path / "text.txt"
    text.write_text("A fox met 13 hens, and 17 geese, and asked for the way to the sea. " * 60)
    options = f"--text {text} --lengths 8,16 --repeats 2 --samples --output {tmp_path}/fox"
    assert cli.main(["curve", str(FOX), *options.split()]) == 0
    assert (tmp_path / "fox_errors.png").exists()
    assert read_result(tmp_path / "fox.json").wrong_tokens(16).shape == (2, 8)
