"""Cards: places are filled from files, a figure without a file cannot be written, the linter sees the rest."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from mistakes import refused
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx import HMTConfig, HMTWrapper, cli
from hf_longctx.hub import (
    build_bundle,
    build_explorer,
    build_kernel,
    build_space,
    fill,
    gaps,
    lint,
    problems,
    with_card,
)
from hf_longctx.hub.card import PLACE, TEMPLATE
from hf_longctx.metrics import CurvePoint, ForgettingCurve, PositionLoss, rope_report
from hf_longctx.metrics.evaluate_modules import NAMES
from hf_longctx.metrics.report.card import eval_results


ROOT = Path(__file__).resolve().parents[2]
CARDS = sorted(path.parent for path in ROOT.glob("model_cards/*/config.json"))
LLAMA = LlamaConfig(
    **dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2),
    max_position_embeddings=512,
)
CURVE = ForgettingCurve(
    [CurvePoint(64, [30] * 5, [1] * 5), CurvePoint(128, [5, 6, 5, 6, 5], [5, 5, 6, 5, 6])],
    {"seed": 3, "repeats": 5, "corpus": "a novel"},
)
BENCHMARK = {
    "command": "python -m scripts.bench.generate",
    "commit": "0123abc",
    "machine": {"device": "AMD EPYC"},
    "versions": {"torch": "2.13.0"},
    "rows": [{"name": "Llama", "prefill_tokens_per_s": 1178.92, "parameters": 69219072}],
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama with everything that a card can show."""
    folder = tmp_path_factory.mktemp("cards") / "llama"
    LlamaForCausalLM(LLAMA).save_pretrained(folder)
    CURVE.save(folder / "curve.json")
    (folder / "curve.png").write_bytes(b"picture")
    PositionLoss([3.0, 2.5, 2.25, 2.0], 4, {"corpus": "a novel"}).save(folder / "loss.json")
    rope_report(LLAMA, minimum_base=False).save(folder / "rope.json")
    (folder / "speed.json").write_text(json.dumps(BENCHMARK))
    settings = {"steps": 600, "batch_tokens": 6144, "sequence_length": 256, "learning_rate": 3e-3, "seed": 7}
    (folder / "training.yaml").write_text(yaml.safe_dump(settings))
    (folder / "training_log.jsonl").write_text(
        '{"step": 900, "eval_loss": 7}\n{"step": 300, "loss": 2.5}\n{"step": 600, "loss": 1.25}\n'
    )
    return folder


@pytest.fixture
def folder(llama, tmp_path):
    """The same with a card that lacks nothing but prose."""
    folder = shutil.copytree(llama, tmp_path / "model")
    text = with_card(build_bundle(folder), "alice/llama", "v1").text("README.md")
    (folder / "README.md").write_text(text.replace("language: en", "language: en\nlicense: apache-2.0"))
    return folder


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.name)
def test_cards_of_models_are_complete_and_say_what_their_files_say(card):
    bundle = build_bundle(card)
    assert not problems(bundle) and not gaps(bundle)
    assert PLACE.search(bundle.text("README.md"))


@pytest.mark.parametrize("name", [*NAMES, "explorer", "kernel"])
def test_cards_of_spaces_and_of_the_kernel_are_complete(name):
    bundles = [build_space(name)] if name in NAMES else [build_explorer()]
    if name == "kernel":
        bundles = build_kernel("alice/forgetting-attention").values()
    for bundle in bundles:
        assert not problems(bundle) and not gaps(bundle)


