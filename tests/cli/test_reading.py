"""`read`, on the demo HMT, which can answer from its memory alone."""

import io

import pytest
from demo_model import DEMO

from hf_longctx import cli


HMT = str(DEMO.parent / "hmt-demo")
FILLER = "{0} the of {0} {0} in {0} to {0} {0} was {0} a"
FACTS = " ".join(
    f"remember {name} {colour} {FILLER.format(name)}" for name, colour in (("Ada", "red"), ("Boris", "gold"))
)
QUESTION = "recall {0} {0} is {0} the {0} of {0} {0} and {0} answer"


@pytest.fixture
def novel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "novel.txt").write_text(FACTS)
    return tmp_path / "novel.txt"


def test_a_text_is_read_once_and_asked_about(novel, capsys, monkeypatch):
    assert cli.main(["read", HMT, "novel.txt", "--output", "state.safetensors"]) == 0
    said = capsys.readouterr()
    assert said.out == "32 tokens of novel.txt in 2 memories\nwrote state.safetensors\n" and "novel.txt" in said.err
    monkeypatch.setattr("sys.stdin", io.StringIO(FACTS))
    assert cli.main(["read", HMT, "-", "--output", "other.safetensors"]) == 0
    assert "32 tokens of standard input" in capsys.readouterr().out
    for name, colour in (("Ada", "red"), ("Boris", "gold")):
        question, options = QUESTION.format(name), ["--max-new-tokens", "1"]
        for text in ("novel.txt", "state.safetensors", "other.safetensors"):
            assert cli.main(["read", HMT, text, question, *options]) == 0
            assert capsys.readouterr().out.split()[-1] == colour
