"""Needles in one's own words, in other languages and in chats."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from demo_model import DEMO
from tiny_models import Copier
from transformers import AutoTokenizer

from hf_longctx.metrics import LocalReader, line_retrieval, needle_in_a_haystack
from hf_longctx.metrics.retrieval.answers import contains_text
from hf_longctx.metrics.retrieval.haystack import hide_needle, needle_pieces
from hf_longctx.metrics.retrieval.wording import chat_frame, wording


COW = dict(
    needle="Die Kuh Berta steht auf der Alm.", question="Wo steht die Kuh Berta? Antwort: auf der", answer="Alm."
)
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</turn>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def letters(text):
    return list(map(ord, text))


def prompt(words, frame=None):
    pieces = needle_pieces(letters, ord("^"), words, frame)
    ids = np.append(hide_needle(np.array(letters("One. Two.")), 4, pieces), pieces.answer)
    return "".join(map(chr, ids)), "".join(map(chr, pieces.answer))


def test_own_words_stand_as_they_are():
    text, answer = prompt(wording(**COW))
    assert text == "^One.\nDie Kuh Berta steht auf der Alm.\n Two.\nWo steht die Kuh Berta? Antwort: auf der Alm."
    assert answer == " Alm."
    easy = wording("easy", question=COW["question"], answer="Alm")
    assert prompt(easy)[0].startswith("^One.\nWo steht die Kuh Berta? Antwort: auf der Alm\n Two.")


def test_languages_without_spaces():
    """Question and answer are not separated, and a response contains the answer without spaces around it."""
    words = wording(needle="王先生住在北京。", question="王先生住在哪里?答案:", answer="北京")
    assert prompt(words)[0].endswith("\n王先生住在哪里?答案:北京")
    assert contains_text("他住在北京市。", "北京") and not contains_text("他住在上海。", "北京")
    assert not contains_text("Berlins", "Berlin"), "where words have spaces, they count as wholes"


@pytest.mark.parametrize(
    "options, message",
    [
        ({**COW, "answer": " "}, "needs a question and an answer"),
        ({**COW, "mode": "easy"}, "unset in mode"),
        ({**COW, "answer": "Weide"}, "must contain the answer 'Weide'"),
    ],
)
def test_what_nobody_could_find_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        wording(**options)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = CHAT
    return tokenizer


def test_a_chat_surrounds_haystack_and_question(tokenizer):
    frame = chat_frame(tokenizer)
    assert frame == (tokenizer.bos_token + "<user>", "</turn><assistant>")
    text, answer = prompt(wording(), frame)
    assert text.startswith(f"{frame.head}One.\nThe best thing") and answer.startswith(" eat a sandwich")
    assert "in San Francisco?</turn><assistant>The best thing to do in San Francisco is eat" in text
    assert prompt(wording(**COW), frame)[0].endswith("auf der</turn><assistant>Alm.")


@pytest.mark.parametrize(
    "template, message", [(None, "does not have a chat template"), ("no words", "0 times"), (CHAT + CHAT, "2 times")]
)
def test_tokenizers_without_a_chat(template, message):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        chat_frame(tokenizer)


def test_models_read_the_chat(tokenizer):
    model, tokens = Copier(9, vocab_size=len(tokenizer)), tokenizer("One day. " * 200)["input_ids"][1:]
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0][0]))
    options = dict(replies=False, chat_template=True)
    needle = needle_in_a_haystack(model, tokenizer, tokens, lengths=[300], depths=[0.5], **COW, **options)
    lines = line_retrieval(model, tokenizer, lines=[3], repeats=1, **options)
    texts = [tokenizer.decode(ids) for ids in read]
    begin = tokenizer.bos_token + "<user>"
    for inside in ("auf der</turn><assistant>", "</turn><assistant>line "):
        assert any(text.startswith(begin) and inside in text for text in texts), texts
    assert needle.settings["chat_template"] and lines.settings["chat_template"] and needle.settings["answer"] == "Alm."
    assert needle.cells[0].answers[0].tokens == len(tokenizer("Alm.", add_special_tokens=False)["input_ids"])


def test_special_tokens_are_text_unless_a_template_writes_them(tokenizer, monkeypatch):
    """`</s>` ends a turn of this template; in a needle it is three characters."""
    monkeypatch.setattr(tokenizer, "chat_template", CHAT.replace("</turn>", "</s>"))
    read, model, tokens = [], Copier(9, vocab_size=len(tokenizer)), tokenizer("One day. " * 200)["input_ids"][1:]
    model.register_forward_pre_hook(lambda _, args: read.append(args[0][0].tolist()))
    options = dict(lengths=[300], depths=[0.5], replies=False)
    chat = needle_in_a_haystack(model, tokenizer, tokens, **options, **COW, chat_template=True)
    assert chat.cells and read[-1].count(tokenizer.eos_token_id) == 1
    sgml = {name: text.replace("Berta", "</s>") for name, text in COW.items()}
    plain = needle_in_a_haystack(model, tokenizer, tokens, **options, **sgml)
    assert plain.cells and tokenizer.eos_token_id not in read[-1] and "</s> steht" in tokenizer.decode(read[-1])
    with pytest.raises(ValueError, match="needle must not contain special tokens"):
        needle_in_a_haystack(model, tokenizer, tokens, **options, **sgml, chat_template=True)


THINKING = CHAT + "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"


@pytest.mark.parametrize(
    "replied, kwargs, matched, thinking",
    [
        ("The cow is on the Alm", None, False, 1),
        ("Berta? </think>\n\nauf der Alm.", None, True, 0),
        ("Alm? </think> Im Stall.", None, False, 0),
        ("auf der Alm.", {"enable_thinking": False}, True, 0),
        ("<think>Alm", {"enable_thinking": False}, False, 1),
        ("[THINK]Alm[/THINK]auf der Alm", {"enable_thinking": False}, True, 0),
    ],
)
def test_an_answer_is_looked_for_behind_the_thoughts(tokenizer, monkeypatch, replied, kwargs, matched, thinking):
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    monkeypatch.setattr(LocalReader, "reply", lambda *arguments: replied)
    model, tokens = Copier(99, vocab_size=len(tokenizer)), tokenizer("One day. " * 200)["input_ids"][1:]
    model.generate = None  # the reader would call it
    options = dict(chat_template=True, chat_template_kwargs=kwargs)
    needle = needle_in_a_haystack(model, tokenizer, tokens, lengths=[300], depths=[0.5], **COW, **options)
    (answer,) = needle.cells[0].answers
    assert (answer.matched, answer.ends_in_thought) == (matched, bool(thinking))
    assert needle.settings.get("reply_tokens") is None
    words = "1 of 1 response ended while the model was thinking, and count as wrong: try --chat-template-kwargs"
    assert (words in needle.summary()) == bool(thinking)
    lines = line_retrieval(model, tokenizer, lines=[3], repeats=2, **options)
    assert ("2 of 2 responses ended while the model was thinking" in lines.summary()) == bool(thinking)


class Speaker(Copier):
    """Generates the ids of these words, then an EOS."""

    def __init__(self, tokenizer, words):
        super().__init__(99, vocab_size=len(tokenizer))
        self.ids, self.asked = [*tokenizer(words, add_special_tokens=False)["input_ids"], 2, 0], []
        self.generation_config = SimpleNamespace(pad_token_id=0, eos_token_id=[2])

    def generate(self, input_ids, max_new_tokens, **options):
        self.asked.append(max_new_tokens)
        return torch.cat([input_ids, torch.tensor([self.ids[:max_new_tokens]])], dim=1)


@pytest.fixture
def magistral(tokenizer):
    """Return the demo's tokenizer with special tokens that open and close thoughts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.mark.parametrize(
    "words, reply_tokens, matched, thinking",
    [
        ("[THINK]Im Stall? Auf der Alm?[/THINK]Im Stall.", 99, False, False),
        ("[THINK]Im Stall?[/THINK]Auf der Alm.", 99, True, False),
        ("[THINK]Auf der Alm? " + "Oder? " * 20 + "[/THINK]Auf der Alm.", 30, False, True),
        ("[THINK]Auf der Alm? " + "Oder? " * 20 + "[/THINK]Auf der Alm.", 200, True, False),
    ],
)
def test_special_tokens_are_kept_until_the_thought_is_cut(magistral, words, reply_tokens, matched, thinking):
    model, tokens = Speaker(magistral, words), magistral("One day. " * 200)["input_ids"][1:]
    options = dict(chat_template=True, reply_tokens=reply_tokens)
    needle = needle_in_a_haystack(model, magistral, tokens, lengths=[300], depths=[0.5], **COW, **options)
    (answer,) = needle.cells[0].answers
    assert (answer.matched, answer.ends_in_thought) == (matched, thinking) and model.asked == [reply_tokens]
    assert needle.settings["reply_tokens"] == reply_tokens and "</s>" not in answer.reply
    lines = line_retrieval(model, magistral, lines=[3], repeats=1, **options)
    assert lines.points[0].answers[0].ends_in_thought == thinking


