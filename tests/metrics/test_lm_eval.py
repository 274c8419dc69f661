"""The tasks in lm-eval: the numbers of our own functions."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from demo_model import DEMO
from endpoint_server import serving
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx import HMTConfig, HMTWrapper, cli
from hf_longctx.corpus import load_tokens, stdlib_text
from hf_longctx.lm_eval import tasks_folder
from hf_longctx.metrics import forgetting_curve, line_retrieval


pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'hf-longctx[lm-eval]'")

CURVE = {"lengths": [8, 17], "repeats": 3, "seed": 1, "text": "stdlib"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").eval()


def hf(model, tokenizer, **options):
    from hf_longctx.lm_eval.model import LongContextLM

    return LongContextLM(
        pretrained=model, tokenizer=tokenizer, batch_size=4, device="cpu", add_bos_token=True, **options
    )


def evaluate(lm, task, settings, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=settings)
    result = lm_eval.simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=10, **options)
    return result["results"][task] | {"samples": result["samples"][task], "config": result["configs"][task]}


def counts(result):
    """Return the counts of the repeats, (copy, LM), keyed by length."""
    scores = [entry for sample in result["samples"] for entry in sample["resps"][0][0]]
    return {key[0]: (score["copy"], score["LM"]) for key, score in scores}


def own_counts(model, tokenizer, settings):
    options = {name: value for name, value in settings.items() if name != "text"}
    tokens = load_tokens(tokenizer, "stdlib").tokens
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, tokenizer=tokenizer)
    return forgetting_curve(model, tokens, **options, **ids)


def test_counts_are_those_of_our_curve(model, tokenizer):
    result = evaluate(hf(model, tokenizer), "forgetting_curve", CURVE)
    curve = own_counts(model, tokenizer, CURVE)
    expected = {p.length: ([*p.copy_correct], [*p.lm_correct]) for p in curve.points}
    assert counts(result) == expected
    assert result["coarse_memory_length_at_least_tokens_95_CI,none"] == curve.interval("coarse").low


def test_passages_that_overlap_count_as_one_text(model, tokenizer, tmp_path, caplog):
    text = tmp_path / "tiny.txt"
    text.write_text(stdlib_text("held_out")[:1500])
    settings = {"lengths": [64, 96], "repeats": 8, "text": str(text)}
    result = evaluate(hf(model, tokenizer), "forgetting_curve", settings)
    options = dict(lengths=[64, 96], repeats=8, tokenizer=tokenizer)
    curve = forgetting_curve(model, load_tokens(tokenizer, str(text)).tokens, **options)
    assert curve.overlapping
    for number in curve.numbers()[:2]:
        name = re.sub(r"\W+", "_", number.name).strip("_")
        ends = [result[f"{name}{end},none"] for end in ("", "_low")]
        assert ends == [number.value, number.low]
    assert sum("the corpus is too short: its passages overlap" in record.message for record in caplog.records) == 1


def test_lines_are_those_of_our_lines(model, tokenizer):
    result = evaluate(hf(model, tokenizer), "lines", {"lines": [1, 3], "repeats": 3})
    ours = line_retrieval(model, tokenizer, lines=[1, 3], repeats=3)
    rates = [result[f"line_retrieval_found_{p.lines}_lines,none"] for p in ours.points]
    assert rates == pytest.approx([p.match_rate for p in ours.points], abs=1e-4)
    scores = {key: score for sample in result["samples"] for key, score in sample["resps"][0][0]}
    assert [scores[n]["answers"] for n in (1, 3)] == [p.score()[1]["answers"] for p in ours.points]


def test_a_limit_takes_trials_and_the_cache_answers_again(model, tokenizer, tmp_path, monkeypatch):
    first = evaluate(hf(model, tokenizer), "forgetting_curve", CURVE, limit=1, use_cache=str(tmp_path / "cache"))
    assert {n: len(copy) for n, (copy, _) in counts(first).items()} == {8: 3}
    monkeypatch.setattr("hf_longctx.metrics.run.engine.Engine.predict", None)
    again = evaluate(hf(model, tokenizer), "forgetting_curve", CURVE, limit=1, use_cache=str(tmp_path / "cache"))
    assert counts(again) == counts(first)


@pytest.mark.usefixtures("no_key_or_proxy")
def test_other_models_have_our_readers(model, tokenizer):
    from hf_longctx.lm_eval.tasks import reader_of

    with serving(model) as server:
        url = f"{server.url}/completions"
        reader = reader_of(SimpleNamespace(base_url=url, model="tiny", tokenizer=tokenizer, api_key=""))
        assert (reader.base_url, reader.model, reader.vocab_size) == (server.url, "tiny", len(tokenizer))
    config = SimpleNamespace(hf_config=model.config, max_model_len=100, get_vocab_size=lambda: 32)
    assert reader_of(SimpleNamespace(model=SimpleNamespace(model_config=config))).position_limit == 99
    for lm, message in (({"model": "gguf"}, "must be hf, hf-longctx"), ({"mixed_precision_dtype": "x"}, "Set dtype")):
        with pytest.raises(ValueError, match=message):
            reader_of(SimpleNamespace(**lm))


@pytest.mark.parametrize(
    "settings, options, message",
    [
        ({"repeat": 3}, {}, "did you mean repeats"),
        ({"lengths": [17, 8]}, {}, "strictly ascending"),
        ({"data_type": "text"}, {}, "data_type must be one of"),
        ({"protocol": "adaptive"}, {}, "protocol must be 'reference', got 'adaptive'"),
    ],
)
def test_a_setting_that_does_not_fit(model, tokenizer, settings, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(hf(model, tokenizer, **options), "forgetting_curve", settings)


def test_hmt_reads_beyond_the_claim_of_its_backbone(tokenizer):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    torch.manual_seed(0)
    backbone = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes))
    hmt = HMTWrapper.from_backbone(backbone, HMTConfig(segment_length=16, sensory_tokens=4))
    settings = CURVE | {"lengths": [8, 40]}
    result = evaluate(hf(hmt, tokenizer), "forgetting_curve", settings)
    expected = own_counts(hmt, tokenizer, settings)
    assert counts(result) == {p.length: ([*p.copy_correct], [*p.lm_correct]) for p in expected.points}


def test_the_command_runs_lm_eval(tmp_path, capsys):
    command = ["lm-eval", "run", "--model", "hf-longctx", "--tasks", "forgetting_curve", "--log_samples"]
    command += ["--model_args", f"pretrained={DEMO},dtype=float32", "--output_path", str(tmp_path)]
    assert cli.main([*command, "--metadata", json.dumps(CURVE | {"repeats": 1})]) == 0
    assert "coarse_memory_length" in capsys.readouterr().out
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["configs"]["forgetting_curve"]["metadata"]["lengths"] == [8, 17]
    assert [*tmp_path.rglob("samples_forgetting_curve_*.jsonl")]
