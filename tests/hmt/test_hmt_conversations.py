"""Conversations: each request holds all of one, the reply is that of reading all at once, only new ids are read."""

import pytest
import torch

from hf_longctx.hmt.conversations import Conversations


GREEDY = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def make_model(make_wrapper, monkeypatch):
    def make(**settings):
        model, read = make_wrapper(**settings), []
        forward = model.forward

        def counted(input_ids, **rest):
            read.append(input_ids.shape[1])
            return forward(input_ids, **rest)

        monkeypatch.setattr(model, "forward", counted)
        return model, read

    return make


def reply(model, ids):
    return model.generate(ids, **GREEDY)


def ask(conversations, model, read, ids, name="a", **options):
    """Return the answer, and how many tokens were read for it beside the generated ones."""
    read.clear()
    answer = conversations.generate(model, name, ids, **GREEDY | options)
    return answer, sum(read) - (answer.shape[1] - ids.shape[1] - 1)


SETTINGS = [
    {},
    {"recurrence": False},
    {"recall_mode": "three_pass"},
    {"memory_size": 1, "page_size": 1, "recalled_pages": 1},
    {"recall_mode": "paper", "recall": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_turn_reads_only_what_is_new(make_model, tokens, settings):
    (model, read), conversations, ids = make_model(**settings), Conversations(), tokens[:1, :12]
    counts = []
    for question in (tokens[:1, 20:33], tokens[1:, :7], tokens[1:, 7:9]):
        answer, count = ask(conversations, model, read, ids)
        assert torch.equal(answer, reply(model, ids))
        counts.append(count)
        ids = torch.cat([answer, question], 1)
    if settings.get("recall_mode") == "paper":
        assert counts == [12, 12 + 9 + 13, 12 + 9 + 13 + 9 + 7]
    else:
        assert counts == [12, 1 + 13, 1 + 7]  # the last token of a reply has not been read


def test_a_reply_that_comes_back_in_other_tokens_is_read_again(make_model, tokens):
    """As where the tokenizer cuts its text in another way. So is the same request, and a history that was edited."""
    (model, read), conversations, ids = make_model(), Conversations(), tokens[:1, :30]
    answer, _ = ask(conversations, model, read, ids)
    again, count = ask(conversations, model, read, ids)
    assert torch.equal(again, answer) and count == 1
    other = torch.cat([answer[:, :32], 3 + (answer[:, 32:] - 2) % 50, tokens[:1, :5]], 1)
    got, count = ask(conversations, model, read, other)
    assert torch.equal(got, reply(model, other)) and count == other.shape[1] - 29
    edited = torch.cat([3 + (ids[:, :1] - 2) % 50, got[:, 1:]], 1)
    got, count = ask(conversations, model, read, edited)
    assert torch.equal(got, reply(model, edited)) and count == edited.shape[1]


def test_beams_and_single_tokens(make_model, tokens):
    (model, read), conversations, ids = make_model(), Conversations(), tokens[:1, :1]
    answer, count = ask(conversations, model, read, ids)
    assert torch.equal(answer, reply(model, ids)) and count == 1
    answer, _ = ask(conversations, model, read, answer, num_beams=2)
    got, count = ask(conversations, model, read, answer)
    assert torch.equal(got, reply(model, answer)) and count == 10  # the state is that of the prompt


def test_the_conversation_used_least_recently_leaves(make_model, tokens):
    (model, read), conversations, ids = make_model(), Conversations(2), tokens[:1, :20]
    for name in "abac":
        ask(conversations, model, read, ids, name)
    assert [ask(conversations, model, read, ids, name)[1] for name in "acb"] == [1, 1, 20]
    with pytest.raises(ValueError, match="0 or more"):
        Conversations(-1)


@pytest.mark.parametrize("settings", [{}, {"memory_size": 1, "page_size": 1, "recalled_pages": 1}], ids=str)
def test_conversations_on_disk_outlive_the_process(make_model, tokens, tmp_path, settings):
    (model, read), ids = make_model(**settings), tokens[:1, :30]
    conversations = Conversations(0, tmp_path / "states")
    answer, _ = ask(conversations, model, read, ids)
    ids = torch.cat([answer, tokens[1:, :10]], 1)
    conversations = Conversations(0, tmp_path / "states")
    answer, count = ask(conversations, model, read, ids)
    assert torch.equal(answer, reply(model, ids)) and count == 11
    assert ask(conversations, model, read, ids, "b")[1] == 49
    with torch.no_grad():
        model.memory.summary_token += 1
    with pytest.warns(UserWarning, match="read again from its beginning: .* other weights"):
        got, count = ask(Conversations(0, tmp_path / "states"), model, read, ids)
    assert torch.equal(got, reply(model, ids)) and count == 49
    assert ask(Conversations(0, tmp_path / "states"), model, read, ids)[1] == 1
    assert len(list(tmp_path.glob("states/*/*"))) == 4  # of two conversations


def test_a_disk_that_fails_costs_no_reply(make_model, tokens, tmp_path):
    (model, read), ids = make_model(), tokens[:1, :20]
    (tmp_path / "states").write_text("no folder")
    conversations = Conversations(1, tmp_path / "states")
    with pytest.warns(UserWarning, match="not on disk, and stays in memory"):
        answer, _ = ask(conversations, model, read, ids)
    assert torch.equal(answer, reply(model, ids))
    assert conversations.generate(model, "a", answer, **GREEDY).shape == (1, 38)
