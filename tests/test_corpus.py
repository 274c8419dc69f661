"""Corpora: their sources, and the behavior without the Hub."""

import bz2
import gzip
import hashlib
import lzma
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_longctx.corpus import PG19, load_text, load_tokens, open_source, stdlib_text


WORDS = ["<unk>", "first", "second", "third", "word"]


def words_tokenizer(words=WORDS):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def hub(monkeypatch):
    """The datasets that the hub has: name to splits of rows."""
    datasets = pytest.importorskip("datasets")
    on_hub = {}

    def load_dataset(path, streaming):
        if path not in on_hub:
            raise ConnectionError("no such dataset, or no network")
        found = {split: datasets.Dataset.from_list(rows) for split, rows in on_hub[path].items()}
        return {split: rows.to_iterable_dataset() for split, rows in found.items()} if streaming else found

    def dataset_info(api, name, timeout):
        if name not in on_hub:
            raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    return on_hub


# -- sources


def test_files_and_folders(tmp_path):
    """A folder is read with its folders, by the first kind of file that there is."""
    for name, text in {"notes/b.md": "second", "z.md": "third", ".git/a.txt": "hidden", "picture.png": "PNG"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert load_text(str(tmp_path)) == "second\n\nthird"
    assert load_text(str(tmp_path / "z.md")) == "third"
    assert load_tokens(words_tokenizer(), str(tmp_path)).tokens.tolist() == [2, 3]
    (tmp_path / "notes" / "a.TXT.gz").write_bytes(gzip.compress("\ufefffirst\r\nsecond".encode()))
    assert load_text(str(tmp_path)) == "first\nsecond"


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "jsonl.gz", "csv"])
def test_tables_are_read_by_their_text(tmp_path, ending):
    pytest.importorskip("datasets")
    pandas, file = pytest.importorskip("pandas"), tmp_path / f"{'a' if ending.endswith('.gz') else '[1]'}.{ending}"
    rows = pandas.DataFrame({"text": ["first", None, "second"], "n": [1, 2, 3]})
    if ending.startswith("json"):
        rows.to_json(file, orient="records", lines=ending != "json")
    elif ending == "csv":
        rows.to_csv(file)
    else:
        rows.to_parquet(file)
    for source in (file, tmp_path):
        assert load_text(str(source)) == "first\n\nsecond"


