"""The assistant's tokens are scored, and no others."""

import gzip
import json
from itertools import groupby

import pytest
from demo_model import DEMO
from transformers import AutoTokenizer

from hf_longctx.training import FinetuneConfig
from hf_longctx.training.conversations import encode_conversation
from hf_longctx.training.data import encode, load_datasets, pack


datasets = pytest.importorskip("datasets", reason="conversations are tables: pip install 'hf-longctx[training]'")


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
    """Return the texts of consecutive scored tokens."""
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
    """The results of a tool are in the assistant's turn, and thoughts of earlier turns are removed."""
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
    row = {"messages": TURNS, "tools": [tool], "chat_template_kwargs": {"calm": True}}
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
TEXT_FIRST = "{{ ('' + messages[0].content)[:0] }}"
NO_TURNS = r'Conversation 1: turns must be a list of {"role", "content"}, got'


@pytest.mark.parametrize(
    "rows, says",
    [
        ([{"messages": TURNS[1:3]}, {"messages": TURNS}], "raises an error for conversation 2: The user begins"),
        ([{"messages": TURNS[1:2]}], "does not contain a conversation with an assistant"),
        ([{"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}], NO_TURNS),
        ([{"messages": json.dumps(TURNS)}], NO_TURNS),
        ([{"messages": None}], NO_TURNS),
        ([{"messages": [{"role": None, "content": "Hi"}, TURNS[2]]}], NO_TURNS),
        ([{"messages": [TURNS[1] | {"content": 5}, TURNS[2]]}], "raises an error for conversation 1: .*int"),
        ([{"prompt": "Hi", "completion": TURNS[2:3]}], "must both be .* turns, got a string and list"),
        ([{"prompt": TURNS[1:2], "completion": "Hi"}], "must both be .* turns, got list and a string"),
        ([{"prompt": None, "completion": "Hi"}], "must both be .* turns, got NoneType and a string"),
    ],
    ids=[
        "error of the template",
        "no answer",
        "ShareGPT",
        "text",
        "null",
        "no role",
        "a number",
        "text and turns",
        "turns and text",
        "no prompt",
    ],
)
def test_conversations_that_cannot_be_read_are_refused(rows, says, tokenizer, tmp_path):
    tokenizer.chat_template = USER_FIRST + TEXT_FIRST + CHATML
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=says):
        pack(str(source), tokenizer, tmp_path / "tokens.npy")


SELECTIONS = [dict(weight=0), dict(weight=0.0), dict(train=False), dict(training=False), dict(trainable=False)]
SELECTIONS += [dict(loss=False), dict(loss_mask=0), dict(step_loss_mask=0), dict(masked=True)]
SELECTIONS += [dict(weight=1, train=False), dict(weight=0, trainable=None)]


@pytest.mark.parametrize("fields", SELECTIONS, ids=str)
@pytest.mark.parametrize("is_marked", [False, True])
def test_a_turn_that_the_data_exclude_is_rendered_but_not_scored(is_marked, fields, chatml_tokenizer):
    template = TEMPLATES["default system prompt"]
    template = marked(template) if is_marked else template.replace("BEGIN", "").replace("END", "")
    chatml_tokenizer.chat_template = template
    answers = {"The fox.<|im_end|>\n": 2, "It no longer needs it.<|im_end|>\n": 4}
    whole = encode_conversation({"messages": TURNS}, chatml_tokenizer)
    assert runs({"messages": TURNS}, chatml_tokenizer) == list(answers)
    for answer, number in answers.items():
        turns = [turn | fields if i == number else turn for i, turn in enumerate(TURNS)]
        for row in ({"messages": turns}, {"prompt": turns[:2], "completion": turns[2:]}):
            assert runs(row, chatml_tokenizer) == [other for other in answers if other != answer]
            assert encode_conversation(row, chatml_tokenizer)["id"].tolist() == whole["id"].tolist()
    selected = [turn | {"weight": 1} if turn["role"] == "assistant" else turn | {"weight": 0} for turn in TURNS]
    assert runs({"messages": selected}, chatml_tokenizer) == list(answers)


def test_an_excluded_turn_of_a_template_that_marks_other_spans_is_refused(chatml_tokenizer):
    """Two turns in one span, and a span that is not the turn's."""
    turns = [{"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B", "weight": 0}]
    joined = marked("BEGIN{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}END")
    shifted = marked(
        "{{ messages[0].content }}BEGIN<|im_end|>END{{ messages[1].content }}<|im_end|>BEGIN<|im_end|>END"
    )
    for template in (joined, shifted):
        chatml_tokenizer.chat_template = template
        with pytest.raises(ValueError, match="Turn 2 is excluded from the loss, but cannot be found"):
            encode_conversation({"messages": turns}, chatml_tokenizer)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda turns: turns[2].update(weight=0.5), "`weight` of turn 3 must be 0, 1, false or true, got 0.5"),
        (lambda turns: turns[2].update(train="no"), "`train` of turn 3 must be 0, 1, false or true, got 'no'"),
        (lambda turns: turns[2].update(loss=2.31), "`loss` of turn 3 must be"),
        (
            lambda turns: turns[2].update(train_detail=[{"begin_offset": 0}]),
            "`train_detail` of turn 3 is not supported",
        ),
        (lambda turns: turns[2].update(loss_scale=2), "`loss_scale` of turn 3 is not supported"),
        (
            lambda turns: turns[2].update(content=[{"type": "text", "text": "a", "train": False}]),
            "`train` of turn 3 is not",
        ),
        (
            lambda turns: turns[1].update(train=True),
            "`train` selects turn 2, but the loss covers only the assistant's",
        ),
        (lambda turns: turns[0].update(masked=False), "`masked` selects turn 1"),
    ],
)
def test_other_fields_that_select_tokens_are_refused_by_name(change, says, tokenizer):
    turns = [dict(turn) for turn in TURNS]
    change(turns)
    with pytest.raises(ValueError, match=says):
        encode_conversation({"messages": turns}, tokenizer)


