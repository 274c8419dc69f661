"""Corpora: where texts come from, what happens without a hub, the cache of tokens."""

import sys
import time
import warnings

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_longctx import corpus
from hf_longctx.corpus import PG19, load_text, load_tokens, stdlib_text, tokenizer_hash


WORDS = ["<unk>", "first", "second", "third", "word"]


def words_tokenizer(words=WORDS):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


class Counted:
    """A tokenizer that keeps what it was given."""

    def __init__(self):
        self.texts, self.tokenizer = [], words_tokenizer()
        self.backend_tokenizer = self.tokenizer.backend_tokenizer

    def __call__(self, text, **options):
        self.texts.append(text)
        return self.tokenizer(text, **options)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache" / "hf_longctx" / "tokens"


@pytest.fixture
def hub(monkeypatch):
    """Makes `datasets` find what is in this dictionary: by name, splits of rows, or a function in the place of loading."""
    datasets = pytest.importorskip("datasets")
    found = {}

    def load_dataset(name, streaming):
        if name not in found:
            raise ConnectionError("no such dataset, or no network")
        if callable(found[name]):
            return found[name]()
        make = datasets.Dataset.from_list
        return {
            split: make(rows).to_iterable_dataset() if streaming else make(rows) for split, rows in found[name].items()
        }

    def dataset_info(api, name, timeout):
        if name not in found:
            raise ConnectionError("no network")
        if found[name] is silent:
            found[name]()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    return found


awake = []


def silent():
    time.sleep(60)
    awake.append("nobody should have waited for this")


# -- sources


def test_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("third")
    assert load_text(str(tmp_path)) == "first\n\nsecond"
    assert load_text(str(tmp_path / "b.txt")) == "second"
    assert load_tokens(words_tokenizer(), str(tmp_path)).tokens.tolist() == [1, 2]


@pytest.mark.parametrize("make, message", [("empty.txt", "holds no text"), ("folder/", r"holds no \*.txt file")])
def test_nothing_to_read(tmp_path, make, message):
    path = tmp_path / make
    if make.endswith("/"):
        path.mkdir()
    else:
        path.write_text(" \n")
    with pytest.raises(ValueError, match=message):
        load_text(str(path))
    with pytest.raises(ValueError, match=message):
        load_tokens(words_tokenizer(), str(path))


