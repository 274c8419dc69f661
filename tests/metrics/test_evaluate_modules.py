"""Our modules in the evaluate library: how they are found, what they take, what they return."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import LlamaConfig, LlamaForCausalLM


pytest.importorskip("evaluate", reason="needs evaluate: pip install 'hf-longctx[metrics]'")

import evaluate

from hf_longctx.metrics import ForgettingCurve, forgetting_curve, module_path, register, rope_base_bound, rope_report
from hf_longctx.metrics.evaluate_modules import NAMES, check_bases, score_predictions
from scripts.demo_tokenizer import train_tokenizer


TEXT = "In line {i} the {j} foxes of a village met, and {k} of them forgot. "
TEXT = "".join(TEXT.format(i=i, j=i * i % 97, k=i % 13) for i in range(60))


pytestmark = pytest.mark.usefixtures("evaluate_cache")


@pytest.fixture(scope="module")
def curve_module(evaluate_cache):
    return evaluate.load(module_path("forgetting_curve"))


@pytest.fixture(scope="module")
def rope_module(evaluate_cache):
    return evaluate.load(module_path("rope_base_check"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], 320)


# -- how they are found


def test_bare_names_and_older_lines_of_the_cache():
    files = register()
    old = files[0].parent.with_name("0" * 64) / files[0].name
    old.parent.mkdir()
    old.write_text("raise ImportError('a module of the past')\n")
    assert register() == files
    for name in NAMES:
        assert evaluate.load(name).name == evaluate.load(name, module_type="metric").name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_module_has_the_card_of_a_space(name):
    card = ModelCard.load(Path(module_path(name)) / "README.md", ignore_metadata_errors=False).data.to_dict()
    assert card["sdk"] == "gradio" and card["app_file"] == "app.py" and {"evaluate", "metric"} <= set(card["tags"])
    assert {"title", "emoji", "colorFrom", "colorTo", "sdk_version", "description"} <= card.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_in_the_descriptions(name, monkeypatch):
    import doctest

    module = evaluate.load(module_path(name))
    monkeypatch.setattr(evaluate, "load", lambda name: module)
    examples = doctest.DocTestParser().get_doctest(module.inputs_description, {"evaluate": evaluate}, name, None, 0)
    assert examples.examples
    assert doctest.DocTestRunner().run(examples).failed == 0


# -- the forgetting curve


def test_a_measured_model_gives_what_the_runner_gives(curve_module, model, tokenizer, tmp_path):
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    expected = forgetting_curve(model, tokens, lengths=[4, 9], repeats=2, seed=3)
    options = dict(model=model, lengths=[4, 9], repeats=2, seed=3)
    result = curve_module.compute(corpus=tokens, **options)
    assert ForgettingCurve.from_json(json.dumps(result, allow_nan=False)) == expected
    assert result["fine_length"] == expected.fine_length and result["summary"] == expected.summary()

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    by_name = curve_module.compute(corpus=TEXT, **options | {"model": str(tmp_path)})
    assert by_name["settings"]["model"] == by_name["settings"]["tokenizer"] == tmp_path.name
    (tmp_path / "book.txt").write_text(TEXT)
    for corpus in (TEXT, [TEXT], tmp_path / "book.txt", str(tmp_path / "book.txt")):
        for given in (tokenizer, str(tmp_path)):
            assert curve_module.compute(corpus=corpus, tokenizer=given, **options)["points"] == result["points"]
    with pytest.raises(ValueError, match=r"corpus must be a document or .*, got 'no/book\.txt'"):
        curve_module.compute(corpus="no/book.txt", tokenizer=tokenizer, **options)
    with pytest.raises(ValueError, match=r"tokenizer must be a tokenizer or the name of a tokenizer, got 3"):
        curve_module.compute(corpus=TEXT, tokenizer=3, **options)


TARGETS = [[5, 6, 7, 8, 9], [4, 3, 4, 3, 4], [7, 7, 8]]
PAIRS = [[[0, 0, 7, 8, 9], [0, 0, 7, 0, 0]], [[4, 3, 0, 3, 4], [0, 0, 0, 0, 0]], [[0, 7, 8], [0, 0, 8]]]


def test_predictions_are_counted_in_the_second_half(curve_module):
    result = curve_module.compute(predictions=PAIRS, references=TARGETS)
    points = result["points"]
    assert [p["length"] for p in points] == [3, 5]
    assert [p["copy_correct"] for p in points] == [[2], [3, 2]]
    assert [p["lm_correct"] for p in points] == [[1], [1, 0]]
    assert result["fine_length"] == 3 and result["coarse_length"] == 5 and result["coarse_open_ended"] is True
    of_tensors = curve_module.compute(predictions=torch.tensor(PAIRS[:2]), references=np.array(TARGETS[:2]))
    assert of_tensors["points"] == points[1:]


def test_what_does_not_fit_is_named(model, curve_module, rope_module):
    with pytest.raises(ValueError, match="1 predictions and 2 references"):
        score_predictions([[[1], [1]]], [[1], [2]])
    with pytest.raises(ValueError, match=r"2 ids each, got lists of lengths \[1, 2\]"):
        score_predictions([[[1], [1, 2]]], [[1, 2]])
    with pytest.raises(ValueError, match="tokenizer must be a tokenizer or the name of a tokenizer"):
        curve_module.compute(model=model, corpus=TEXT)
    for module in (curve_module, rope_module):
        with pytest.raises(TypeError, match="unexpected keyword argument 'model_id'"):
            module.compute(model=model, model_id="gpt2")
    with pytest.raises(TypeError, match="unexpected keyword argument 'lengths'"):
        curve_module.compute(predictions=PAIRS, references=TARGETS, lengths=[4])


# -- the RoPE bound


def test_a_model_or_its_configuration_or_its_folder_is_checked(rope_module, model, tmp_path):
    expected = rope_report(model.config, context_length=32).to_dict()
    assert rope_module.compute(model=model.config, context_length=32) == expected
    assert rope_module.compute(model=model, context_length=32) == expected
    model.config.save_pretrained(tmp_path)
    assert rope_module.compute(model=str(tmp_path), context_length=32)["groups"] == expected["groups"]
    json.dumps(expected, allow_nan=False)


def test_bases_hold_from_the_smallest_base_on():
    contexts = [256, 256, 100, 100]
    minimum = check_bases([1e4] * 4, contexts, 32)["minimum_bases"]
    bases = [minimum[0], minimum[1] - 10, minimum[2], minimum[3] - 1]
    result = check_bases(bases, contexts, 32)
    assert result["verdicts"] == ["holds", "violated", "holds", "violated"] and result["holds"] == 0.5
    assert minimum[0] == rope_base_bound(255, 32).base  # the largest distance within 256 tokens
    assert check_bases([1e4, 1e4], [1707, 1708], 128)["verdicts"] == ["holds", "violated"]
    assert check_bases([1e4], [100], 128)["context_bounds"] == [1706]
    assert check_bases([1e4], [256], 32)["settled_bases"] == [rope_base_bound(255, 32).settled_base]