def test_columns_that_select_tokens_are_obeyed_or_refused(tokenizer, tmp_path, capsys):
    def read(**columns):
        source = tmp_path / "chats.jsonl"
        source.write_text(json.dumps(ROWS[0] | columns) + "\n" + json.dumps(ROWS[1]) + "\n")
        return len(list(encode(str(source), tokenizer)))

    assert (read(), read(weight=1), read(weight=0)) == (2, 2, 1)
    assert "Dropped 1 of 2 conversations: 1 with a `weight` of 0." in capsys.readouterr().err
    assert (read(train=False), read(masked=True), read(trainable=True), read(weight=1, train=False)) == (1, 1, 2, 1)
    assert "Dropped 1 of 2 conversations: 1 with a `train` of False." in capsys.readouterr().err
    with pytest.raises(ValueError, match="Conversation 1: `weight` of the conversation must be 0, 1"):
        read(weight=0.7)
    with pytest.raises(ValueError, match="the column `loss_mask` is not supported"):
        read(loss_mask=[0, 0, 1, 0, 1])
    with pytest.raises(ValueError, match="the column `sample_weight` is not supported"):
        read(sample_weight=0.0)
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"prompt": "a", "completion": "b", "weight": n}) + "\n" for n in (0, 1)))
    assert len(list(encode(str(source), tokenizer))) == 1


def test_dropped_conversations_and_unknown_roles_are_counted_with_their_reasons(tokenizer, tmp_path, capsys):
    question, answer = TURNS[1:3]
    rows = [
        {"messages": [question, answer]},
        {"messages": [question, answer | {"role": "model"}]},
        {"messages": [question, answer | {"role": "model"}]},
        {"messages": [question]},
        {"messages": [question, answer | {"weight": 0}]},
        {"messages": [question, answer, answer | {"role": "gpt"}]},
    ]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(list(encode(str(source), tokenizer))) == 2
    said = capsys.readouterr().err
    assert "Dropped 4 of 6 conversations: 2 without an assistant's turn (roles: model, user); " in said
    assert "1 without an assistant's turn (roles: user)" in said
    assert "1 whose assistant's turns are all excluded from the loss" in said
    assert "2 turns have the unknown role 'model'" in said and "1 turns have the unknown role 'gpt'" in said
    source.write_text(json.dumps(rows[0]) + "\n")
    list(encode(str(source), tokenizer))
    assert capsys.readouterr().err == ""