def test_a_new_card_shows_all_that_its_files_hold(llama):
    bundle = with_card(build_bundle(llama), "alice/llama", "v1")
    text = bundle.text("README.md")
    for line in (
        "| parameters | 11,936, of which 3,904 are embeddings |",
        "| positions | RoPE of base 10000 |",
        "| claimed | 512 tokens | `max_position_embeddings` | [config.json](config.json) |",
        "| trained | 256 tokens | a row | [training.yaml](training.yaml) |",
        "| measured | coarse length, tokens: at least 64 | 95 % sure; the paper's: 64; 2 lengths, 5 repeats | "
        "[curve.json](curve.json) |",
        "| measured | loss at 4 tokens, nats: 2.000 | 4 sequences | [loss.json](loss.json) |",
        "| 64 | 32 | 5 | 93.8% | 0.0% | 3.1% | 0.0% | 0 | coarse |",
        "![Forgetting curve](curve.png)",
        "| Llama | 1179 | 69,219,072 |",
        "`python -m scripts.bench.generate` on AMD EPYC, torch 2.13.0: [speed.json](speed.json).",
        "| tokens in these steps | 3,686,400 |",
        "| loss after step 600 | 1.25 |",
        'model = AutoModelForCausalLM.from_pretrained("alice/llama", revision="v1")',
        "- It claims 512 tokens and was trained on rows of 256.",
        "| [speed.json](speed.json) |  | 0123abc |  |",
    ):
        assert line in text.splitlines(), line
    assert re.search(r"\| RoPE bound \| at 512 tokens: \w+ \| B\\_m < 0 at", text.replace("&lt;", "<"))
    assert "trust_remote_code" not in text and "after step 900" not in text
    assert fill(bundle, text) == text and not problems(bundle)
    missing = gaps(bundle)
    assert [gap for gap in missing if "still to write: the training text" in gap and "licence" in gap]
    assert "README.md: its head lacks `license`" in missing


def test_the_model_index_is_that_of_the_results(llama):
    data = ModelCard(with_card(build_bundle(llama), "alice/llama", "v1").text("README.md")).data
    assert data.model_name == "llama" and data.library_name == "transformers"
    figures = {(e.metric_name, e.metric_value) for e in eval_results([CURVE, PositionLoss([3.0, 2.5, 2.25, 2.0], 4)])}
    assert {(entry.metric_name, entry.metric_value) for entry in data.eval_results} == figures
    assert {entry.source_url for entry in data.eval_results} == {"https://huggingface.co/alice/llama/tree/v1"}


def test_without_a_tag_nothing_is_pinned_and_that_is_said(llama):
    bundle = with_card(build_bundle(llama), "alice/llama")
    assert 'from_pretrained("alice/llama")' in bundle.text("README.md")
    assert "give a commit" in bundle.text("README.md")
    assert any("it loads alice/llama without a revision" in gap for gap in gaps(bundle))


@pytest.mark.parametrize(
    "mode, sentence", [("paper", "the first 4 tokens of a segment are read before"), ("three_pass", "")]
)
def test_a_card_of_an_hmt_names_what_looks_ahead(tmp_path, mode, sentence):
    settings = HMTConfig(segment_length=8, sensory_tokens=2, recall_mode=mode)
    hmt = HMTWrapper.from_backbone(LlamaForCausalLM(LLAMA), settings)
    hmt.save_pretrained(tmp_path)
    text = with_card(build_bundle(tmp_path), "alice/hmt", "v1").text("README.md")
    assert ("**It looks ahead**" in text) == bool(sentence) and sentence in text
    assert "| claimed | any length | segment by segment | [config.json](config.json) |" in text
    assert "segments of 8 tokens and the 2 before them; 300 memory embeddings" in text


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_the_template_of_peft_is_replaced(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM(LLAMA), lora)
    model.peft_config["default"].base_model_name_or_path = "alice/llama"
    model.save_pretrained(tmp_path)
    assert "[More Information Needed]" in (tmp_path / "README.md").read_text()
    bundle = with_card(build_bundle(tmp_path), "alice/adapter", "v1")
    text, data = bundle.text("README.md"), ModelCard(bundle.text("README.md")).data
    assert "[More Information Needed]" not in text and not problems(bundle)
    assert (data.library_name, data.base_model, data.base_model_relation) == ("peft", "alice/llama", "adapter")
    assert "| base | alice/llama, at no fixed commit |" in text and "| LoRA | rank 2, alpha 8 |" in text
    assert 'AutoPeftModelForCausalLM.from_pretrained("alice/adapter", revision="v1")' in text
    assert "README.md: the base alice/llama is at no fixed commit" in gaps(bundle)


