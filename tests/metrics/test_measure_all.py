"""Everything is measured once, what fails is named, and a folder is of one model and one text."""

import json
import shutil

import pytest
from demo_model import DEMO, VOCABULARY
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_longctx.corpus import stdlib_text
from hf_longctx.metrics import ForgettingCurve, LocalReader, Needle, PositionLoss, Subject, Task, measure_all
from hf_longctx.metrics.output import run_measurement
from hf_longctx.metrics.retrieval.haystack import needle_pieces
from hf_longctx.metrics.retrieval.wording import wording
from hf_longctx.metrics.tasks.lines import line_counts, record_tokens


pytestmark = pytest.mark.usefixtures("undrawn")
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
    """A tiny Llama with random weights, which claims 640 tokens."""
    path = tmp_path_factory.mktemp("models") / "llama"
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=640)).save_pretrained(path)
    return path


@pytest.fixture
def llama(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def read(path):
    return json.loads(path.read_text())


def measured(capsys):
    """Names of the metrics that were measured since the last call, by what was said about them."""
    lines = capsys.readouterr().err.splitlines()
    return [name for name, title in TITLES.items() if f"{title}:" in lines]


def test_everything_is_measured_once(llama, tokenizer, tokens, short_replies, tmp_path, capsys):
    options = dict(context_length=600, train_length=512, repeats=1, corpus_name="Python: a text", progress=True)
    report = measure_all(llama, tokenizer, tokens, tmp_path, **options)
    assert measured(capsys) == list(TITLES) == list(report.results) and not report.missing
    assert all(read(tmp_path / f"{name}.json")["saved"]["time"] for name in TITLES)
    assert not (tmp_path / "unfinished").exists()

    assert report.page == tmp_path / "report.html" and report.page.read_text().count("<img") == 5
    card = ModelCard.load(report.card).data
    assert card.model_name == "llama"
    sizes = len(report.results["needle"].lengths) + len(report.results["lines"].points)
    assert len(card.eval_results) == 1 + sizes  # perplexity, and a rate for each size
    for name in ("curve", "loss", "needle"):
        settings = report.results[name].settings
        assert (settings["corpus"], settings["train_length"]) == ("Python: a text", 512)
    assert report.results["curve"].points[-1].length == (600 - 3) // 2
    assert (report.results["loss"].context_length, report.results["rope"].claimed_context) == (600, 640)
    needed = needle_pieces(Subject(llama, tokenizer).encode, 0, wording("easy")).tokens  # a haystack without hay
    assert min(report.results["needle"].lengths) > needed and max(report.results["needle"].lengths) <= 600

    again = measure_all(llama, tokenizer, tokens, tmp_path, **options)
    assert again.results == report.results
    assert capsys.readouterr().err.count("measured before") == 5
    with pytest.raises(ValueError, match="another seed"):
        measure_all(llama, tokenizer, tokens, tmp_path, **options, seed=1)


def test_retrieval_ends_where_the_context_does(llama, tokenizer, tokens):
    subject = Subject(LocalReader(llama), tokenizer, tokens, context=800)
    assert Needle().on(subject).lengths == [192, 288, 384, 480, 576, 672, 768]
    with pytest.raises(ValueError, match="length 32 is too short"):
        Needle().on(Subject(llama, tokenizer, tokens, context=64))
    counts = line_counts(2000, subject.encode)
    assert counts == [5 * 2**i for i in range(len(counts))] and len(counts) > 1
    assert record_tokens(counts[-1], subject.encode) <= 2000 < record_tokens(2 * counts[-1], subject.encode)


def test_what_fails_is_named_and_tried_again(tokenizer, tokens, tmp_path, capsys):
    """FoX has no RoPE, and this context is too short for all but the loss."""
    fox = AutoModelForCausalLM.from_pretrained(DEMO)
    for tried in (["curve", "lines", "loss", "needle", "rope"], ["curve", "lines", "needle", "rope"]):
        report = measure_all(fox, tokenizer, tokens[:30], tmp_path, context_length=20, progress=True)
        assert measured(capsys) == tried
        assert list(report.results) == ["loss"] and list(report.missing) == [
            TITLES[name] for name in TITLES if name != "loss"
        ]
    page = report.page.read_text()
    assert page.count("Not measured") == 4 and "has no rotary" in page and "too few for 10 passages" in page
    assert {path.name for path in tmp_path.glob("*.json")} == {"arguments.json", "loss.json"}


def test_nothing_can_be_measured(tokenizer, tmp_path, monkeypatch):
    fox = AutoModelForCausalLM.from_pretrained(DEMO)
    monkeypatch.setattr(Task, "tasks", {name: task for name, task in Task.tasks.items() if name != "loss"})
    with pytest.raises(ValueError, match=r"nothing could be measured.*Needle in a haystack: "):
        measure_all(fox, tokenizer, [1], tmp_path, context_length=2)


def test_a_folder_is_of_one_state_of_model_and_text(folder, tokenizer, tokens, tmp_path, monkeypatch, capsys):
    """The context is too short for all but the loss and the bound, so that this is quick."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)

    def measure(text=tokens[:60], name=model, **options):
        loaded = AutoModelForCausalLM.from_pretrained(name)
        options = dict(context_length=20, corpus_name="a text", progress=True) | options
        return measure_all(loaded, tokenizer, text, tmp_path / "report", **options)

    assert list(measure().results) == ["loss", "rope"]
    with pytest.raises(ValueError, match=r"another text \(its content or its tokenizer changed\). Take"):
        measure(tokens[60:120])
    with pytest.raises(ValueError, match="another train_length"):
        measure(train_length=20)
    config = read(model / "config.json")
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    with pytest.raises(ValueError, match="another state of the model"):
        measure()
    (model / "config.json").write_text(json.dumps(config))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "report" / "loss.json").unlink()
    capsys.readouterr()
    measure(name="model")  # the same folder by its relative path
    assert "loss" in measured(capsys) and "rope" not in measured(capsys)


def test_a_run_that_failed_at_once_blocks_nothing(llama, tokenizer, tokens, tmp_path):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "arguments.json").write_text('{"model": "a name with a typo"}')
    (tmp_path / "unfinished" / "loss.jsonl").write_text("its first line\n")
    report = measure_all(llama, tokenizer, tokens[:60], tmp_path, context_length=20)
    assert "loss" in report.results and not (tmp_path / "unfinished" / "loss.jsonl").exists()
    assert read(tmp_path / "arguments.json")["model"] == "llama"


def test_a_failure_before_anything_was_measured_leaves_no_result():
    error = KeyboardInterrupt()
    error.result = ForgettingCurve.of_points([])

    def measure():
        raise error

    assert run_measurement(measure) == (None, error)


def test_an_interrupted_run_goes_on(llama, tokenizer, tokens, tmp_path, capsys):
    """What was measured until an interruption is on disk, and not measured again."""
    forward = llama.forward

    def interrupted(input_ids, **kwargs):
        if input_ids[0, 1:5].tolist() == tokens[80:84]:  # the fifth sequence
            raise KeyboardInterrupt
        return forward(input_ids, **kwargs)

    llama.forward = interrupted
    options = dict(context_length=20, progress=True)
    with pytest.raises(KeyboardInterrupt):
        measure_all(llama, tokenizer, tokens[:120], tmp_path, **options)
    unfinished = PositionLoss.from_json((tmp_path / "unfinished" / "loss.json").read_text())
    assert unfinished.sequences == 4 and not (tmp_path / "loss.json").exists()
    with pytest.raises(ValueError, match="another seed"):
        measure_all(llama, tokenizer, tokens[:120], tmp_path, **options, seed=1)
    llama.forward = forward
    report = measure_all(llama, tokenizer, tokens[:120], tmp_path, **options)
    assert report.results["loss"].sequences == 6