def test_sequences_without_a_scored_token_are_counted(tokenizer, tmp_path, capsys):
    source = tmp_path / "chats.jsonl"
    long = [{"role": "user", "content": "The fox forgets. " * 40}, TURNS[2]]
    source.write_text(json.dumps({"messages": long}) + "\n")
    run = FinetuneConfig(
        data=str(source),
        model="-",
        output_dir=str(tmp_path),
        max_length=32,
        gradient_accumulation_steps=1,
        packing=False,
    )
    training = load_datasets(run, tokenizer, False)[0]
    dropped = training.datasets[0].unscored
    assert dropped > 2 and len(training) == 1
    assert f"Dropped {dropped} of {dropped + 1} sequences of {source}" in capsys.readouterr().err


WRITES_JSON = """{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\
{% if m.content is string %}{{ m.content }}{% endif %}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}\
</s>{% endgeneration %}{% else %}{{ m.content | tojson }}{% endif %}{% endfor %}"""


def call(arguments, question="Hi", tools=None):
    turn = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    return {"messages": [{"role": "user", "content": question}, turn], "tools": tools}


def tool(**schema):
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": schema}}}]


CALLS = [
    call({"city": "Paris"}, [{"type": "text", "text": "a"}], tool(a={"type": "string"})),
    call({"x": 1, "y": {"z": [{"a": 1}, {"b": 2}]}}, [{"type": "image", "url": "b"}], tool(b={"enum": ["c"]})),
]


def written(source, tokenizer):
    return [tokenizer.decode(tokens["id"]) for tokens in encode(str(source), tokenizer)]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "json", "folder"])
def test_nulls_that_arrow_adds_are_not_trained(suffix, tokenizer, tmp_path):
    """Arrow adds nulls to arguments, to lists of structs inside them, to content parts and to tools."""
    tokenizer.chat_template = WRITES_JSON
    source = tmp_path / ("folder" if suffix == "folder" else f"calls.{suffix}")
    if suffix == "jsonl":
        source.write_text("".join(json.dumps(row) + "\n" for row in CALLS))
    elif suffix == "json":
        source.write_text(json.dumps(CALLS))
    else:
        source.mkdir() if suffix == "folder" else None
        datasets.Dataset.from_list(CALLS).to_parquet(source / "train.parquet" if suffix == "folder" else source)
    expected = [tokenizer.apply_chat_template(row["messages"], row["tools"], tokenize=False) for row in CALLS]
    assert written(source, tokenizer) == expected and "null" not in "".join(expected)


def test_nulls_that_the_author_wrote_are_trained(tokenizer, tmp_path):
    """Nulls in a JSON file, and in JSON strings in a table, are retained. Null fields of a turn are dropped."""
    tokenizer.chat_template = WRITES_JSON
    rows = [call({"unit": None}, "2024-01-01", tool(a={"default": None})) for _ in range(2)]
    rows[0]["messages"][1]["content"] = None
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "objects.json").write_text("\n".join(json.dumps(row, indent=1) for row in rows))
    (tmp_path / "array.JSON.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    expected = [tokenizer.apply_chat_template(row["messages"], row["tools"], tokenize=False) for row in rows]
    assert all('"unit": null' in text and '"default": null' in text and "2024-01-01" in text for text in expected)
    for file in tmp_path.iterdir():
        assert written(file, tokenizer) == expected
    as_strings = [row | {"tools": json.dumps(row["tools"])} for row in rows]
    for row in as_strings:
        row["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"unit": null}'
    datasets.Dataset.from_list(as_strings).to_parquet(tmp_path / "calls.parquet")
    texts = written(tmp_path / "calls.parquet", tokenizer)
    assert all('\\"unit\\": null' in text and '"default": null' in text for text in texts)


def test_a_line_that_is_not_json_is_named(tokenizer, tmp_path):
    source = tmp_path / "chats.jsonl"
    source.write_text(json.dumps(ROWS[0]) + "\n\n" + "{'messages': 1}\n")
    with pytest.raises(ValueError, match=r"chats.jsonl cannot be read as json"):
        list(encode(str(source), tokenizer))
