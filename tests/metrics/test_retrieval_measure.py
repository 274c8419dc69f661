"""Running models over needles and lines, and what all measured parts share: resuming, processes, failures."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from endpoint_server import serving
from tiny_models import LLAMA, Copier, build, copied_ids

from hf_longctx.metrics import Run, ServedModel, line_retrieval, needle_in_a_haystack, position_loss
from hf_longctx.metrics.retrieval.wording import ANSWER


# -- an exact copier answers


class Talker(Copier):
    """A `Copier` that also generates."""

    generation_config = SimpleNamespace(pad_token_id=None)
    generate_calls = 0

    def generate(self, input_ids, attention_mask, max_new_tokens, do_sample, **options):
        assert not do_sample
        assert attention_mask.all()
        self.generate_calls += 1
        ids = input_ids[0].tolist()
        for _ in range(max_new_tokens):
            ids.append(copied_ids(ids, self.k, self.window)[-1])
        return torch.tensor([ids])


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return transformers.ByT5Tokenizer()


@pytest.fixture(scope="module")
def prose(bytes_tokenizer):
    text = "".join(f"Sentence {i} is about the number {i * i}. " for i in range(200))
    return bytes_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_needles_are_found(bytes_tokenizer, prose):
    options = dict(lengths=[700, 900], depths=[0, 0.5, 1], mode="easy", repeats=2, replies=False)
    result = needle_in_a_haystack(Copier(12), bytes_tokenizer, prose, **options)
    assert (result.lengths, result.depths) == ([700, 900], [0, 0.5, 1])
    assert (result.grid("exact_rate") == 1).all()
    assert (result.grid("match_rate") == 1).all()
    assert np.allclose(result.grid("probability"), 1 / (1 + 383 * np.exp(-9)))
    assert {len(cell.answers) for cell in result.cells} == {2}
    assert result.cells[0].positions == (1, 1)
    assert all(cell.answers[0].reply is None for cell in result.cells)
    assert result.settings["mode"] == "easy"


def test_a_needle_lies_between_sentences(bytes_tokenizer, prose):
    asked = []
    model = Copier(12)
    model.register_forward_pre_hook(lambda _, args: asked.append(args[0][0].tolist()))
    (cell,) = needle_in_a_haystack(
        model, bytes_tokenizer, prose, lengths=[900], depths=[0.6], mode="standard", replies=False
    ).cells
    ids = asked[-1]
    assert len(ids) == 900 - 1  # all but the last token of the answer
    before, _, after = bytes_tokenizer.decode(ids[1:]).partition("\nThe best thing to do in San Francisco is" + ANSWER)
    assert ids[0] == 1
    assert before.endswith(".")
    assert after.startswith("\n Sentence")
    assert cell.positions == (1 + len(before),)


@pytest.mark.parametrize("k, asked", [(12, 0), (10**6, 2)], ids=["knows", "does not know"])
def test_replies(bytes_tokenizer, prose, k, asked):
    model = Talker(k)
    (cell,) = needle_in_a_haystack(model, bytes_tokenizer, prose, lengths=[700], depths=[0.5], repeats=2).cells
    assert model.generate_calls == asked  # an exact answer is the response
    assert (cell.match_rate, cell.answers[0].reply == ANSWER) == ((0, False) if asked else (1, True))


def test_replies_of_a_real_model(bytes_tokenizer, prose):
    model = build("llama", **LLAMA | {"vocab_size": 384})
    model.generation_config.repetition_penalty = 1.5  # with a penalty, generation is not greedy
    (cell,) = needle_in_a_haystack(model, bytes_tokenizer, prose, lengths=[500], depths=[0.5], seed=3).cells
    (answer,) = cell.answers
    assert not answer.exact
    assert answer.log_prob == pytest.approx(-answer.tokens * np.log(384), rel=0.05)
    model.generation_config.repetition_penalty = 1.0
    with torch.inference_mode():
        same = needle_in_a_haystack(model, bytes_tokenizer, prose, lengths=[500], depths=[0.5], seed=3).cells[0]
    assert same.answers[0].reply == answer.reply


def test_lines_are_found(bytes_tokenizer):
    result = line_retrieval(Talker(30), bytes_tokenizer, lines=[1, 5, 9], repeats=3)
    assert [point.match_rate for point in result.points] == [1, 1, 1]
    assert [point.exact_rate for point in result.points] == [1, 1, 1]
    assert [point.lines for point in result.points] == [1, 5, 9]
    assert all(answer.reply.startswith(" <") for point in result.points for answer in point.answers)
    blind = line_retrieval(Talker(30, window=9), bytes_tokenizer, lines=[5], repeats=2)
    assert (blind.points[0].match_rate, blind.points[0].exact_rate) == (0, 0)


@pytest.mark.parametrize("k", [30, 10**6], ids=["knows", "does not know"])
def test_served_models(bytes_tokenizer, prose, k):
    """The result, including responses, equals that of the local model."""
    local = Talker(k)
    with serving(local) as server:
        server.decode = bytes_tokenizer.decode
        served = ServedModel(server.url)
        loss = position_loss(served, prose, context_length=50, sequences=2, bos_token_id=1)
        needle = needle_in_a_haystack(served, bytes_tokenizer, prose, lengths=[500], depths=[0, 1], bos_token_id=1)
        lines = line_retrieval(served, bytes_tokenizer, lines=[2, 3], repeats=2, bos_token_id=1)
        asked = [body for body in server.requests if body["max_tokens"] > 1]
    assert bool(asked) == (k != 30) and not any(body["skip_special_tokens"] for body in asked)
    assert np.allclose(loss.loss, position_loss(local, prose, context_length=50, sequences=2).loss, atol=1e-6)
    expected = needle_in_a_haystack(local, bytes_tokenizer, prose, lengths=[500], depths=[0, 1])
    expected_lines = line_retrieval(local, bytes_tokenizer, lines=[2, 3], repeats=2)
    for one, other in zip((*needle.cells, *lines.points), (*expected.cells, *expected_lines.points)):
        for a, b in zip(one.answers, other.answers):
            assert (a.exact, a.matched, a.reply) == (b.exact, b.matched, b.reply)
            assert a.exact == (k == 30)
            assert a.log_prob == pytest.approx(b.log_prob, rel=1e-5)
    assert needle.settings["model"] == "tiny"
    assert needle.settings["served_with"] == "prompt_logprobs"


# -- journals and failures


def test_a_result_has_what_is_asked_for_of_a_journal_with_more(tmp_path, bytes_tokenizer, capsys):
    options = dict(repeats=1, replies=False, run=Run(tmp_path / "journal", progress=True))
    line_retrieval(Copier(12), bytes_tokenizer, lines=[2, 3], **options)
    assert "100%" in capsys.readouterr().err
    result = line_retrieval(Copier(12), bytes_tokenizer, lines=[2], **options)
    assert [point.lines for point in result.points] == result.settings["lines"] == [2]


def test_nan_logits(bytes_tokenizer, prose):
    class Broken(Copier):
        def forward(self, input_ids):
            (logits,) = super().forward(input_ids)
            logits[:, 17] = torch.nan
            return (logits,)

    message = (
        "loss, trial 0: the log-probability of token 18 is nan: the logits at position 17 are not finite.*bfloat16"
    )
    with pytest.raises(ValueError, match=message):
        position_loss(Broken(12), prose, context_length=50, sequences=2)


# -- bad input


class OneId:
    name_or_path = "one"

    def __call__(self, text, **options):
        return {"input_ids": [5] * len(text)}

    def decode(self, ids, **options):
        return "?"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lengths": [9000]}, "at least 8.* for a haystack"),
        ({"depths": [50.5]}, r"numbers from 0 to 1, .* got \[50.5\]"),
        ({"tokens": [400, 5]}, r"tokens\[0\] is 400"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs requires chat_template"),
        ({"tokenizer": OneId()}, "does not cover the language"),
        ({"replies": True}, "Copier does not have a generate method. Measure without responses: replies=False"),
        ({"lines": [0, 3]}, "lines must be from 1 to 15872, got 0"),
        ({"lines": [2], "tokenizer": OneId()}, "does not cover the language"),
        (
            {"lines": [2], "model": Copier(12, vocab_size=40)},
            "the record as the tokenizer encodes it.* vocabulary has 40",
        ),
    ],
)
def test_bad_arguments(bytes_tokenizer, prose, options, message):
    arguments = {"model": Copier(10**6), "tokenizer": bytes_tokenizer, "replies": False} | options
    with pytest.raises(ValueError, match=message):
        if "lines" in options:
            line_retrieval(**arguments)
        else:
            needle_in_a_haystack(**{"tokens": prose, "lengths": [600], "depths": [0.5]} | arguments)


# -- what is compressed with a cache


class Recorder(Talker):
    """A reader of a `Copier` that records the contexts it is given."""

    def __init__(self):
        from hf_longctx.metrics import LocalReader

        super().__init__(12)
        self.config = transformers.LlamaConfig(vocab_size=384)
        self.reader, self.contexts = LocalReader(self, "full"), []
        self.reader.score = self.record
        self.reader.cache_size = lambda: None

    def record(self, ids, targets, positions, context):
        self.contexts.append((ids[:context].tolist(), ids[context : positions.start + 1].tolist()))
        return np.zeros(len(targets)), targets


@pytest.mark.parametrize("query_aware", [None, False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("metric", ["needle", "lines"])
def test_the_question_follows_the_context(bytes_tokenizer, prose, metric, chat, query_aware):
    tokenizer = transformers.ByT5Tokenizer()
    tokenizer.chat_template = "<user>{{ messages[0].content }}</user><model>"
    options = dict(query_aware=query_aware, chat_template=chat)
    model = Recorder()
    if metric == "needle":
        needle_in_a_haystack(model.reader, tokenizer, prose, lengths=[700], depths=[0.5], mode="easy", **options)
    else:
        line_retrieval(model.reader, tokenizer, lines=[3, 5], repeats=2, **options)
    for context, rest in model.contexts:
        before, question = (tokenizer.decode(ids) for ids in (context, rest))
        if query_aware:
            assert len(rest) == 1
            continue
        asked = "\nThere is an important" if metric == "needle" else "\nThe record is over."
        assert question.startswith(asked) and asked not in before
        assert before.startswith("<user>") == chat and question.count("</user>") == chat
