"""Cards: a generated card takes its figures from files, a hand-written card stays, and wrong metadata are refused."""

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from mistakes import refused
from safetensors.torch import save_file
from tiny_tokenizer import save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper, cli
from hf_longctx.hub import build_bundle, check, missing_fields, with_card
from hf_longctx.hub.card import GENERATED
from hf_longctx.metrics import CurvePoint, ForgettingCurve, PositionLoss, rope_report
from hf_longctx.metrics.report.card import eval_results


ROOT = Path(__file__).resolve().parents[2]
CARDS = sorted(path.parent for path in ROOT.glob("model_cards/*/config.json"))
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)
LLAMA = LlamaConfig(**SIZES, max_position_embeddings=512)
CURVE = ForgettingCurve.of_points(
    [CurvePoint(64, [30] * 5, [1] * 5), CurvePoint(128, [5, 6, 5, 6, 5], [5, 5, 6, 5, 6])],
    {"seed": 3, "repeats": 5, "corpus": "a novel"},
)
BENCHMARK = {
    "command": "python -m scripts.bench.generate",
    "commit": "0123abc",
    "machine": {"device": "AMD EPYC"},
    "versions": {"torch": "2.13.0"},
    "rows": [{"name": "Llama", "prefill_tokens_per_s": 1178.92, "parameters": 69219072}],
    "evaluations": [
        {"task_type": "text-generation", "dataset_type": "recall", "dataset_name": "Facts"}
        | {"metric_type": "accuracy", "metric_name": "answers", "metric_value": 0.75}
    ],
}
SAMPLE = {"prompt": "She said:", "text": "\n# *No*.", "tokens": [1], "settings": {"seed": 3}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama with everything that a card can show."""
    folder = tmp_path_factory.mktemp("cards") / "llama"
    LlamaForCausalLM(LLAMA).save_pretrained(folder)
    CURVE.save(folder / "curve.json")
    (folder / "curve.png").write_bytes(b"picture")
    PositionLoss.of_mean([3.0, 2.5, 2.25, 2.0], 4, {"corpus": "a novel"}).save(folder / "loss.json")
    rope_report(LLAMA, minimum_base=False).save(folder / "rope.json")
    (folder / "speed.json").write_text(json.dumps(BENCHMARK))
    (folder / "sample.json").write_text(json.dumps(SAMPLE))
    settings = {"steps": 600, "batch_tokens": 6144, "sequence_length": 256, "learning_rate": 3e-3, "seed": 7}
    (folder / "training.yaml").write_text(yaml.safe_dump(settings))
    (folder / "training_log.jsonl").write_text(
        '{"step": 900, "eval_loss": 7}\n{"step": 300, "loss": 2.5}\n{"step": 600, "loss": 1.25}\n'
    )
    return folder


@pytest.fixture(scope="module")
def card(llama):
    """Return a card that is complete except for prose."""
    text = with_card(build_bundle(llama), "alice/llama", "v1").text("README.md")
    return text.replace("library_name:", "license: apache-2.0\nlibrary_name:")


@pytest.fixture
def folder(llama, card, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "model", copy_function=os.link)
    (folder / "README.md").write_text(card)
    return folder


@pytest.mark.parametrize("folder", CARDS, ids=lambda path: path.name)
def test_cards_of_models_are_complete_and_say_what_their_files_say(folder):
    bundle = build_bundle(folder)
    check(bundle)
    assert not bundle.left_out and not missing_fields(bundle) and GENERATED.search(bundle.text("README.md"))
    assert with_card(bundle).text("README.md") == bundle.text("README.md"), (
        f"run hf-longctx push {folder} NAME --write-card"
    )


def test_a_new_card_shows_all_that_its_files_hold(llama):
    text = with_card(build_bundle(llama), "alice/llama").text("README.md")
    assert 'from_pretrained("alice/llama")' in text and "give a commit" in text
    bundle = with_card(build_bundle(llama), "alice/llama", "v1")
    text = bundle.text("README.md")
    assert "give a commit" not in text and "alice/llama" not in with_card(bundle, "bob/llama", "v2").text("README.md")
    for line in (
        "# llama",
        "| parameters | 11,936, including 3,904 of embeddings |",
        "| positional encoding | RoPE, base 10000 |",
        "| claimed | 512 tokens | `max_position_embeddings` | [config.json](config.json) |",
        "| trained | 256 tokens | training sequences | [training.yaml](training.yaml) |",
        "| measured | coarse memory length, at least (tokens, 95 % CI): 64 | at least 64 (95 % CI); 2 lengths, 5 repeats; the paper's, of means: 64 | "
        "[curve.json](curve.json) |",
        "| measured | loss at 4 tokens, nats: 2 | 4 sequences | [loss.json](loss.json) |",
        "| 64 | 32 | 0 of 5 | 93.8% | 93.8% | 0.0% | 3.1% | 0.0% | 0 | coarse |",
        "![Forgetting curve](curve.png)",
        "| Llama | 1179 | 69,219,072 |",
        "> She said:",
        "> # \\*No\\*.",
        "From [sample.json](sample.json), generated with seed 3.",
        "`python -m scripts.bench.generate` on AMD EPYC, torch 2.13.0: [speed.json](speed.json).",
        "| tokens in these steps | 3,686,400 |",
        "| loss after step 600 | 1.25 |",
        'model = AutoModelForCausalLM.from_pretrained("alice/llama", revision="v1")',
        "- The model claims 512 tokens and was trained on sequences of 256 tokens.",
        "| [speed.json](speed.json) |  | 0123abc |  |",
    ):
        assert line in text.splitlines(), line
    assert re.search(r"\| RoPE bound \| at 512 tokens: \w+ \| B\\_m < 0 at", text.replace("&lt;", "<"))
    assert "trust_remote_code" not in text and "after step 900" not in text
    check(bundle)
    missing = missing_fields(bundle)
    assert [line for line in missing if 'under "## Training": the training data' in line]
    assert "README.md: the metadata lacks `license`" in missing


@pytest.mark.parametrize("cache", ["full", "quantized:4", "kvpress.SnapKVPress:0.5"])
def test_a_result_of_a_cache_is_not_published(folder, cache):
    """The card shows neither the result nor its figure, because the number is not the model's own."""
    before = build_bundle(folder)
    loss = PositionLoss.of_mean([9.0, 8.5], 4, {"corpus": "a novel", "cache": cache})
    loss.save(folder / "compressed.json")
    (folder / "compressed.png").write_bytes(b"picture")
    bundle = build_bundle(folder)
    assert {*bundle.left_out} == {*before.left_out, "compressed.json", "compressed.png"}
    assert bundle.files.keys() == before.files.keys() and bundle.results.keys() == before.results.keys()
    assert with_card(bundle, "alice/llama", "v1").text("README.md") == with_card(before, "alice/llama", "v1").text(
        "README.md"
    )
    assert not eval_results([loss]) and eval_results([loss.with_settings(cache=None)])


def test_the_model_index_is_that_of_the_results(llama):
    data = ModelCard(with_card(build_bundle(llama), "alice/llama", "v1").text("README.md")).data
    assert data.model_name == "llama" and data["library_name"] == "transformers"
    assert data.widget == [{"text": SAMPLE["prompt"], "output": {"text": SAMPLE["text"]}}]
    figures = {
        (e.metric_name, e.metric_value) for e in eval_results([CURVE, PositionLoss.of_mean([3.0, 2.5, 2.25, 2.0], 4)])
    }
    figures |= {("answers", 0.75)}
    assert {(entry.metric_name, entry.metric_value) for entry in data.eval_results} == figures
    assert {entry.source_url for entry in data.eval_results} == {"https://huggingface.co/alice/llama/tree/v1"}


@pytest.mark.parametrize(
    "settings, recall",
    [
        ({"recall_mode": "paper"}, "paper"),
        (
            {"recall_tokens": 4, "neural_cache_weight": 0.1},
            r"single\_pass; 4 retrieved tokens are re-read; neural cache with weight 0.1",
        ),
    ],
    ids=str,
)
def test_a_card_of_an_hmt_names_what_looks_ahead(tmp_path, settings, recall):
    config = HMTConfig(segment_length=8, sensory_tokens=2, **settings)
    HMTWrapper.from_backbone(LlamaForCausalLM(LLAMA), config).save_pretrained(tmp_path)
    text = with_card(build_bundle(tmp_path), "alice/hmt", "v1").text("README.md")
    sentence = '**The model looks ahead** (`recall_mode="paper"`): it reads the first 4 tokens of a segment before'
    assert (sentence in text) == (recall == "paper")
    assert "| claimed | any length | segment by segment | [config.json](config.json) |" in text
    memory = f"300 memory embeddings retained; recall: {recall} |"
    assert f"segments of 8 tokens, plus 2 sensory tokens; {memory}" in text


def test_a_card_vouches_for_the_code_of_the_package_only(tmp_path):
    FoxForCausalLM(FoxConfig(**SIZES)).save_pretrained(tmp_path)
    (tmp_path / "modeling_fox.py").write_text("import os\n")  # is not what is pushed
    sentence = "They are files of the package hf-longctx"
    assert sentence in with_card(build_bundle(tmp_path)).text("README.md")
    save_tokenizer(tmp_path)
    lines = with_card(build_bundle(tmp_path), "alice/fox", "v1").text("README.md")
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):  # without the argument, loading would ask for trust
        assert f'{name}.from_pretrained("alice/fox", revision="v1", trust_remote_code=True)' in lines
    (tmp_path / "words.py").touch()
    tokenizer = {"auto_map": {"AutoTokenizer": ["words.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    text = with_card(build_bundle(tmp_path)).text("README.md")
    assert "runs the Python files of this repository" in text and sentence not in text


def test_a_person_s_card_stays_as_it_is(folder, capsys):
    write(folder / "README.md", "# Mine\nIt has 3 heads.\n")
    assert cli.main(["push", str(folder), "alice/fox", "--write-card"]) == 0
    assert "is hand-written" in capsys.readouterr().out
    assert (folder / "README.md").read_text() == "# Mine\nIt has 3 heads.\n"


def test_notes_become_parts_of_the_sections_of_their_name(folder):
    notes = "For tests.\n\n## Use and limits\nNone.\n\n## Thanks\nTo {{ config }}.\n"
    write(folder / "card_notes.md", notes)
    bundle = with_card(build_bundle(folder))
    text = bundle.text("README.md")
    assert "# llama\n\nFor tests.\n\n|" in text and "## Use and limits\n\nNone.\n\n- The model claims" in text
    assert "## Thanks\n\nTo {{ config }}.\n" in text, "notes are text, and no template"
    assert "card_notes.md" in bundle.files
    assert not [line for line in missing_fields(bundle) if "Use and limits" in line]


EVIL = "x | <img src=x onerror=alert(1)> [a](javascript:x)\n# y"


def evil(value):
    """Return a JSON document in which `EVIL` replaces each string, except the name of the metric."""
    if isinstance(value, dict):
        return {key: inner if key == "metric" else evil(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [evil(inner) for inner in value]
    return EVIL if isinstance(value, str) else value


@pytest.mark.parametrize("file", ["speed.json", "rope.json", "sample.json"])
def test_a_string_of_a_file_is_shown_as_text(file, folder):
    """The string does not add HTML, a link or a heading to the card, in any field."""
    write(folder / file, json.dumps(evil(json.loads((folder / file).read_text()))))
    (folder / "README.md").unlink()
    CURVE.save(folder / "x](javascript:alert(1)).json")  # a name that no card can link to
    text = with_card(build_bundle(folder)).text("README.md").partition("written by")[2]
    assert "onerror" in text
    text = re.sub(r"`[^`\n]*`", "", text)  # HTML in code is not interpreted
    assert not re.search(r"<img|\n# y|(?<!\\)\]\(javascript", text)


def test_the_command_writes_the_card_and_says_what_it_lacks(folder, capsys):
    (folder / "README.md").unlink()
    assert cli.main(["push", str(folder), "alice/llama", "--tag", "v1", "--write-card"]) == 0
    out = capsys.readouterr().out
    assert "missing: README.md: the metadata lacks `license`" in out and "intended use" in out
    text = (folder / "README.md").read_text()
    for encoding in ("utf-8", "utf-8-sig"):  # some editors begin with a byte order mark
        (folder / "README.md").write_text(text, encoding=encoding)
        assert cli.main(["push", str(folder), "alice/llama", "--tag", "v1", "--write-card"]) == 0
        assert (folder / "README.md").read_text() == text
    write(folder / "curve.json", ForgettingCurve.of_points(CURVE.points[:1], CURVE.settings).to_json())
    assert cli.main(["push", str(folder), "alice/llama", "--tag", "v1", "--write-card"]) == 0
    assert "| 128 | 64 |" in text and "| 128 | 64 |" not in (folder / "README.md").read_text()


# Mistakes, and what the linter says.


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # a hard link
    path.write_text(text)


def replacing(old, new, file):
    def mistake(folder):
        text = (folder / file).read_text()
        assert old in text
        write(folder / file, text.replace(old, new, 1))
        check(build_bundle(folder))

    return mistake


TOKEN = "hf_" + "a" * 34
SECRETS = [
    *(
        prefix + "aB3dE5fG7hI9" * 5
        for prefix in ("hf_", "sk-", "sk-ant-", "ghp_", "github_pat_", "glpat-", "npm_", "x_hf_")
    ),
    "pypi-" + "AgEIcHlwaS5vcmc" * 5,
    "xoxb-" + "123456789012-1234567890123-aBcDeFgH",
    "AIza" + "SyA1bC2dE3fG4hI5jK6lM7nO8pQ9rS0tU1v",
    "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    "WANDB_API_KEY=" + "0123456789abcdef" * 2,
    "AWS_SECRET_ACCESS_KEY=" + "wJalrXUtnFEMI/K7MDENG/bPxRfiCY",
    ".".join(["eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxMjM0NTY3ODkwIn0", "SflKxwRJSMeKKF2QT4fwpM"]),
    "https://alice:" + "hunter2@example.org/x",
    json.dumps({"api_key": "0123456789abcdef"}),
]
PATHS = [
    *(
        f"/{root}/x"
        for root in ("home/alice", "Volumes", "data2", "tmp", "gpfs", "content/drive", "fsx", "pscratch", "projects")
    ),
    *("~/x", "C:/x/y", r"C:\x", r"\\server\x", json.dumps(r"\\server\x"), "file:///x"),
]
HARMLESS = (
    "HF_TOKEN=$HF_TOKEN ~/.cache https://alice@example.org/data/x s3://data/x and/or/home/x a\\b tokens: 1234567890123456 "
    "sk-learn hf_longctx --max-new-tokens=64 'eos_token': '<|im_end|>' https://example.org:8000/x@y 12:00/home"
)


@pytest.mark.parametrize(
    "file, text",
    [
        ("training.yaml", "steps: [1"),
        ("training.yaml", "- ab\n- cd"),
        ("training_log.jsonl", "[1]"),
        ("training_log.jsonl", '{"step":'),
        ("speed.json", '{"command": "", "machine": {}, "versions": {}, "rows": [], "evaluations": [{"value": 1}]}'),
    ],
)
def test_a_damaged_file_is_named(file, text, folder):
    write(folder / file, text)
    (folder / "README.md").unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(file)} is damaged"):
        with_card(build_bundle(folder))


def test_comments_without_an_end_do_not_take_minutes(folder):
    write(folder / "README.md", "# x\n" + "<!--" * 50_000)
    begun = time.process_time()
    check(build_bundle(folder))
    assert time.process_time() - begun < 30


HEAD, TITLE, RESULT = "license: apache-2.0", "# llama\n", "    dataset:\n"
MISTAKES = [
    refused(f"{new!r} in {file}", replacing(old, new, file), message)
    for file, rows in {
        "README.md": [
            ("value: 64", "value: 9000", "is 9000 in model-index, but 64 in the result file"),
            ("value: 64", "worth: 64", "metadata of README.md cannot be read"),
            (HEAD, "license: [", "metadata of README.md cannot be read"),
            (HEAD, "license: apache2", "`license` must be .* got 'apache2'"),
            (HEAD, "license: other", "`license_name` is missing"),
            ("pipeline_tag: text-generation", "pipeline_tag: text-gen", "`pipeline_tag` must be a text task"),
            (HEAD, f"{HEAD}\ndatasets: [null]", r"`datasets` in its metadata is \[None\]; the Hub expects str"),
            (HEAD, f"{HEAD}\nlanguage: [en, german]", "`language` must be an ISO 639 code .* got 'german'"),
            (HEAD, f"{HEAD}\nlanguage: no", "`language` in its metadata is False"),  # Norwegian, in YAML
            (HEAD, f"{HEAD}\nbase_model: ../llama", "`base_model` must be a name on the Hub, got '../llama'"),
            (HEAD, f"{HEAD}\ndatasets: [My own novels]", "`datasets` must be a name on the Hub, got 'My own novels'"),
            (RESULT, f"{RESULT}      config: 3\n", "`dataset_config` in model-index is 3"),
            (TITLE, f"{TITLE}[log](log.txt)", "links to log.txt"),
            (TITLE, f'{TITLE}<img src="x.png">', "links to x.png"),
            (TITLE, f"{TITLE}[code](../../README.md)", r"links to \.\./\.\./README\.md"),
        ],
        "curve.json": [('"a novel"', '"/scratch/novel"', "contains the local path /scratch/novel")],
    }.items()
    for old, new, message in rows
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_mistakes(mistake, folder):
    mistake.check(folder)


def test_secrets_and_paths_of_a_machine_are_refused(folder):
    bundle = build_bundle(folder)
    key, path = "contains a token or key: remove it, and revoke it", "contains the local path .*: replace it"
    for words, says in [*((secret, key) for secret in SECRETS), *((f"--data {name}", path) for name in PATHS)]:
        commands = {"training.txt": f"python train.py {words}\n".encode()}
        with pytest.raises(ValueError, match=rf"training\.txt {says}"):
            check(replace(bundle, files=bundle.files | commands))
            pytest.fail(f"{words} is not noticed")


def test_every_file_is_searched_for_secrets(folder):
    for file in ("LICENSE.txt", "chat_template.jinja", "README.md", "card_notes.md"):
        write(folder / file, TOKEN)
        with pytest.raises(ValueError, match=f"{file} contains a token"):
            check(build_bundle(folder))
        write(folder / file, HARMLESS)
        check(build_bundle(folder))
    write(folder / "LICENSE.env", TOKEN)
    assert "LICENSE.env" in build_bundle(folder).left_out
    (folder / "model.safetensors").unlink()
    (folder / "chat_template.jinja").unlink()
    model = LlamaForCausalLM(LLAMA)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt", "key": TOKEN})
    save_tokenizer(folder)
    write(folder / "tokenizer_config.json", '{"special_tokens_map_file": "/home/alice/x.json"}')
    with pytest.raises(
        ValueError, match=r"model\.safetensors contains a token.*tokenizer_config.json contains the local"
    ):
        check(build_bundle(folder))


def test_the_token_in_use_is_noticed_whatever_it_looks_like(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "no-usual-token")
    write(folder / "README.md", "# x\nno-usual-token\n")
    with pytest.raises(ValueError, match=r"README\.md contains a token or key: remove it, and revoke it"):
        check(build_bundle(folder))
