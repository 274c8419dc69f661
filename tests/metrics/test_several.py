"""Multi-needle and variable tracking: what is drawn and hidden, who is right, and where the results go."""

import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from hf_longctx.metrics import MultiNeedle, VariableTracking, paired_differences, read_result, several_facts
from hf_longctx.metrics.report.comparison import compare
from hf_longctx.metrics.report.conclusion import conclusion
from hf_longctx.metrics.report.export import scores
from hf_longctx.metrics.several.result import (
    SeveralAnswer,
    SeveralPoint,
    assign,
    draw_needles,
    draw_variables,
    hide,
)


TOKENIZER = transformers.ByT5Tokenizer()
PROSE = TOKENIZER("".join(f"Sentence {i} is about {i * i}. " for i in range(300)), add_special_tokens=False)[
    "input_ids"
]
NEEDLES, VARIABLES = {"needles": 4}, {"chains": 2, "hops": 3}


def assigned(text):
    """The number that each variable has in the end, by a plain reading of the assignments from top to bottom."""
    values = {}
    for name, variable, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))", text):
        values[name] = values[variable] if variable else number
    return values


def solve(prompt):
    """The right answer to a prompt, from its text alone."""
    question = prompt.rpartition("Question: ")[2]
    if "secret numbers" in question:
        name = re.search(r"numbers of (\S+) in", question)[1]
        return re.findall(rf"One of the secret numbers of {name} is (\d+)\.", prompt)
    value = re.search(r"the value (\d+)", question)[1]
    return [name for name, number in assigned(prompt).items() if number == value]


class Replier(nn.Module):
    """Replies what `write` makes of a prompt, within the tokens that it is given."""

    generation_config = SimpleNamespace(pad_token_id=None)
    config = SimpleNamespace(vocab_size=384, bos_token_id=1, eos_token_id=1)

    def __init__(self, write):
        super().__init__()
        self.write, self.prompts = write, []

    def forward(self, input_ids):
        return (torch.zeros(*input_ids.shape, 384),)

    def generate(self, input_ids, max_new_tokens, **options):
        self.prompts.append(input_ids[0].tolist())
        reply = TOKENIZER(self.write(TOKENIZER.decode(self.prompts[-1][1:])), add_special_tokens=False)["input_ids"]
        return torch.tensor([[*self.prompts[-1], *reply[:max_new_tokens]]])


ORACLE = lambda prompt: f" {', '.join(solve(prompt)).lower()}."  # noqa: E731 - case does not count
BLIND = lambda prompt: " 1234567, 7654321, ABCDE, " + "and so on " * 40  # noqa: E731


@pytest.mark.parametrize("chains, hops", [(1, 1), (5, 6)])
def test_variables_have_their_values(chains, hops):
    for seed in range(20):
        asked = assign(random.Random(seed), chains, hops, letters=5)
        values = assigned("\n".join(asked.statements))  # a KeyError if one comes before the variable that it takes
        assert len(values) == chains * (hops + 1) and len(set(values.values())) == chains
        value = values[asked.answers[0]]
        assert asked.answers == tuple(name for name, other in values.items() if other == value)
        assert value in asked.question and f"{hops + 1} variables have the value {value}" in asked.begin


def test_the_example_is_solved_and_another():
    asked = draw_variables(random.Random(0), 1, 4)
    example, answer = re.search(r"(.*)They are (.*?)\.\n", asked.intro, re.DOTALL).groups()
    assert solve(example) == answer.split(", ") and len(answer.split(", ")) == 5
    assert not set(answer.split(", ")) & set(asked.answers)


def test_needles_are_different_numbers_of_one_name():
    asked = draw_needles(random.Random(0), 8)
    assert len(set(asked.answers)) == 8 and all(re.fullmatch(r"\d{7}", number) for number in asked.answers)
    assert solve(f"{' '.join(asked.statements)}{asked.question}") == list(asked.answers)


def test_statements_stay_in_order_between_sentences():
    rng = np.random.default_rng(0)
    for _ in range(50):
        haystack, ends = rng.integers(3, 99, rng.integers(1, 60)), None
        ends = rng.random(len(haystack)) < 0.2
        statements = [np.full(rng.integers(1, 5), -i - 1) for i in range(rng.integers(1, 6))]
        depths = sorted(rng.random(len(statements)))
        ids, positions = hide(haystack, ends, statements, depths)
        assert ids[ids > 0].tolist() == haystack.tolist()
        assert ids[ids < 0].tolist() == np.concatenate(statements).tolist()
        for position, statement, depth in zip(positions, statements, depths):
            assert (ids[position : position + len(statement)] == statement).all()
            before = (ids[:position] > 0).sum()
            at = int(len(haystack) * depth)
            assert before == at if not ends[:at].any() else ends[before - 1] and before <= at


