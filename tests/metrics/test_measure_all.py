"""Everything is measured once, what fails is named, and a folder is of one model and one text."""

import json

import pytest
from demo_model import DEMO, VOCABULARY
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx.corpus import stdlib_text
from hf_longctx.metrics import ForgettingCurve, LocalReader, Needle, PositionLoss, Subject, Task, measure_all
from hf_longctx.metrics.result import run_measurement
from hf_longctx.metrics.retrieval.haystack import needle_pieces
from hf_longctx.metrics.retrieval.wording import wording
from hf_longctx.metrics.tasks.lines import line_counts, record_tokens


pytestmark = pytest.mark.usefixtures("undrawn", "known_metrics")
TITLES = {"curve": "Forgetting curve", "lines": "Line retrieval", "loss": "Per-token loss"}
TITLES |= {"needle": "Needle in a haystack", "rope": "RoPE bound"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return tokenizer(stdlib_text("held_out")[:20_000], add_special_tokens=False, verbose=False)["input_ids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a tiny Llama with random weights, which claims 640 tokens."""
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=640)).save_pretrained(path)
    return path


@pytest.fixture
def llama(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def known_metrics(monkeypatch):
    """Leave out metrics that are added later."""
    monkeypatch.setattr(Task, "tasks", {name: task for name, task in Task.tasks.items() if name in TITLES})


def read(path):
    return json.loads(path.read_text())


def test_everything_is_measured_once(llama, tokenizer, tokens, short_replies, tmp_path, capsys):
    options = dict(context_length=600, train_length=512, repeats=1, corpus_name="Python: a text", progress=True)
    report = measure_all(llama, tokenizer, tokens, tmp_path, **options)
    told = capsys.readouterr().err
    assert all(f"\n{title}:\n" in f"\n{told}" for title in TITLES.values()) and "100%" in told
    assert list(TITLES) == list(report.results) and not report.missing
    assert all(read(tmp_path / f"{name}.json")["saved"]["time"] for name in TITLES)
    assert report.page == tmp_path / "report.html" and report.page.read_text().count("<img") == 5
    for name in ("curve", "loss", "needle"):
        settings = report.results[name].settings
        assert (settings["corpus"], settings["train_length"]) == ("Python: a text", 512)
    assert report.results["curve"].points[-1].length == (600 - 3) // 2
    assert (report.results["loss"].context_length, report.results["rope"].claimed_context) == (600, 640)
    needed = needle_pieces(Subject(llama, tokenizer).encode, 0, wording("easy")).tokens  # a haystack without hay
    assert min(report.results["needle"].lengths) > needed and max(report.results["needle"].lengths) <= 600

    calls, forward = [], llama.forward
    llama.forward = lambda *args, **kwargs: calls.append(args) or forward(*args, **kwargs)
    again = measure_all(llama, tokenizer, tokens, tmp_path, **options)
    assert again.results == report.results and len(calls) < 60  # the probes of each task
    for options["seed"], text in ((1, tokens), (0, tokens[:-1])):
        with pytest.raises(ValueError, match="is a journal from another run"):
            measure_all(llama, tokenizer, text, tmp_path, **options)


def test_retrieval_ends_where_the_context_does(llama, tokenizer, tokens):
    subject = Subject(LocalReader(llama), tokenizer, tokens, context=800)
    assert Needle().on(subject).lengths == [192, 288, 384, 480, 576, 672, 768]
    with pytest.raises(ValueError, match=r"context must have at least \d+ tokens, got 64"):
        Needle().on(Subject(llama, tokenizer, tokens, context=64))
    counts = line_counts(2000, subject.encode)
    assert counts == [5 * 2**i for i in range(len(counts))] and len(counts) > 1
    assert record_tokens(counts[-1], subject.encode) <= 2000 < record_tokens(2 * counts[-1], subject.encode)


def test_what_fails_is_named_and_tried_again(tokenizer, tokens, tmp_path):
    """FoX has no RoPE, and this context is too short for all but the loss."""
    fox = AutoModelForCausalLM.from_pretrained(DEMO)
    for _ in range(2):
        report = measure_all(fox, tokenizer, tokens[:30], tmp_path, context_length=20, progress=True)
        assert list(report.results) == ["loss"] and list(report.missing) == [
            TITLES[name] for name in TITLES if name != "loss"
        ]
    page = report.page.read_text()
    assert (
        page.count("Not measured") == 4
        and "does not describe a rotary" in page
        and "at least 117 tokens for 10 repeats" in page
    )
    assert {path.name for path in tmp_path.glob("*.json")} == {"loss.json"}


def test_nothing_can_be_measured(tokenizer, tmp_path, monkeypatch):
    fox = AutoModelForCausalLM.from_pretrained(DEMO)
    monkeypatch.setattr(Task, "tasks", {name: task for name, task in Task.tasks.items() if name != "loss"})
    with pytest.raises(ValueError, match=r"nothing could be measured.*Needle in a haystack: "):
        measure_all(fox, tokenizer, [1], tmp_path, context_length=2)


def test_a_failure_before_anything_was_measured_leaves_no_result():
    error = KeyboardInterrupt()
    error.result = ForgettingCurve.of_points([])

    def measure():
        raise error

    assert run_measurement(measure) == (None, error)


def test_an_interrupted_run_resumes(llama, tokenizer, tokens, tmp_path):
    """Measurements before an interruption are on disk, and are not repeated."""
    forward = llama.forward

    def interrupted(input_ids, **kwargs):
        if input_ids[0, 1:5].tolist() == tokens[80:84]:  # the fifth sequence
            raise KeyboardInterrupt
        return forward(input_ids, **kwargs)

    llama.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        measure_all(llama, tokenizer, tokens[:120], tmp_path, context_length=20)
    assert PositionLoss.from_json((tmp_path / "loss.json").read_text()).sequences == 4
    llama.forward = forward
    report = measure_all(llama, tokenizer, tokens[:120], tmp_path, context_length=20)
    assert report.results["loss"].sequences == 6
    lines = (tmp_path / "journals" / "loss.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 7, "a line for each sequence, none twice"