def test_a_card_without_places_stays_as_it_is(folder):
    (folder / "README.md").write_text("# Mine\nIt has 3 heads.\n")
    bundle = with_card(build_bundle(folder), "alice/fox", "v1")
    assert bundle.text("README.md") == "# Mine\nIt has 3 heads.\n" and not problems(bundle)
    (folder / "training.yaml").write_text("model: alice/base\n")
    missing = gaps(build_bundle(folder))
    assert "README.md: its head lacks `base_model`; training.yaml names alice/base" in missing
    assert "README.md: its head lacks `model-index`, and there are results" in missing


def test_figures_in_a_line_come_from_their_file(llama):
    line = (
        "After <!-- card: value training.yaml steps -->0<!-- end --> steps of <!-- card: parameters --><!-- end -->."
    )
    text = re.sub("<!-- card: .*? -->|<!-- end -->", "", fill(build_bundle(llama), line)).partition("\nAfter")[2]
    assert text == " 600 steps of 0.0119 million."


def test_the_command_writes_the_card_and_says_what_it_lacks(folder, capsys):
    (folder / "README.md").unlink()
    assert cli.main(["card", str(folder), "--repo", "alice/llama", "--tag", "v1"]) == 0
    out = capsys.readouterr().out
    assert "missing: README.md: its head lacks `license`" in out and "still to write: what it is good for" in out
    text = (folder / "README.md").read_text()
    for encoding in ("utf-8", "utf-8-sig"):  # some editors begin with a byte order mark
        (folder / "README.md").write_text(text, encoding=encoding)
        assert cli.main(["card", str(folder)]) == 0 and (folder / "README.md").read_text() == text
    assert cli.main(["card", str(folder), "--tag", "v1"]) == 2


def test_results_on_registered_benchmarks_go_along(folder):
    (folder / ".eval_results").mkdir()
    entry = {"dataset": {"id": "alice/benchmark", "task_id": "recall"}, "value": 0.5}
    (folder / ".eval_results" / "recall.yaml").write_text(yaml.safe_dump([entry]))
    bundle = build_bundle(folder)
    assert ".eval_results/recall.yaml" in bundle.files and not problems(bundle)


# Mistakes, and what the linter says.


def adding(text, file="README.md"):
    def mistake(folder):
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text((path.read_text() if path.exists() else "") + text)
        lint.check(build_bundle(folder))

    return mistake


def replacing(old, new, file="README.md"):
    def mistake(folder):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))
        lint.check(build_bundle(folder))

    return mistake


def writing(text, file):
    def mistake(folder):
        (folder / file).write_text(text)
        lint.check(build_bundle(folder))

    return mistake


def with_another_curve(folder):
    ForgettingCurve(CURVE.points, {"seed": 0}).save(folder / "curve.json")
    lint.check(build_bundle(folder))


def without(name):
    def mistake(folder):
        (folder / name).unlink()
        lint.check(build_bundle(folder))

    return mistake


def filling(text):
    return lambda folder: fill(build_bundle(folder), text)


