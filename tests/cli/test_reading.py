"""`read`, on the demo HMT, which can answer from its memory alone."""

import io
import shutil

import pytest
from demo_model import DEMO
from transformers import AutoTokenizer

from hf_longctx import cli
from hf_longctx.corpus import load_text
from hf_longctx.hmt import search_hmt
from hf_longctx.hmt.search_hmt import find_tokens


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


LLAMA = str(DEMO.parent / "llama-demo")
TEMPLATE = "{% for m in messages %}user: {{ m.content }} end{% endfor %} answer:"


@pytest.fixture
def searched(monkeypatch):
    """Return the queries and results of the search."""
    found = []

    def record(query, *arguments):
        found.append((query, find_tokens(query, *arguments)))
        return found[-1][1]

    monkeypatch.setattr(search_hmt, "find_tokens", record)
    return found


def copy_with_template(folder):
    """Return a copy of llama-demo whose tokenizer has a chat template."""
    shutil.copytree(LLAMA, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("chat", [False, True])
def test_any_model_is_asked_about_what_it_read_long_ago(tmp_path, capsys, monkeypatch, searched, chat):
    """The question selects the passage, not the template after it. The next command does not read the document."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    tokenizer = copy_with_template(tmp_path / "model")
    filler = load_text(DEMO.parent / "held_out.txt.gz")[:20_000]
    document = tmp_path / "document.txt"
    document.write_text(f"{filler[:5000]} The secret number of the gardener is seventeen. {filler[5000:]}")
    questions = ["What is the secret number of the gardener?", "Where is Kellynch Hall?"]
    command = ["read", str(tmp_path / "model"), str(document), *questions, "--max-new-tokens", "2"]
    if chat:  # the options may come first
        command = [*command[:3], *command[5:], *questions]
    assert cli.main(command + ["--no-chat"] * (not chat)) == 0
    said = capsys.readouterr()
    assert "document.txt: " in said.err and said.err.count("answered in") == 2 and questions[1] in said.out
    query, passage = searched[-2]
    text = tokenizer.decode(query[0])
    assert text.endswith(("of the gardener", "of the gardener?")) and text.startswith("user:" if chat else "What")
    assert "gardener" in tokenizer.decode(passage[0])
    read = len(searched)
    one = [word for word in command if word != questions[1]]
    assert cli.main(one + ["--no-chat"] * (not chat)) == 0
    again = capsys.readouterr()
    assert len(searched) == read + 1 and "document.txt: " not in again.err and again.out in said.out
    document.write_text(document.read_text() + ".")
    assert cli.main(command) == 0 and "document.txt: " in capsys.readouterr().err
    assert len([*(tmp_path / "home" / "hf_longctx" / "read").iterdir()]) == 2


@pytest.mark.parametrize("retriever", ["recall_tokens", "neural_cache", "bank"])
@pytest.mark.parametrize("name", ["llama-demo", "fox-demo"])
def test_retrievers_have_names(novel, capsys, monkeypatch, retriever, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(novel.parent))
    command = ["read", str(DEMO.parent / name), "novel.txt", "recall Ada", "--max-new-tokens", "1"]
    assert cli.main([*command, "--retriever", retriever]) == 0
    assert capsys.readouterr().out.startswith("recall Ada")
    assert cli.main([*command, "--retriever", retriever, "--seed", "1"]) == 0  # another memory, so it reads again
    assert "novel.txt: " in capsys.readouterr().err


def test_what_read_does_not_support(novel, capsys):
    for options, message in (
        (["--retriever", "bank"], "`retriever` must be None for a model that is already an HMT"),
        (["--chat"], "does not have one"),
    ):
        assert cli.main(["read", HMT, "novel.txt", "recall Ada", *options]) == 2
        assert message in capsys.readouterr().err
