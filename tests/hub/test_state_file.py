"""What an HMT remembers of a text, as it is pushed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx import HMTConfig, HMTWrapper
from hf_longctx.hmt.reading import describe, read_text, save
from hf_longctx.hub import build_state, check, missing_fields


COMMIT = "0123456789abcdef" * 2 + "01234567"
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)
EVIL = "x | <img src=x onerror=alert(1)> [a](javascript:x)\n# y"


def tokenizer(text, **options):
    return {"input_ids": torch.arange(len(text))[None] % 61}


@pytest.fixture(scope="module")
def hmt():
    model = HMTWrapper.from_backbone(
        LlamaForCausalLM(LlamaConfig(**SIZES)), HMTConfig(segment_length=8, sensory_tokens=2)
    )
    model.config.name_or_path = "alice/hmt"
    return model.eval()


@pytest.fixture
def file(hmt, tmp_path):
    text, path = "a novel of 40 letters, which are tokens.", tmp_path / "state"
    read_text(hmt, tokenizer, text, path, name="novel.txt", revision=COMMIT)
    return path


def test_the_card_names_model_and_text(file):
    bundle = build_state(file, "alice/novel", "v1")
    check(bundle)
    assert missing_fields(bundle) == ["README.md: its head lacks `license`"]
    assert set(bundle.files) == {"state.safetensors", "README.md", "hf_longctx.json"}
    text = bundle.text("README.md")
    for line in (
        f"| model | alice/hmt at {COMMIT} |",
        "| text | novel.txt, 40 tokens |",
        f"| sha256 of the text, in UTF-8 | {describe(file)['sha256']} |",
        "| memories | 5, of 5 segments |",
        'state = load_state("alice/novel@v1", model)',
        f'hf-longctx read alice/hmt --revision {COMMIT} alice/novel@v1 "And then"',
    ):
        assert line in text.splitlines(), line
    assert "give a commit" in build_state(file, "alice/novel").text("README.md") and "give a commit" not in text


def test_the_card_says_which_tokens_the_file_holds(file, hmt, tmp_path):
    assert "holds the last tokens of the text as they are" in build_state(file, "alice/novel").text("README.md")
    config = HMTConfig(segment_length=8, sensory_tokens=2, recall_tokens=4)
    model = HMTWrapper.from_backbone(hmt.backbone, config).eval()
    model.config.name_or_path = "alice/hmt"
    path = tmp_path / "with_tokens"
    read_text(model, tokenizer, "a" * 44, path, revision=COMMIT)
    assert load_file(path)["memory.search.ids"].flatten().tolist() == [*range(40)]
    assert "holds the tokens of all its memories" in build_state(path, "alice/novel").text("README.md")


def test_a_name_of_a_text_is_shown_as_text(file, hmt):
    save(read_text(hmt, tokenizer, "x"), hmt, file, describe(file) | {"text": EVIL, "tokens": 1})
    text = build_state(file, "alice/novel").text("README.md")
    assert "&lt;img" in text and "<img" not in text and "\n# y" not in text and "\\[a\\](javascript" in text


@pytest.mark.parametrize(
    "about, says",
    [
        ({"tokens": 41}, "has read 40 of 41 tokens; the same command reads the rest"),
        (
            {"model": "/data/hmt"},
            "needs /data/hmt, which is not a name on the Hub. Push that model first, and read the text",
        ),
        ({"revision": None}, "without a commit on the Hub. Push the model, and read"),
        ({"revision": EVIL}, "is not the memory of a document"),
        ({"sha256": EVIL}, "is not the memory of a document"),
        ({"model": 3}, "is not the memory of a document"),
    ],
    ids=str,
)
def test_what_nobody_could_load_is_refused(file, hmt, about, says):
    save(read_text(hmt, tokenizer, "a" * 40), hmt, file, describe(file) | about)
    with pytest.raises(ValueError, match=says):
        build_state(file, "alice/novel")


def test_secrets_and_damage_are_refused(file, hmt):
    save(read_text(hmt, tokenizer, "a" * 40), hmt, file, describe(file) | {"text": "hf_" + "a" * 34})
    with pytest.raises(ValueError, match=r"state\.safetensors holds a token"):
        check(build_state(file, "alice/novel"))
    tensors = load_file(file)
    tensors["memory.bank.embeddings"][0, 0, 0] = torch.nan
    save_file(tensors, file, metadata={"about": json.dumps(describe(file))})
    with pytest.raises(ValueError, match=r"NaN in memory\.bank\.embeddings"):
        build_state(file, "alice/novel")
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match="is not the memory of a document"):
        build_state(file, "alice/novel")
