"""Separate a model's answer from its thinking, in the formats of current chat templates.

A thought begins where the prompt or the response opens it, at the beginning of the response, of a line, or directly
after another thought. Elsewhere, an opening marker is quoted, so that an answer about `<think>` stays an answer. A
thought that is closed but never opened was opened by the chat template.
"""

from __future__ import annotations

import re


TAG = r"(?:\w+[:_])?(?:think|thinking|thought|reasoning)(?:[:_]\w+)?"
# Regular expressions of the markers that open and close a thought. Special tokens must be kept when ids are decoded.
FORMATS = (
    # DeepSeek, Qwen, GLM, Kimi, MiniMax, Nemotron, SmolLM, ...: <think>; EXAONE Deep: <thought>; Reka: <reasoning>;
    # Seed: <seed:think>; MiniMax M3: <mm:think>; Hunyuan 3: <think:opensource>; LongCat: <longcat_think>
    (rf"(?i:<{TAG}>)", rf"(?i:</{TAG}>)"),
    (r"\[THINK\]", r"\[/THINK\]"),  # Magistral, Ministral
    (  # gpt-oss: all channels except the final one; "analysis" is the first word if special tokens are missing
        r"<\|channel\|>(?!\s*final\b)|\Aanalysis(?=[A-Z\"'(])",
        r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?(?:<\|message\|>|\Z)|assistantfinal",
    ),
    (r"<\|channel>", r"<channel\|>"),  # Gemma 4
    (r"<unused94>", r"<unused95>"),  # MedGemma
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Cohere Command A
    (r"<\|think(?::start)?\|>", r"<\|think:end\|>|<\|content\|>"),  # Solar Open
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # Sky-T1, OpenThinker
    (r"\u25c1think\u25b7", r"\u25c1/think\u25b7"),  # Kimi VL
    (r"<\|open\|>think<\|sep\|>", r"(?:<\|close\|>think<\|sep\|>\s*)?<\|open\|>response<\|sep\|>"),  # Kimi K3
    (r"Here(?:'s| is) my thought process:", r"Here(?:'s| is) my response:"),  # Granite 3.2
)
MARKERS = re.compile("|".join(f"(?P<o{i}>{opens})|(?P<c{i}>{closes})" for i, (opens, closes) in enumerate(FORMATS)))
QUOTES = "`'\"\u2018\u2019\u201c\u201d\u00ab\u00bb"


def opened_thought(prompt: str) -> str:
    """Return the end of a prompt, from the marker of a thought that the prompt opens and does not close.

    If there is no such thought, return an empty string.

    >>> opened_thought("<|assistant|><think>\\n"), opened_thought("<|assistant|><think></think>")
    ('<think>', '')
    """
    opened: dict[str, int] = {}
    for marker in MARKERS.finditer(prompt):
        kind, name = name_of(marker)
        opened.pop(name, None)
        if kind == "o":
            opened[name] = marker.start()
    return prompt[max(opened.values()) :].rstrip() if opened else ""


def after_thought(response: str) -> str | None:
    """Return the part of a response after the model's thinking. If the thinking does not end, return None.

    >>> after_thought("<think>The cow ...</think> Alm"), after_thought("Alm"), after_thought("<think>The cow")
    (' Alm', 'Alm', None)
    >>> after_thought("The tag <think> opens it."), after_thought("The cow ...</think> Alm")
    ('The tag <think> opens it.', ' Alm')
    """
    begin, thought = 0, None  # where the answer begins, and the format of the current thought
    inline: dict[str, int] = {}  # where opening markers within a line are, by format
    answer = ""  # the part of the answer before `at`, without thoughts within a line
    at = 0
    for marker in MARKERS.finditer(response):
        kind, name = name_of(marker)
        if is_quoted(response[begin : marker.start()], response[marker.end() :], thought is None):
            continue
        if thought is None and kind == "o" and begins_line(response[begin : marker.start()], begin == 0):
            thought = name
        elif thought is None and kind == "o":
            inline[name] = marker.start()
        elif thought is None and name in inline:
            answer, at = answer + response[at : inline.pop(name)], marker.end()
        elif kind == "c" and thought in (None, name):
            thought = None
            answer = ""
            begin = at = marker.end()
            inline.clear()
    return None if thought is not None else answer + response[at:]


def name_of(marker: re.Match[str]) -> tuple[str, str]:
    """Return "o" for an opening marker or "c" for a closing marker, and the name of its format."""
    name = str(marker.lastgroup)
    return name[:1], name[1:]


def is_quoted(before: str, after: str, code: bool) -> bool:
    """Return whether the marker between two strings is in quotation marks or backticks, or in a block of code.

    Args:
        code: whether blocks of code count. In a thought, they may be incomplete.
    """
    quoted = re.search(rf"(?:^|[\s(])[{QUOTES}]$", before) is not None and after[:1] in (*QUOTES,)
    return quoted or (code and before.count("```") % 2 == 1)


def begins_line(before: str, first: bool) -> bool:
    """Return whether a thought can begin after `before`, the text since the last thought.

    Special tokens of a turn's beginning, such as `<|start|>assistant`, may stand before the first thought.
    """
    line = before.rpartition("\n")[2].strip()
    return not line or (first and re.fullmatch(r"(?:<\|\w+\|>\s*)+(?:assistant)?\s*", line) is not None)
