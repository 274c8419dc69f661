"""Literal text, and what makes two tokenizers one."""

import pytest
from demo_model import DEMO
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from hf_longctx.corpus import load_tokens
from hf_longctx.metrics.run.reader import UnloadedModel
from hf_longctx.metrics.task import Subject
from hf_longctx.tokenization import encode_text, tokenizer_hash


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PIECES = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), *((c, -5.0) for c in "ab</s>")]


def unigram():
    tokenizer = Tokenizer(models.Unigram(PIECES, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def words():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def demo():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize("make", [demo, ByT5Tokenizer, unigram, words], ids=["BPE", "bytes", "unigram", "words"])
def test_a_special_token_in_a_text_is_text(make):
    """The vocabularies of unigram and word-level models contain their special tokens as words, too."""
    tokenizer = make()
    ids = encode_text(tokenizer, "a </s> a<s></s>")
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(ids)
    assert encode_text(tokenizer, "a a") == tokenizer("a a", add_special_tokens=False)["input_ids"]
    if make in (demo, ByT5Tokenizer):
        assert tokenizer.decode(ids) == "a </s> a<s></s>"


def test_corpora_and_questions_are_literal_and_chat_templates_are_not(tmp_path):
    tokenizer, file = demo(), tmp_path / "sgml.txt"
    file.write_text("Sentences end with </s> and begin with <s>. " * 9)
    assert not {1, 2} & set(load_tokens(tokenizer, str(file)).tokens.tolist())
    subject = Subject(UnloadedModel(AutoConfig.from_pretrained(DEMO), "demo"), tokenizer)
    assert 2 not in subject.encode("a</s>") and 2 in subject.encode_chat("a</s>")
    assert 2 in tokenizer("a</s>")["input_ids"], "the user's tokenizer is not changed"


def changed(change):
    tokenizer = demo()
    change(tokenizer, tokenizer.backend_tokenizer)
    return tokenizer


DIFFERENT = {
    "normalizer": lambda t, backend: setattr(backend, "normalizer", normalizers.Lowercase()),
    "pre-tokenizer": lambda t, backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(use_regex=False)),
    "merges": lambda t, backend: setattr(backend, "model", models.BPE(backend.get_vocab(False), [])),
    "added token": lambda t, backend: t.add_tokens(["foxes"]),
    "added token that is stripped": lambda t, backend: t.add_tokens([AddedToken("foxes", lstrip=True)]),
}


def test_the_hash_of_a_tokenizer_is_that_of_its_ids(tmp_path):
    hashes = {name: tokenizer_hash(changed(change)) for name, change in DIFFERENT.items()}
    hashes |= {"demo": tokenizer_hash(demo()), "bytes": tokenizer_hash(ByT5Tokenizer())}
    hashes |= {"fewer bytes": tokenizer_hash(ByT5Tokenizer(extra_ids=10)), "unigram": tokenizer_hash(unigram())}
    assert len(set(hashes.values())) == len(hashes)


def test_a_tokenizer_keeps_its_hash_under_another_name(tmp_path):
    tokenizer = demo()
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)  # stored in the backend
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert (
        tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_hash(tokenizer) == tokenizer_hash(demo())
    )
    assert tokenizer_hash("gpt2") is None and tokenizer_hash(None) is None
