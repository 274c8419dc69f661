"""A hash of a tokenizer covers what changes ids or their ends, and nothing else."""

import json

import pytest
from demo_model import DEMO
from tokenizers import AddedToken
from transformers import AutoTokenizer, ByT5Tokenizer, CTRLTokenizer, ProphetNetTokenizer

from hf_longctx.training import FinetuneConfig
from hf_longctx.training.data import load_datasets
from hf_longctx.training.digests import digest_of_source, digest_of_tokenizer


TEXT = "The Fox forgets, e.g. cafe\u0301s."


@pytest.fixture
def fast():
    return AutoTokenizer.from_pretrained(DEMO)


def backend(change):
    """Change the tokenizer.json of a tokenizer."""

    def edit(tokenizer, folder):
        tokenizer.save_pretrained(folder)
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return AutoTokenizer.from_pretrained(folder)

    return edit


def attribute(**values):
    def edit(tokenizer, folder):
        for name, value in values.items():
            setattr(tokenizer, name, value)
        return tokenizer

    return edit


def add_token(tokenizer, folder):
    tokenizer.add_tokens([AddedToken("<new>", lstrip=True)])
    return tokenizer


FIRST, SECOND = 300, 301  # ids of two tokens
EFFECTIVE = {
    "normalizer": backend(lambda content: content.update(normalizer={"type": "Lowercase"})),
    "pre-tokenizer": backend(lambda content: content.update(pre_tokenizer={"type": "Whitespace"})),
    "merges": backend(lambda content: content["model"]["merges"].pop()),
    "post-processor": backend(
        lambda content: content.update(
            post_processor={"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}
        )
    ),
    "swapped ids": backend(lambda content: swap(content["model"]["vocab"])),
    "added token": add_token,
    "EOS": attribute(eos_token="<s>"),
    "BOS": attribute(bos_token="</s>"),
    "chat template": attribute(chat_template="{{ messages }}"),
    "one of two templates": attribute(chat_template={"default": "a", "tool_use": "b"}),
    "padding token that the template writes": attribute(chat_template="{{ pad_token }}", pad_token="<s>"),
    "special tokens as text": attribute(split_special_tokens=True),
}


def swap(vocabulary):
    names = {number: name for name, number in vocabulary.items()}
    vocabulary[names[FIRST]], vocabulary[names[SECOND]] = SECOND, FIRST


def pad_and_cut(tokenizer, folder):
    tokenizer([TEXT, "a"], truncation=True, max_length=3, padding="max_length", return_tensors="np")
    return tokenizer


def in_another_folder(tokenizer, folder):
    tokenizer.save_pretrained(folder / "other")
    return AutoTokenizer.from_pretrained(folder / "other")


WITHOUT_EFFECT = {
    "another folder": in_another_folder,
    "a call": pad_and_cut,
    "length and side": attribute(model_max_length=7, padding_side="left", truncation_side="left"),
    "padding token": attribute(pad_token="<s>"),
    "decoding": attribute(clean_up_tokenization_spaces=True),
    "decoder": backend(lambda content: content.update(decoder=None)),
}


def test_what_changes_ids_or_their_ends_changes_the_hash(fast, tmp_path):
    found = {"unchanged": digest_of_tokenizer(fast)}
    for name, edit in EFFECTIVE.items():
        (tmp_path / name).mkdir()
        found[name] = digest_of_tokenizer(edit(AutoTokenizer.from_pretrained(DEMO), tmp_path / name))
    assert len(set(found.values())) == len(found), found


@pytest.mark.parametrize("change", WITHOUT_EFFECT)
def test_nothing_else_changes_the_hash(change, fast, tmp_path):
    expected = digest_of_tokenizer(fast)
    assert digest_of_tokenizer(WITHOUT_EFFECT[change](fast, tmp_path)) == expected


def ctrl(folder, merges=("t h", "th e</w>"), **options):
    words = ["<unk>", "t@@", "h@@", "e", "the", "f", "f@@", "o@@", "x"]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return CTRLTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), **options)


def prophetnet(folder, words=("[PAD]", "[UNK]", "[SEP]", "[CLS]", "[MASK]", "the", "fox", "Fox"), **options):
    folder.mkdir(exist_ok=True)
    (folder / "prophetnet.tokenizer").write_text("\n".join(words) + "\n")
    return ProphetNetTokenizer(str(folder / "prophetnet.tokenizer"), **options)


def byt5(folder, **options):
    return ByT5Tokenizer(**options)


@pytest.mark.parametrize(
    "make, changes",
    [
        (ctrl, [dict(merges=("t h",)), dict(unk_token="x"), dict(eos_token="x")]),
        (prophetnet, [dict(words=("[PAD]", "fox", "[UNK]")), dict(do_lower_case=False), dict(sep_token="fox")]),
        (byt5, [dict(extra_ids=3), dict(eos_token="<end>")]),
    ],
)
def test_tokenizers_in_python_have_a_hash_too(make, changes, tmp_path):
    first = make(tmp_path / "first")
    expected = digest_of_tokenizer(first)
    pad_and_cut(first, None) if first.pad_token else first(TEXT)
    first.model_max_length, first.padding_side = 7, "left"
    assert digest_of_tokenizer(first) == digest_of_tokenizer(make(tmp_path / "again")) == expected
    first.save_pretrained(tmp_path / "saved")
    assert digest_of_tokenizer(type(first).from_pretrained(tmp_path / "saved")) == expected
    others = {digest_of_tokenizer(make(tmp_path / f"{n}", **change)) for n, change in enumerate(changes)}
    assert len(others | {expected}) == len(changes) + 1


def test_tokens_are_packed_again_after_the_eos_or_the_kind_of_file_changed(fast, tmp_path):
    def packed(name):
        run = FinetuneConfig(data=str(tmp_path / name), model="-", output_dir=str(tmp_path / "run"), max_length=8)
        load_datasets(run, fast, False)
        return {path.name for path in (tmp_path / "run" / "data").iterdir()}

    (tmp_path / "a.txt").write_text('{"text": "The fox forgets what it no longer needs. The fox forgets."}')
    first = packed("a.txt")
    assert packed("a.txt") == first and len(first) == 1
    (tmp_path / "a.txt").rename(tmp_path / "a.jsonl")
    second = packed("a.jsonl")
    assert len(second) == 2
    fast.eos_token = fast.convert_ids_to_tokens(FIRST)
    assert len(packed("a.jsonl")) == 3


def test_a_folders_hash_depends_on_the_names_of_its_files(tmp_path):
    (tmp_path / "a.txt").write_text("The fox")
    before = digest_of_source(tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / "a.jsonl")
    assert digest_of_source(tmp_path) != before
