"""Running models over the forgetting curve: recorded curves, which logits are computed, limits, failures."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CORPUS, Copier, RemoteCode, tiny_gpt2, tiny_llama

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.metrics import Curve, ForgettingCurve, Run, Subject
from hf_longctx.metrics import forgetting_curve as measure
from hf_longctx.metrics.curve import protocol as core
from hf_longctx.metrics.run.journal import content_hash
from hf_longctx.metrics.run.model import position_limit, weights_hash


GRIDS = {"linear": core.linear_lengths, "log": core.log_lengths}


def forgetting_curve(model, tokens, *, journal=None, tokens_per_pass=None, progress=False, **options):
    return measure(model, tokens, run=Run(journal, tokens_per_pass, progress), **options)


@pytest.fixture(scope="module")
def trained(golden):
    """Return the small trained Llama of the recorded curves."""
    return transformers.AutoModelForCausalLM.from_pretrained(golden / "forgetting_curve" / "model")


def settings_of(run):
    grid = GRIDS[run["granularity_type"]](run["test_max_length"], run["granularity"])
    options = {"repeats": run["repeats"], "seed": run["seed"], "data_type": run["data_type"]}
    return {"lengths": grid[: len(run["rows"])], **options}  # the same samples, however early a grid is cut


def assert_reproduces(curve, run, tolerance):
    """Equal samples, and counts that differ by at most `tolerance` tokens in the whole run."""
    assert [p.length for p in curve.points] == [row["length"] for row in run["rows"]]
    difference = 0
    for point, row in zip(curve.points, run["rows"]):
        if run["data_type"] == "order":
            assert list(point.begin_locs) == row["begin_locs"]
        difference += np.abs(np.subtract(point.copy_correct, row["copy_correct"])).sum()
        difference += np.abs(np.subtract(point.lm_correct, row["lm_correct"])).sum()
    assert difference <= tolerance


# -- recorded curves. README_metrics.md of the golden data allows 5 tokens a run in float32


@pytest.mark.filterwarnings("ignore:length .* needs .* positions")  # several of them go beyond what the model claims
@pytest.mark.parametrize("name, lengths", [("order_log9_r3_s4", 9), ("random_linear12_r10_s2", 4)])
def test_recorded_curve(trained, tokens, recorded, name, lengths):
    run = recorded[name] | {"rows": recorded[name]["rows"][:lengths]}
    curve = forgetting_curve(trained, None if run["data_type"] == "random" else tokens, **settings_of(run))
    assert_reproduces(curve, run, tolerance=5)
    assert curve.settings.get("id_range") == run.get("id_range")


@pytest.mark.filterwarnings("ignore:length .* needs .* positions")
def test_recorded_curve_on_a_short_corpus(trained, tokens, recorded):
    """The reference program stops there without a word; we name the longest possible length."""
    run = recorded["short_corpus"]
    options = settings_of(run)
    assert_reproduces(forgetting_curve(trained, tokens[:1200], **options), run, tolerance=5)
    options["lengths"] = core.linear_lengths(700, 8)
    with pytest.raises(ValueError, match=r"at least 2100 tokens.*got 1200.*Drop the lengths above 400"):
        forgetting_curve(trained, tokens[:1200], **options)


def test_recorded_oracle(tokens, recorded):
    """No arithmetic, hence no tolerance: this checks inputs, scored positions and counts."""
    run = recorded["oracle_order_w600_k2"]
    oracle = Copier(**run["oracle"], vocab_size=1024)
    assert_reproduces(forgetting_curve(oracle, tokens, **settings_of(run)), run, tolerance=0)


# -- what the model is asked


def record_calls(model):
    """Every forward pass: ids (T,), training flag and options. The first two are a trial."""
    calls = []

    def before(_, args, options):
        ids = args[0] if args else options.pop("input_ids")
        calls.append({"ids": ids[0].tolist(), "training": model.training, **options})

    model.register_forward_pre_hook(before, with_kwargs=True)
    return calls


def whole_inputs(model):
    """Return the model without prefix sharing. Every forward pass then reads a whole input."""
    model._is_stateful = True
    return model


@pytest.mark.parametrize("irrelevant", [None, CORPUS[:9]], ids=["own-end", "given"])
def test_counts_are_those_of_the_definition(irrelevant):
    """Against the whole logits of a plain forward pass, with samples from the same seed."""
    model = tiny_llama(vocab_size=8).eval()
    with torch.no_grad():  # near the start the last id decides alone, whatever the irrelevant text is
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    corpus = CORPUS % 8
    lengths = [1, 2, 5, 8]
    irrelevant = None if irrelevant is None else irrelevant % 8
    curve = forgetting_curve(model, corpus, lengths=lengths, repeats=12, seed=3, irrelevant_text=irrelevant)
    total = 0
    for point, samples in zip(curve.points, core.order_samples(corpus, lengths, 12, 3, irrelevant).values()):
        n, scored = point.length, -(-point.length // 2)
        for sample, copy, lm in zip(samples, point.copy_correct, point.lm_correct):
            assert sample.irrelevant.tolist() == (corpus if irrelevant is None else irrelevant)[-n:].tolist()
            for prefix, count in ((sample.target, copy), (sample.irrelevant, lm)):
                ids = torch.tensor([1, *prefix, 1, *sample.target, 2])
                with torch.no_grad():
                    guesses = model(ids[None]).logits[0].argmax(-1)
                assert count == sum(guesses[t - 1] == ids[t] for t in range(2 * n + 2 - scored, 2 * n + 2))
                total += count
    assert total > 10


def test_offloaded_model(tmp_path):
    """Spread over devices, whose weights stay on the disk: the counts are equal."""
    pytest.importorskip("accelerate")
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "disk", "lm_head": "disk"}
    places |= dict.fromkeys(("model.layers", "model.norm", "model.rotary_emb"), "cpu")
    options = dict(device_map=places, offload_folder=tmp_path / "offload")
    spread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    assert next(spread.parameters()).device.type == "meta"
    curve = forgetting_curve(spread, CORPUS, lengths=[7, 20], repeats=3)
    assert curve.points == forgetting_curve(model, CORPUS, lengths=[7, 20], repeats=3).points


def test_model_with_other_logits():
    with pytest.raises(ValueError, match="must return logits for the last 19 of 19 positions, got 5"):
        forgetting_curve(RemoteCode(tiny_llama(), slice(-5, None)), CORPUS, lengths=[8])


def test_runs_in_eval_mode_and_restores_training_also_after_a_failure():
    model = tiny_llama(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    calls = record_calls(whole_inputs(model))
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forgetting_curve(model, CORPUS, lengths=[8])
    assert not any(call["training"] for call in calls)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not torch.is_inference_mode_enabled()


def test_the_size_of_a_token_is_in_the_settings():
    tokenizer = SimpleNamespace(name_or_path="tiny", decode=lambda ids, **_: "é" * len(ids) + "ab")
    options = dict(lengths=[8], repeats=1)
    curve = forgetting_curve(tiny_llama(), CORPUS[:100], tokenizer=tokenizer, **options)
    assert curve.settings["bytes_per_token"] == 2.02  # "é" has two bytes
    for data in (dict(tokens=CORPUS, tokenizer="tiny"), dict(tokens=None, data_type="random", id_range=(3, 20))):
        assert "bytes_per_token" not in forgetting_curve(tiny_llama(), **data, **options).settings


def test_settings_and_seed():
    model = tiny_llama()
    names = {"corpus_name": "noise", "train_length": 64}
    curve = forgetting_curve(model, CORPUS, lengths=[8, 9], repeats=2, seed=5, **names)
    assert set(curve.settings["versions"]) == {"hf-longctx", "torch", "transformers"}
    expected = {"model": "LlamaForCausalLM", "dtype": "float32", "protocol": "reference", "data_type": "order"}
    expected |= {"seed": 5, "repeats": 2, "bos_token_id": 1, "eos_token_id": 2}
    expected |= {"lengths": [8, 9], "device": "cpu", "tokens_per_pass": 512, "weights_sha256": weights_hash(model)}
    expected |= {"corpus_tokens": 200, "corpus_sha256": content_hash(CORPUS), "corpus": "noise", "train_length": 64}
    assert {name: curve.settings[name] for name in expected} == expected
    assert ForgettingCurve.from_json(curve.to_json()) == curve
    other = forgetting_curve(model, CORPUS, lengths=[8, 9], repeats=2, seed=6)
    assert [p.begin_locs for p in other.points] != [p.begin_locs for p in curve.points]


class Vocabulary:
    """A tokenizer for 32 embeddings: 28 tokens and a gap. Three of the tokens are special or added."""

    name_or_path = "tiny"
    all_special_ids, added_tokens_decoder = [11, 14], {14: "<|end|>", 20: "<tool>"}

    def get_vocab(self):
        return {f"t{i}": i for i in range(28) if i != 17}


def test_random_data_are_tokens_of_text():
    model = whole_inputs(tiny_llama())
    calls = record_calls(model)
    options = dict(lengths=[40], repeats=3, data_type="random", eos_token_id=12)
    curve = forgetting_curve(model, None, tokenizer=Vocabulary(), **options)
    drawn = {i for call in calls[2:] for i in call["ids"][1:41] + call["ids"][42:-1]}
    assert drawn == set(range(10, 28)) - {11, 12, 14, 17, 20} and curve.points[0].begin_locs is None
    assert curve.settings["id_range"] == [10, 31] and curve.settings["skipped_ids"] == 8
    with pytest.raises(ValueError, match=r"two ordinary tokens, got \(28, 31\) with 4 special"):
        forgetting_curve(model, None, tokenizer=Vocabulary(), id_range=(28, 31), **options)


def test_the_lengths_of_the_paper_reach_the_claim():
    curve = Curve(preset="paper").on(Subject(tiny_llama(max_position_embeddings=64), tokens=CORPUS))
    assert curve.lengths == [*range(2, 65, 2)] and {trial.inputs for trial in curve.trials({})} == {20}


# -- special tokens


@pytest.mark.parametrize(
    "config, generation, arguments, expected",
    [
        ({"bos_token_id": 3, "eos_token_id": 4}, {}, {"bos_token_id": 0, "eos_token_id": 5}, (0, 5)),
        ({"bos_token_id": None, "eos_token_id": [4, 6]}, {}, {}, (4, 4)),
        ({"bos_token_id": 3, "eos_token_id": None}, {}, {}, (3, 3)),
        ({"bos_token_id": None, "eos_token_id": None}, {"bos_token_id": 7, "eos_token_id": [8, 9]}, {}, (7, 8)),
    ],
    ids=["arguments", "no-bos", "no-eos", "generation-config"],
)
def test_special_tokens(config, generation, arguments, expected):
    model = tiny_llama(**config)
    model.generation_config = transformers.GenerationConfig(**generation)
    calls = record_calls(whole_inputs(model))
    curve = forgetting_curve(model, CORPUS, lengths=[8], repeats=1, **arguments)
    assert (curve.settings["bos_token_id"], curve.settings["eos_token_id"]) == expected
    assert {(call["ids"][0], call["ids"][9], call["ids"][-1]) for call in calls[2:]} == {(expected[0], *expected)}


# -- position limits


def test_a_position_table_that_serves_one_segment_at_a_time():
    model = HMTWrapper.from_backbone(tiny_gpt2(n_positions=24), HMTConfig(segment_length=16, sensory_tokens=4))
    assert position_limit(model) is None and position_limit(model.backbone) == 24
    curve = forgetting_curve(model, CORPUS, lengths=[40], repeats=2)
    assert [p.length for p in curve.points] == [40]


def test_beyond_the_position_table():
    model = tiny_gpt2(n_positions=23)
    curve = forgetting_curve(model, CORPUS, lengths=[2, 10, 11, 20], repeats=3)
    assert curve.points == forgetting_curve(model, CORPUS, lengths=[2, 10], repeats=3).points
    assert curve.missing == dict.fromkeys((11, 20), "beyond the model's 23 positions")
    assert [p.length for p in curve.points] == [2, 10]
    assert curve.summary().endswith("; 2 lengths from 11 to 20 not measured: beyond the model's 23 positions")
    adaptive = forgetting_curve(model, CORPUS, lengths=[2, 10, 11, 20], repeats=3, protocol="adaptive")
    assert adaptive.points[-1].length == 10 and set(adaptive.missing) == {11, 20}
    with pytest.raises(ValueError, match="nothing could be measured: beyond the model's 23 positions"):
        forgetting_curve(model, CORPUS, lengths=[11, 20])


def test_beyond_the_claim_of_a_rotary_model():
    model = tiny_llama(max_position_embeddings=19)
    with pytest.warns(
        UserWarning, match="longest input has 43 tokens, but the model claims to support only 19"
    ) as caught:
        curve = forgetting_curve(model, CORPUS, lengths=[8, 9, 20], repeats=2)
    assert len(caught) == 1
    assert len(curve.points) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forgetting_curve(model, CORPUS, lengths=[8], repeats=2)


# -- failures


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk")])
def test_a_failure_keeps_what_was_measured(error):
    model = tiny_llama()
    model._is_stateful = True  # reads whole inputs
    expected = forgetting_curve(model, CORPUS, lengths=[8, 9], repeats=2)

    def fail(_, args):
        if args[0].shape[1] == 2 * 10 + 3:
            raise error

    model.model.embed_tokens.register_forward_pre_hook(fail)
    with pytest.raises(type(error)) as caught:
        forgetting_curve(model, CORPUS, lengths=[8, 9, 10, 11], repeats=2)
    assert caught.value is error
    curve, cause = error.result, "Ctrl-C" if isinstance(error, KeyboardInterrupt) else "disk"
    assert curve.points == expected.points and curve.settings["lengths"] == [8, 9, 10, 11]
    assert curve.missing == {10: "interrupted", 11: "interrupted"}
    assert curve.settings["interrupted"] == cause and "interrupted" not in expected.settings
    assert curve.summary().endswith(f"2 lengths from 10 to 11 not measured: interrupted; interrupted: {cause}")
    assert ForgettingCurve.from_json(curve.to_json()) == curve
    assert any(".result: Whether the model copies" in note or ".result: Copies" in note for note in error.__notes__)


@pytest.mark.parametrize("room", [0, 30], ids=["full", "a part of a line fits"])
def test_a_full_disk_loses_nothing(tmp_path, room):
    """The journal stays complete. The length that could not be written is in the result, and the next run measures it
    again.
    """
    resource = pytest.importorskip("resource")
    options = dict(lengths=[8, 9, 10], repeats=2)
    whole = forgetting_curve(tiny_llama(), CORPUS, journal=tmp_path / "whole", **options)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(b"".join(lines[:2])) + room, hard))
    try:
        with pytest.raises(OSError, match="the journal cannot be written") as caught:
            forgetting_curve(tiny_llama(), CORPUS, journal=tmp_path / "journal", **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "journal")
    assert caught.value.result.points == whole.points[:2]
    assert caught.value.result.missing == {10: "interrupted"}
    assert forgetting_curve(tiny_llama(), CORPUS, journal=tmp_path / "journal", **options) == whole
    assert (tmp_path / "journal").read_bytes() == b"".join(lines)


def test_nan_logits():
    """Length 9 of repeat 1, whose copies are read before its LM inputs; logits 14 to 18 are scored."""
    model = whole_inputs(tiny_llama())
    calls = record_calls(model)

    def spoil(_, args, logits):
        if len(calls) == 8:
            logits = logits.clone()
            logits[0, 3, 5] = torch.nan
        return logits

    model.lm_head.register_forward_hook(spoil)
    with pytest.raises(
        ValueError, match=r"curve, trial \(9, 0, 2\): input 1: the logits at position 17 are NaN"
    ) as caught:
        forgetting_curve(model, CORPUS, lengths=[8, 9], repeats=2)
    assert [p.length for p in caught.value.result.points] == [8]