@pytest.mark.parametrize("task, tokens", [(NEEDLES, PROSE), (VARIABLES, None)], ids=["needles", "variables"])
def test_an_oracle_finds_all_and_a_blind_one_nothing(task, tokens):
    model = Replier(ORACLE)
    result = several_facts(model, TOKENIZER, tokens, lengths=[1900, 2600], repeats=3, **task)
    assert [point.match_rate for point in result.points] == [1, 1]
    assert isinstance(result, MultiNeedle if task is NEEDLES else VariableTracking)
    assert result.points[0].facts == 4 and len(model.prompts) == 6 and len({*map(tuple, model.prompts)}) == 6
    for prompt, answer in zip(model.prompts[:3], result.points[0].answers):
        text = TOKENIZER.decode(prompt[1:])
        assert prompt[0] == 1 and len(prompt) < 1900
        statements = re.findall(r"\n(?:One of|VAR)[^\n]*\n", text.rpartition("Keep track")[2])
        assert [text.rfind(s) + 1 for s in statements] == list(answer.positions)
    assert (
        several_facts(Replier(BLIND), TOKENIZER, tokens, lengths=[1900], repeats=3, **task).points[0].match_rate == 0
    )


def half(prompt):
    return ", ".join(solve(prompt)[::2])


def test_parts_count_by_their_share():
    (point,) = several_facts(Replier(half), TOKENIZER, PROSE, lengths=[900], needles=4, repeats=2).points
    assert [answer.found for answer in point.answers] == [(True, False, True, False)] * 2
    assert point.match_rate == 0.5 and point.interval is None
    many = SeveralPoint(900, point.answers * 5)
    assert many.interval == pytest.approx((0.237, 0.763), abs=1e-3)  # as of ten answers, and not of forty


def test_in_a_chat_the_reply_begins_like_the_answer():
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.chat_template = "<u>{{ messages[0].content }}</u>"
    model = Replier(ORACLE)
    result = several_facts(model, tokenizer, PROSE, lengths=[900], needles=2, repeats=1, chat_template=True)
    text = TOKENIZER.decode(model.prompts[0])
    assert text.startswith("<u>Secret numbers are hidden") and re.search(
        r"above\?</u>The secret numbers of .* are$", text
    )
    assert result.points[0].match_rate == 1 and result.settings["chat_template"]


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(lengths=[100], needles=4), "length 100 is too short: question, facts and reply take"),
        (
            dict(lengths=[900, 90_000], needles=4),
            "the text has 8444 tokens, and 8[0-9]+ are needed at length 90000",
        ),
        (dict(lengths=[900], needles=1), "needles must be at least 2, got 1"),
        (dict(lengths=[900], chains=0), "chains must be at least 1, got 0"),
        (dict(lengths=[900], hops=1.5), "hops must be a whole number, got 1.5"),
        (dict(lengths=[900], needles=4, chat_template=True), "has no chat template"),
        (dict(lengths=[900], needles=4, chat_template="no"), "chat_template must be True or False, got 'no'"),
        (dict(lengths=[900], needles=4, tokenizer="x"), "tokenizer must be the tokenizer of the model"),
        (dict(lengths=[900], needles=4, train_length=0), "train_length must be at least 1, got 0"),
        (dict(lengths=[900], needles=4, corpus_name=3), "corpus_name must be a text, or None, got 3"),
        (dict(lengths=[900], hops=17_576), "chains=1 and hops=17576 need more names"),
        (dict(lengths=[900], chains=90_001, hops=1), "chains=90001 and hops=1 need more .* numbers"),
    ],
)
def test_bad_input_is_named_before_the_model_runs(options, words):
    with pytest.raises(ValueError, match=words):
        several_facts(Replier(None), tokens=PROSE, **{"tokenizer": TOKENIZER} | options)


def test_a_model_that_cannot_reply_is_refused():
    silent = nn.Identity()
    silent.config = Replier.config
    with pytest.raises(ValueError, match="no generate method; give a model that has one"):
        several_facts(silent, TOKENIZER, PROSE, lengths=[900], needles=4)


@pytest.fixture(scope="module")
def results():
    return {
        name: several_facts(
            Replier(write), TOKENIZER, PROSE, lengths=[900, 1500], needles=4, repeats=6, corpus_name="t"
        )
        for name, write in (("half", half), ("oracle", ORACLE))
    }


def test_a_file_gives_the_result_back(results, tmp_path):
    results["half"].save(tmp_path / "several.json")
    again = read_result(tmp_path / "several.json")
    assert (
        again == results["half"] and again.summary() == "found: 2 of 4 at 900 tokens, 2 of 4 at 1500 tokens; 6 repeats"
    )
    assert again.table().rows[0][:3] == (900, "2 of 4", "50.0%")
    once = MultiNeedle([SeveralPoint(900, results["oracle"].points[0].answers[:1])])
    assert once.summary() == "found: 4 of 4 at 900 tokens; 1 repeat"
    with pytest.raises(ValueError, match="about the same number of facts"):
        SeveralPoint(9, [SeveralAnswer("", [True], [1]), SeveralAnswer("", [True, False], [1])])


def test_results_go_where_those_of_needles_go(results, tmp_path, words):
    text = compare(results, tmp_path / "both.md")
    assert "oracle finds more than half in the mean over all lengths: sure." in text
    assert paired_differences(*results.values())[0].second == 1
    assert conclusion([results["oracle"]]) == [
        "Finds several numbers hidden in a text of up to 1,500 tokens (24 of 24 questions)."
    ]
    assert scores(results["half"])[0].task == "multi_needle.900"
    picture = words(results["half"].plot, train_length=1000)
    assert "of 4 facts, named" in picture and "6 prompts of each length" in picture and "training context" in picture