@pytest.mark.parametrize("offline", [True, False])
def test_dataset(hub, offline, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    hub["me/books"] = {"train": [{"text": "word"}], "test": [{"text": "first"}, {"text": " "}, {"text": "second"}]}
    hub["me/one-split"] = {"all": [{"text": "third"}]}
    assert load_text("me/books") == "first\n\nsecond"
    assert load_text("me/one-split") == "third"
    hub["me/pictures"] = {"test": [{"image": "first"}]}
    with pytest.raises(ValueError, match=r"dataset me/pictures has columns \['image'\]"):
        load_text("me/pictures")
    with pytest.raises(FileNotFoundError, match="me/missing is no file or folder, and load_dataset"):
        load_text("me/missing")


def test_no_more_is_read_than_needed(hub):
    read = []

    def rows():
        for i in range(9):
            read.append(i)
            yield {"text": "first second word"}

    hub["me/books"] = lambda: {"test": stream(rows())}
    assert load_tokens(words_tokenizer(), "me/books", at_least=7).tokens.tolist() == [1, 2, 4] * 3
    assert len(read) <= 4


def stream(rows):
    """As little of a streamed dataset as we use."""

    class Stream:
        column_names = ["text"]

        def __iter__(self):
            return rows

    return Stream()


# -- the default


def test_default_with_a_hub(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub[PG19] = {"train": [{"text": "word"}], "test": [{"text": "first second"}, {"text": "third"}]}
    assert load_tokens(words_tokenizer()) == (pytest.approx([1, 2, 3]), PG19)
    assert load_text("pg19") == "first second\n\nthird"
    assert load_text() == stdlib_text("held_out")


def hanging():
    silent()


def broken():
    def rows():
        raise OSError("reset by peer")
        yield

    return {"test": stream(rows())}


@pytest.mark.parametrize(
    "trouble", [None, silent, hanging, broken], ids=["unreachable", "silent", "hanging", "broken"]
)
def test_default_without_a_hub(hub, monkeypatch, trouble):
    monkeypatch.setattr(corpus, "PATIENCE", 0.05)
    if trouble:
        hub[PG19] = trouble
    tokens, name = load_tokens(words_tokenizer([*WORDS, "the"]))
    assert not awake
    assert name == "Python language reference, held-out part"
    assert len(tokens) > 1000


def test_default_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert load_tokens(words_tokenizer([*WORDS, "the"])).name.startswith("Python")
    with pytest.raises(ImportError, match=r"me/books is no file or folder; .*pip install 'hf-longctx\[training\]'"):
        load_text("me/books")


def test_the_held_out_text_is_not_trained_on():
    train = stdlib_text("train")
    paragraphs = [p.strip() for p in stdlib_text("held_out").split("\n\n") if len(p) > 200]
    assert len(paragraphs) > 50
    assert not any(p in train for p in paragraphs)
    with pytest.raises(ValueError, match="train"):
        stdlib_text("test")


# -- tokens


def test_a_tokenizer_of_another_language(tmp_path):
    (tmp_path / "text.txt").write_text("unknown words only")
    with pytest.raises(ValueError, match="into 3 tokens with 1 distinct ids; it does not seem to know this language"):
        load_tokens(words_tokenizer(), str(tmp_path / "text.txt"))


def test_tokens_are_made_once(tmp_path, cache):
    path, tokenizer = tmp_path / "text.txt", Counted()
    path.write_text("first second")
    expected = load_tokens(tokenizer, str(path)).tokens
    assert expected.dtype == np.int64
    for _ in range(2):
        assert load_tokens(tokenizer, str(path)).tokens.tolist() == expected.tolist() == [1, 2]
    assert tokenizer.texts == ["first second"]
    path.rename(tmp_path / "renamed.txt")
    load_tokens(tokenizer, str(tmp_path / "renamed.txt"))
    assert tokenizer.texts == ["first second"]
    path.write_text("second third")
    assert load_tokens(tokenizer, str(path)).tokens.tolist() == [2, 3]
    assert tokenizer.texts == ["first second", "second third"]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"\0" + data[1:], lambda data: b""])
def test_a_damaged_cache_is_made_anew(tmp_path, cache, damage):
    path, tokenizer = tmp_path / "text.txt", Counted()
    path.write_text("first second")
    load_tokens(tokenizer, str(path))
    (kept,) = (file for file in cache.rglob("*") if file.is_file())
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert load_tokens(tokenizer, str(path)).tokens.tolist() == [1, 2]
    assert kept.read_bytes() == whole
    assert len(tokenizer.texts) == 2
    assert [file for file in cache.rglob("*") if file.is_file()] == [kept]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("in the way")
    (tmp_path / "text.txt").write_text("first second")
    with pytest.warns(UserWarning, match="tokens are not kept") as caught:
        assert load_tokens(words_tokenizer(), str(tmp_path / "text.txt")).tokens.tolist() == [1, 2]
    assert len(caught) == 1


def test_tokenizers_are_told_apart(tmp_path):
    tokenizer = words_tokenizer()
    tokenizer.save_pretrained(tmp_path / "elsewhere")
    same = PreTrainedTokenizerFast.from_pretrained(tmp_path / "elsewhere")
    assert tokenizer_hash(same) == tokenizer_hash(tokenizer)
    same("first second", truncation=True, max_length=1)  # leaves its mark in the backend
    assert tokenizer_hash(same) == tokenizer_hash(tokenizer)
    swapped = words_tokenizer(["<unk>", "second", "first", "third", "word"])
    assert tokenizer_hash(swapped) != tokenizer_hash(tokenizer)


def test_a_slow_tokenizer(tmp_path):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    (tmp_path / "text.txt").write_text("first")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_tokens(tokenizer, str(tmp_path / "text.txt")).tokens.tolist() == [b + 3 for b in b"first"]
    assert tokenizer_hash(tokenizer) == tokenizer_hash(ByT5Tokenizer()) != tokenizer_hash(ByT5Tokenizer(extra_ids=3))


@pytest.mark.parametrize("folder", [False, True])
def test_a_text_in_another_encoding_is_named(tmp_path, folder):
    file = tmp_path / "latin.txt"
    file.write_bytes("Füchse".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not text in UTF-8"):
        load_text(str(tmp_path if folder else file))
