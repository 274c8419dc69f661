"""The texts that metrics and training read."""

import pytest

from hf_longctx.corpus import load_text, stdlib_text


def test_texts(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert load_text(str(tmp_path)) == "first\n\nsecond"
    assert load_text(str(tmp_path / "b.txt")) == "second"
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        load_text(str(tmp_path / "empty.txt"))
    with pytest.raises(ValueError, match="train"):
        stdlib_text("test")


def test_the_held_out_text_is_not_trained_on():
    train = stdlib_text("train")
    paragraphs = [p.strip() for p in stdlib_text("held_out").split("\n\n") if len(p) > 200]
    assert len(paragraphs) > 50
    assert not any(p in train for p in paragraphs)