def test_an_exact_answer_in_a_thought_is_not_the_response(tokenizer, monkeypatch):
    """The template opens the thought; greedy decoding gives the answer, closes the thought and says something else."""
    monkeypatch.setattr(tokenizer, "chat_template", THINKING)
    model, tokens = Speaker(tokenizer, "Alm.</think>Im Stall."), tokenizer("One day. " * 200)["input_ids"][1:]
    model.k = 4
    cow = COW | {"needle": "Die Kuh? Wo steht die Kuh Berta? Antwort: auf der</turn><assistant><think>Alm."}
    needle = needle_in_a_haystack(model, tokenizer, tokens, lengths=[300], depths=[0.5], **cow, chat_template=True)
    (answer,) = needle.cells[0].answers
    assert answer.exact and not answer.matched and not answer.ends_in_thought


def test_responses_fit_into_the_context(tokenizer):
    """Default lengths leave room for --reply-tokens."""
    model, tokens = Speaker(tokenizer, "No"), tokenizer("One day. " * 200)["input_ids"][1:]
    model.config.max_position_embeddings = 600
    lengths = needle_in_a_haystack(model, tokenizer, tokens, depths=[0.5], reply_tokens=300).lengths
    assert max(lengths) == 300
    for task in (needle_in_a_haystack, line_retrieval):
        arguments = [tokens] if task is needle_in_a_haystack else []
        with pytest.raises(ValueError, match="reply_tokens requires replies"):
            task(model, tokenizer, *arguments, replies=False, reply_tokens=9)
