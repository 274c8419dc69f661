"""Thoughts in the formats of chat templates, and what is none."""

import pytest

from hf_longctx.metrics.retrieval.answers import Answer, contains_number, contains_text
from hf_longctx.metrics.retrieval.thoughts import after_thought, opened_thought
from hf_longctx.metrics.task import Answered


HARMONY = "<|channel|>analysis<|message|>It may be Rome, or", "<|end|><|start|>assistant<|channel|>final<|message|>"
# The beginning and the end of the thought, and responses of the models
FORMATS = {
    "DeepSeek, Qwen3, GLM, MiniMax, Nemotron, Kimi K2": ("<think>\nRome?", "\n</think>\n\n"),
    "Granite 3.3": ("<think>Rome?", "</think><response>"),
    "Hunyuan A13B": ("<think>\nRome?", "\n</think>\n<answer>\n"),
    "Hunyuan 3": ("<think:opensource>Rome?", "</think:opensource>"),
    "MiniMax M3": ("<mm:think>Rome?", "</mm:think>"),
    "EXAONE Deep": ("<thought>\nRome?", "\n</thought>\n\n"),
    "Seed": (
        "<seed:think>Rome?<seed:cot_budget_reflect>I have used 7.</seed:cot_budget_reflect> Or",
        "</seed:think>",
    ),
    "LongCat": ("<longcat_think>\nRome?", "\n</longcat_think>\n"),
    "Reka": ("<reasoning> Rome?", "</reasoning>"),
    "Magistral": ("[THINK]Rome?", "[/THINK]"),
    "gpt-oss": HARMONY,
    "gpt-oss, constrained": (HARMONY[0], "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>"),
    "gpt-oss with a preamble": (
        HARMONY[0] + "<|end|><|start|>assistant<|channel|>commentary<|message|>Rome, I guess.",
        HARMONY[1],
    ),
    "gpt-oss without special tokens": ("analysisWe think of Rome.", "assistantfinal"),
    "Gemma 4": ("<|channel>thought\nRome?", "<channel|>"),
    "MedGemma": ("<unused94>thought\nRome?", "<unused95>"),
    "Command A": ("<|START_THINKING|>Rome?", "<|END_THINKING|><|START_RESPONSE|>"),
    "Solar Open": ("<|think|>Rome?", "<|end|><|begin|>assistant<|content|>"),
    "Solar Open 2": ("<|think:start|>Rome?", "<|think:end|>"),
    "Apertus": ("<|inner_prefix|>Rome?", "<|inner_suffix|>"),
    "OpenThinker": ("<|begin_of_thought|>\n\nRome?", "\n\n<|end_of_thought|>\n\n<|begin_of_solution|>"),
    "Kimi VL": ("\u25c1think\u25b7Rome?", "\u25c1/think\u25b7"),
    "Kimi K3": ("<|open|>think<|sep|>Rome?", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "Granite 3.2": ("Here is my thought process: Rome?", "\n\nHere is my response: "),
}


def scored(reply, expected="Paris", opened=""):
    special = ["<|return|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|close|>", "<|sep|>", "<|reserved_17|>"]
    return Answer.of(Answered(-1.0, False, reply), 1, lambda text: contains_text(text, expected), opened, special)


@pytest.mark.parametrize("begin, end", FORMATS.values(), ids=FORMATS)
def test_a_thought_is_no_answer(begin, end):
    whole = f"{begin}{end}Paris"
    assert scored(whole).matched and not scored(whole, "Rome").matched and not scored(whole).ends_in_thought
    for unfinished in (begin, f"{begin} Or Paris"):
        assert scored(unfinished).ends_in_thought and not scored(unfinished).matched
    twice = f"{whole}\n{begin}{end}Bern"
    assert scored(twice, "Bern").matched
    assert begin.startswith("analysis") or scored(f"{whole}\n{begin} Paris").ends_in_thought


@pytest.mark.parametrize("begin, end", FORMATS.values(), ids=FORMATS)
def test_the_template_may_open_the_thought(begin, end):
    if begin.startswith("analysis"):
        return  # a template writes special tokens
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    opened = opened_thought(f"{tail}{begin[: begin.index('Rome')]}\n")
    assert begin.startswith(opened) and opened
    assert opened_thought(tail + begin + end) == opened_thought(tail) == ""
    assert scored(f"Rome?{end}Paris", opened=opened).matched and not scored("Paris", opened=opened).matched
    assert scored("Paris", opened=opened).ends_in_thought
    closed = scored(f"Rome?{end}Paris")  # the template is unknown
    assert closed.matched and not scored(f"Rome?{end}Paris", "Rome").matched


@pytest.mark.parametrize(
    "reply",
    [
        "The tag <think> opens it. Paris",
        "Paris; use <think> and </think>.",
        "Paris, not `</think>`",
        'Paris. A "<think>" begins it',
        "`<think>` begins a thought. Paris",
        "Use:\n```\n<think>\n```\nParis",
        "Wrap it in [THINK] tags: Paris",
        "<think>It says Rome.</think>The tag <think> opens it. Paris",
        "<think>I write `</think>` in Rome</think>Paris",
        '<think>"Rome"</think>"Paris"',
        "<think>Rome <think> Rome</think>Paris",
        "<think></think>Paris",
        "analysis of Paris",
        "It is Paris<|return|>",
    ],
)
def test_a_quoted_marker_is_no_thought(reply):
    assert scored(reply).matched and not scored(reply, "Rome").matched and not scored(reply).ends_in_thought


def test_the_words_of_special_tokens_do_not_count():
    special, reply = ["<|reserved_17|>", "<|end_2|>"], Answered(-1.0, False, "<|reserved_17|> 42<|end_2|>")
    assert Answer.of(reply, 1, lambda text: contains_number(text, 42), "", special).matched


def test_a_thought_within_a_line_is_left_out():
    assert after_thought("It is <think>Rome?</think>Paris") == "It is Paris"