# The error occurs in a later part of the file
ROWS = b"".join(
    b'{"text": "%s"}\n' % hashlib.sha512(bytes([i % 256, i // 256])).hexdigest().encode() for i in range(60000)
)
BAD_FILES = {
    "empty.txt": (b" \n", "does not contain text"),
    "folder/picture.png": (b"PNG", r"does not contain any of these files: \*.txt, \*.md"),
    "latin.txt": ("F\u00fcchse".encode("latin-1"), "latin.txt cannot be read as UTF-8 text"),
    "damaged.parquet": (b"PAR", "damaged.parquet cannot be read as parquet"),
    "columns.jsonl": (b'{"content": "x", "n": 1}\n', r"\['content', 'n'\]\. Rename"),
    "numbers.jsonl": (b'{"text": 3}\n', 'The column "text" of .*numbers.jsonl must contain strings, got int'),
    "half.jsonl": (b'{"text": "x"}\n{"text":\n', "cannot be read as json: "),
    "binary.txt": (b"ab\0cd", "binary.txt is a binary file"),
    "plain.txt.gz": (b"plain", "plain.txt.gz is not compressed with gzip, although its name ends in .gz"),
    "half.gz": (gzip.compress(b"plain")[:-9], "half.gz is an incomplete or damaged gzip file .*Fetch it again"),
    "half.jsonl.gz": (gzip.compress(ROWS)[:-90], "half.jsonl.gz cannot be read as json: .*end-of-stream marker"),
    "sum.txt.gz": (gzip.compress(b"plain")[:-8] + b"12345678", "sum.txt.gz is an incomplete or damaged gzip file"),
    "a.txt.xz": (lzma.compress(b"plain"), "a.txt.xz is compressed with xz. Decompress it first"),
    "a.jsonl.bz2": (bz2.compress(b"plain"), "a.jsonl.bz2 is compressed with bzip2. Decompress it first"),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd\x04\x00\x29\x00", "a.jsonl.zst is compressed with zstd"),
    "a.jsonl": (gzip.compress(b"plain"), "a.jsonl is compressed with gzip, but its name does not end in .gz"),
    "a.txt": (b"PK\x03\x04\x14\x00", "a.txt is compressed with zip"),
    "a.csv.gz": (lzma.compress(b"plain"), "a.csv.gz is compressed with xz, although its name ends in .gz"),
    "words.txt": (b"unknown words only", r"at least two distinct ids, got 1 in 3 tokens.*another corpus"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_read(name, tmp_path):
    content, message = BAD_FILES[name]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tokens(words_tokenizer(), str(tmp_path / name.partition("/")[0]))


def test_truncated_conversations(tmp_path):
    """They are not read by `datasets`."""
    row = b'{"messages": [{"role": "user", "content": "%s"}]}\n'
    file = tmp_path / "half.jsonl.gz"
    file.write_bytes(gzip.compress(b"".join(row % line[10:100] for line in ROWS.splitlines()))[:-90])
    with pytest.raises(ValueError, match=r"half.jsonl.gz cannot be read as json: .*end-of-stream marker"):
        list(open_source(str(file), conversations=True)[1])


def test_dataset(hub):
    hub["me/books"] = {"train": [{"text": "word"}], "test": [{"text": "first"}, {"text": " "}, {"text": "second"}]}
    hub["me/validated"] = {"train": [{"text": "word"}], "validation": [{"text": "first"}]}
    hub["me/one-split"] = {"all": [{"text": "third"}]}
    assert load_text("me/books") == "first\n\nsecond"
    assert (load_text("me/validated"), load_text("me/one-split")) == ("first", "third")
    for name, text in {"me/books": ["word"], "me/one-split": ["third"], "stdlib": [stdlib_text("train")]}.items():
        assert list(open_source(name, "train")[1]) == text, "a training leaves out what is measured"
    with pytest.raises(FileNotFoundError, match="me/missing is neither a file nor a folder, and load_dataset"):
        load_text("me/missing")


# -- the default


def test_default_with_a_hub(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub[PG19] = {"train": [{"text": "word"}], "test": [{"text": "first second"}, {"text": "third"}]}
    assert load_tokens(words_tokenizer()) == (pytest.approx([1, 2, 3]), PG19)
    assert load_text("pg19") == "first second\n\nthird"
    assert load_text() == stdlib_text("held_out")


def test_without_the_datasets_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    tokens, name = load_tokens(words_tokenizer([*WORDS, "the"]))
    assert name == "Python language reference, held-out part" and len(tokens) > 1000
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    with pytest.raises(ImportError, match=r"a\.jsonl.*pip install 'hf-longctx\[training\]'"):
        load_text(str(tmp_path / "a.jsonl"))


def test_the_held_out_text_is_not_trained_on():
    train = stdlib_text("train")
    paragraphs = [p.strip() for p in stdlib_text("held_out").split("\n\n") if len(p) > 200]
    assert len(paragraphs) > 50
    assert not any(p in train for p in paragraphs)
    with pytest.raises(ValueError, match="train"):
        stdlib_text("test")


# -- tokens


def test_documents_are_tokenised_without_special_tokens(tmp_path):
    tokenizer = words_tokenizer([*WORDS, "<s>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 5)])
    assert tokenizer("first")["input_ids"] == [5, 1]
    for name, text in (("a.txt", "first second"), ("b.txt", "third")):
        (tmp_path / name).write_text(text)
    tokens = load_tokens(tokenizer, str(tmp_path)).tokens
    assert (tokens.tolist(), tokens.dtype) == ([1, 2, 3], np.int64)
    assert load_tokens(tokenizer, str(tmp_path), at_least=1).tokens.tolist() == [1, 2], "whole documents, no more"
