"""The assistant's tokens are scored, and no others."""

import json
from itertools import groupby

import pytest
from demo_model import DEMO
from transformers import AutoTokenizer

from hf_longctx.training.conversations import encode_conversation
from hf_longctx.training.data import encode, pack


CHATML = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
LAST_ONLY = "{% for message in messages %}{{ message.content if loop.last else '...' }}{% endfor %}"
# Templates that mark the assistant's tokens. Without the marks, the same tokens are found.
BEGIN = "{% generation %}"
END = "{% endgeneration %}"
TEMPLATES = {
    "default system prompt": """{% if messages[0].role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}BEGIN{{ m.content }}<|im_end|>
END{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "system prompt in the first question": """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}BEGIN \
{{ m.content }} </s>END{% elif m.role == 'user' %}[INST] {% if messages[0].role == 'system' and loop.index0 == 1 %}\
<<SYS>>{{ messages[0].content }}<</SYS>>{% endif %}{{ m.content }} [/INST]{% endif %}{% endfor %}""",
    "thoughts of earlier turns are left out": """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}BEGIN{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>
END{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "thoughts are left out, and the prompt begins one": """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}BEGIN{{ m.content.split('</think>')[-1] }}<|im_end|>
END{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}""",
    "plain text": """{% for m in messages %}{% if m.role == 'assistant' %}Assistant: BEGIN{{ m.content + '\\n' }}END\
{% else %}{{ m.role.title() + ': ' + m.content + '\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}""",
    "no prompt of an answer": """{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}BEGIN{{ m.content }}</s>END\
{% else %}{{ m.content }}</s>{% endif %}{% endfor %}""",
    "one more token ends a conversation": """{% for m in messages %}<|{{ m.role }}|>
{% if m.role == 'assistant' %}BEGIN{{ m.content }}<|im_end|>
END{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% elif messages[-1].role == 'assistant' %}BEGIN{{ eos_token }}END{% else %}{{ eos_token }}{% endif %}""",
    "no end of a turn": """{% for m in messages %}<|{{ m.role }}|>
{% if m.role == 'assistant' %}BEGIN{{ m.content }}END{% else %}{{ m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "content is trimmed": """{% for m in messages %}<|im_start|>{{ m.role }}

{% if m.role == 'assistant' %}BEGIN{{ m.content | trim }}<|im_end|>END{% else %}{{ m.content | trim }}<|im_end|>{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}""",
    "the answer of a tool needs its call": """{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>BEGIN\
{{ m.content }}{% for call in m.tool_calls %}<call>{{ call.function.name }}{% endfor %}<|im_end|>END{% elif m.role == 'tool' %}\
{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}<|tool|>{{ m.content }}<|im_end|>\
{% else %}<|user|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
}


def turns(*contents, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CONVERSATIONS = {
    "one question": turns("Hi", "Yes, hello."),
    "two questions": turns("Hi", "Yes", "More?", "No\n\nmore. "),
    "the assistant begins": turns("Hello", "Hi", "Yes", first="assistant"),
    "the user ends": turns("Hi", "Yes", "More?"),
    "thoughts": turns("Hi", "<think>x</think>A", "B", "<think>y</think>C"),
    "quoted header": turns("What is Assistant: or <|im_start|>assistant?", "A word.", "Sure?", "Yes."),
    "a tool": [
        *turns("2 + 2?"),
        CALL,
        {"role": "tool", "content": "4"},
        *turns("Four.", "Thanks", "Bye.", first="assistant"),
    ],
}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who forgets?"},
    {"role": "assistant", "content": "The fox."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "It no longer needs it."},
]
ROWS = [{"messages": TURNS}, {"messages": TURNS[1:3]}]


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = CHATML
    return tokenizer


def read(row, tokenizer, template):
    tokenizer.chat_template = template
    tokens = encode_conversation(row, tokenizer)
    return tokens["id"].tolist(), tokens["scored"].tolist()


def marked(template):
    return template.replace("BEGIN", BEGIN).replace("END", END)


@pytest.fixture
def chatml_tokenizer(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_assistants_tokens_are_found_where_the_template_does_not_mark_them(
    template, conversation, chatml_tokenizer
):
    row = {"messages": CONVERSATIONS[conversation]}
    ids, scored = read(row, chatml_tokenizer, marked(TEMPLATES[template]))
    unmarked = TEMPLATES[template].replace("BEGIN", "").replace("END", "")
    assert read(row, chatml_tokenizer, unmarked) == (ids, scored)
    assert any(scored) and not all(scored)
    masks = chatml_tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert ids == chatml_tokenizer(masks, add_special_tokens=False)["input_ids"]
    completion = {"prompt": row["messages"][:2], "completion": row["messages"][2:]}
    if completion["completion"]:
        assert read(completion, chatml_tokenizer, unmarked) == read(
            completion, chatml_tokenizer, marked(TEMPLATES[template])
        )


def runs(row, tokenizer):
    """The runs of scored tokens, as texts."""
    spans = groupby(encode_conversation(row, tokenizer), key=lambda token: token["scored"])
    return [tokenizer.decode([token["id"] for token in tokens]) for is_scored, tokens in spans if is_scored]


@pytest.mark.parametrize(
    ("begin", "end"),
    [("{%-", "%}"), ("{%-  ", "\n-%}"), ("{%\n", "+%}")],
)
def test_generation_is_recognised_in_every_spelling(begin, end, tokenizer):
    """Without the marks, an answer that the template rewrites could not be found."""
    answer = "{{ messages[0].content | upper }}"
    template = f"{begin} generation {end}{answer}{begin} endgeneration {end}{{{{ messages[1].content }}}}"
    tokenizer.chat_template = template
    assert runs({"messages": turns("a", " long question follows", first="assistant")}, tokenizer) == ["A"]
    tokenizer.chat_template = "{# {% generation %} #}" + CHATML
    assert runs(ROWS[1], tokenizer) == ["The fox.</s>\n"]


def test_a_turn_written_with_that_of_a_tool_is_not_scored_beyond_its_own_tokens(chatml_tokenizer):
    """The results of a tool stand in the assistant's turn, and thoughts of earlier turns are left out."""
    chatml_tokenizer.chat_template = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>model
{{ m.content if loop.last else m.content.split('</think>')[-1] }}{% for call in m.tool_calls %}<call>{% endfor %}\
{% if m.tool_calls %}{{ messages[loop.index].content }}{% endif %}<|im_end|>{% elif m.role == 'user' %}{{ m.content }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""
    call = CALL | {"content": "<think>x</think>A"}
    row = {"messages": [*turns("2 + 2?"), call, {"role": "tool", "content": "4"}, *turns("Four.", first="assistant")]}
    for template in (chatml_tokenizer.chat_template, LAST_ONLY):
        with pytest.raises(ValueError, match="turn 2 cannot be found in the rendered chat template"):
            read(row, chatml_tokenizer, template)


def test_lists_of_content_are_read(tokenizer):
    tokenizer.chat_template = CHATML.replace("message.content", "message.content[0].text")
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    assert runs({"messages": parts}, tokenizer) == ["The fox.</s>\n", "It no longer needs it.</s>\n"]


def test_tools_and_arguments_of_the_template_are_handed_over(chatml_tokenizer):
    chatml_tokenizer.chat_template = (
        "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{{ tool | length }}{% endfor %}"
        "{{ '<calm>' if calm }}" + CHATML
    )
    tool = {"type": "function", "function": {"name": "find_fox", "parameters": {"type": "object", "properties": {}}}}
    row = {"messages": TURNS, "tools": [tool | {"of_another_row": None}], "chat_template_kwargs": {"calm": True}}
    ids = encode_conversation(row, chatml_tokenizer)["id"]
    assert chatml_tokenizer.decode(ids).startswith("<tool>find_fox2<calm><|system|>")
    assert runs(row, chatml_tokenizer) == ["The fox.</s>\n", "It no longer needs it.</s>\n"]
    texts = {"tools": json.dumps(row["tools"]), "chat_template_kwargs": json.dumps(row["chat_template_kwargs"])}
    for as_text in (texts, texts | {"tools": [json.dumps(tool) for tool in row["tools"]]}):
        assert encode_conversation(row | as_text, chatml_tokenizer)["id"].tolist() == ids.tolist()


def test_conversations_are_preferred_to_a_column_of_text_unless_it_is_named(tokenizer, tmp_path):
    source = tmp_path / "both.jsonl"
    source.write_text("".join(json.dumps(row | {"text": "The same, as text."}) + "\n" for row in ROWS))
    for place in (source, tmp_path):  # a folder too
        chats, texts = (list(encode(str(place), tokenizer, column=column)) for column in (None, "text"))
        assert [tokens.tolist() for tokens in chats] == [encode_conversation(row, tokenizer).tolist() for row in ROWS]
        assert {tokenizer.decode(tokens["id"]) for tokens in texts} == {"<s>The same, as text.</s>"}
    with pytest.raises(ValueError, match='must have a column "body"'):
        next(encode(str(source), tokenizer, column="body"))


@pytest.mark.parametrize("template", ["plain text", "default system prompt"])
def test_a_template_without_an_end_of_turn_is_reported_once(template, chatml_tokenizer, tmp_path, capsys):
    chatml_tokenizer.chat_template = marked(TEMPLATES[template])
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pack(str(source), chatml_tokenizer, tmp_path / "tokens.npy")
    expected = 0 if template == "default system prompt" else 1
    assert capsys.readouterr().err.count("does not learn to end its turn") == expected


def test_a_token_that_begins_inside_the_prompt_is_scored(tokenizer):
    assert tokenizer.tokenize("the fun") == ["the", "Ġfun"]
    assert runs({"prompt": "the f", "completion": "un"}, tokenizer) == [" fun</s>"]
    tokenizer.chat_template = TEMPLATES["plain text"].replace("BEGIN", "").replace("END", "")
    assert runs({"messages": turns("Hi", "fun")}, tokenizer) == [" fun\n"]


USER_FIRST = "{% if messages[0].role != 'user' %}{{ raise_exception('The user begins') }}{% endif %}"
NO_TURNS = r'Conversation 1: turns must be a list of {"role", "content"}, got'


@pytest.mark.parametrize(
    "rows, says",
    [
        ([{"messages": TURNS[1:3]}, {"messages": TURNS}], "raises an error for conversation 2: The user begins"),
        ([{"messages": TURNS[1:2]}], "does not contain a conversation with an assistant"),
        ([{"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}], NO_TURNS),
        ([{"messages": json.dumps(TURNS)}], NO_TURNS),
        ([{"messages": None}], NO_TURNS),
        ([{"prompt": "Hi", "completion": TURNS[2:3]}], NO_TURNS),
    ],
    ids=["error of the template", "no answer", "ShareGPT", "text", "null", "text and turns"],
)
def test_conversations_that_cannot_be_read_are_refused(rows, says, tokenizer, tmp_path):
    tokenizer.chat_template = USER_FIRST + CHATML
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=says):
        pack(str(source), tokenizer, tmp_path / "tokens.npy")