TOKEN = "hf_" + "a" * 34
MISTAKES = [
    refused(
        "a figure in prose", adding("\nIt reads 5000 tokens."), "5000 in 'It reads 5000 tokens.' comes from no file"
    ),
    refused(
        "a figure that was changed", replacing("| 1 of width 32 |", "| 8 of width 32 |"), "not what their files say"
    ),
    refused("another result", with_another_curve, "not what their files say"),
    refused("another model-index", replacing("value: 64", "value: 9000"), "model-index has 9000 .* file 64"),
    refused(
        "a place that does not exist", filling("<!-- card: magic -->\n<!-- end -->"), "place 'magic'; the places are"
    ),
    refused(
        "a place without an end",
        filling("<!-- card: facts -->\nMine.\n<!-- card: cost --><!-- end -->"),
        "facts --> alone",
    ),
    refused("a list of settings", writing("- 1\n", "training.yaml"), "training.yaml holds no settings"),
    refused("a number in the log", adding("3\n", "training_log.jsonl"), "has a line that is no object"),
    refused("figures of no script", filling("<!-- card: measured curve.json -->\n<!-- end -->"), "not among the meas"),
    refused("a place with too much", filling("<!-- card: facts x -->\n<!-- end -->"), "too many positional"),
    refused("a value of no file", filling("<!-- card: value x.json a --><!-- end -->"), "x.json, which is not among"),
    refused(
        "a value of no key", filling("<!-- card: value config.json a.b --><!-- end -->"), "config.json has no a.b"
    ),
    refused("an unknown licence", replacing("license: apache-2.0", "license: apache2"), "license 'apache2' is none"),
    refused(
        "a task of nobody",
        writing("---\nlicense: mit\npipeline_tag: text-gen\n---\n", "README.md"),
        "pipeline_tag 'text-gen' is no task",
    ),
    refused("a licence of one's own", replacing("license: apache-2.0", "license: other"), "license_name does not say"),
    refused(
        "a head that is no YAML", replacing("license: apache-2.0", "license: ["), "head of README.md cannot be read"
    ),
    refused("a model-index without values", replacing("value: 64", "worth: 64"), "head of README.md cannot be read"),
    refused("a link to nothing", adding("\n[log](log.txt)"), "links to log.txt"),
    refused("a picture in HTML that is not there", adding('\n<img src="x.png">'), "links to x.png"),
    refused("a link out of the repository", adding("\n[code](../../README.md)"), r"links to \.\./\.\./README\.md"),
    refused("a picture that was removed", without("curve.png"), "links to curve.png"),
    refused("code that does not parse", adding("\n```python\nx = (\n```\n"), "Python does not parse"),
    refused("a token in the card", adding(f"\n`{TOKEN}`"), "README.md holds a token"),
    refused("a token in the log", adding(json.dumps({"key": TOKEN}), "training_log.jsonl"), "jsonl holds a token"),
    refused("a path in the card", adding("\n`/home/alice/models`"), "names /home/alice/models, a path of one machine"),
    refused(
        "a path in the settings", adding("data: /mnt/corpus\n", "training.yaml"), "training.yaml names /mnt/corpus"
    ),
    refused("a path in a result", replacing('"a novel"', '"/scratch/novel"', "curve.json"), "names /scratch/novel"),
    refused(
        "results of no benchmark", adding("- value: 1\n", ".eval_results/x.yaml"), "no list of results as the Hub"
    ),
    refused("results that are no list", adding("value: 1\n", ".eval_results/x.yaml"), "no list of results as the Hub"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes(mistake, folder, record_property):
    record_property("mistake", mistake.check(folder))


def test_the_token_in_use_is_noticed_whatever_it_looks_like(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "no-usual-token")
    (folder / "README.md").write_text("# x\nno-usual-token\n")
    assert problems(build_bundle(folder)) == [
        "README.md holds a token or key; remove it, and revoke it if it was ever published"
    ]


@pytest.mark.parametrize(
    "line, pinned",
    [
        ('evaluate.load("alice/forgetting_curve")', False),
        ('evaluate.load("alice/forgetting_curve", revision="main")', False),
        ('evaluate.load("alice/forgetting_curve", revision="v1")', True),
        ('evaluate.load("forgetting_curve")', True),
        ('get_kernel("alice/kernel", version=1)', True),
        ('AutoModel.from_pretrained("alice/fox", trust_remote_code=True)', False),
    ],
)
def test_code_is_loaded_by_its_revision(folder, line, pinned):
    (folder / "README.md").write_text(f"# x\n```python\nx = {line}\n```\n")
    assert any("without a revision" in gap for gap in gaps(build_bundle(folder))) != pinned


@pytest.mark.parametrize("template", [TEMPLATE, *ROOT.glob("model_cards/templates/*.md")], ids=lambda path: path.stem)
def test_every_place_of_a_template_exists(folder, template):
    text = template.read_text()
    assert len(PLACE.findall(text)) == text.count("<!-- card: ") == text.count("<!-- end -->")
    assert "<!-- Write: " in fill(build_bundle(folder), text) and ModelCard(text).data.tags != []
