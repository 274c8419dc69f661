"""Forgetting curves by greedy completions: the local counts, requests, resuming, and what text cannot tell."""

import numpy as np
import pytest
import torch
from endpoint_server import CORPUS, OPTIONS, connect, serving

from hf_longctx.metrics import Run, forgetting_curve
from hf_longctx.metrics.run.engine import UnsupportedInput
from hf_longctx.metrics.run.greedy import RECHECKS


POSITIONS = range(4, 29)  # positions in inputs of 30 tokens

pytestmark = pytest.mark.usefixtures("no_key_or_proxy")


def predicted(model, rows):
    """Return whether the model itself is correct at `POSITIONS`."""
    with torch.inference_mode():
        likeliest = model(torch.tensor(rows)).logits.argmax(-1).numpy()
    return likeliest[:, POSITIONS.start : POSITIONS.stop] == rows[:, POSITIONS.start + 1 :]


def right(endpoint, rows):
    return endpoint.predict(rows, 0, POSITIONS) == rows[:, POSITIONS.start + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, concurrency, protocol",
    [("ids", 1, "reference"), ("llama.cpp", 8, "reference"), ("ids", 20, "adaptive")],
)
def test_the_curve_is_that_of_the_local_model(model, form, concurrency, protocol):
    expected = forgetting_curve(model, CORPUS, **OPTIONS, protocol=protocol)
    with serving(model, form) as server:
        server.eos = 2
        curve = forgetting_curve(connect(server, concurrency=concurrency), CORPUS, **OPTIONS, protocol=protocol)
    assert curve.points == expected.points and curve.settings["served_with"] == "greedy completions"
    assert sum(p.copy_mean + p.lm_mean for p in curve.points) > 0


@pytest.mark.slow
def test_requests_are_errors_and_one_for_each_part(model):
    rows = np.stack([CORPUS[:30], CORPUS[50:80], CORPUS[:30]])
    for concurrency, parts in ((1, 1), (8, 4)):
        with serving(model, "ids") as server:
            endpoint = connect(server, concurrency=concurrency)
            asked = len(server.requests)
            assert np.array_equal(right(endpoint, rows), predicted(model, rows))
            asked, wrong = len(server.requests) - asked, (~predicted(model, rows[:2])).sum()
            chunks = 2 * parts  # requests for a part whose beginning is correct
            assert asked <= wrong + 2 * (parts + chunks) + 2 * (parts > 1)


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_responses(model, tmp_path):
    def cut(handler):
        handler.connection.close()

    expected = forgetting_curve(model, CORPUS, **OPTIONS)
    with serving(model, "ids") as server:
        options = {"retries": 0, "concurrency": 2, "journal": tmp_path / "responses"}
        endpoint = connect(server, **options)
        server.troubles.extend([None] * 40 + [cut] * 3)
        with pytest.raises(ConnectionError):
            forgetting_curve(endpoint, CORPUS, **OPTIONS)
        server.troubles.clear()
        with open(tmp_path / "responses", "ab") as file:
            file.write(b'{"key": [')  # while a line was written
        before, known = len(server.requests), len(endpoint.greedy.answers.done)
        connect(server, **options)
        probes = len(server.requests) - before
        assert forgetting_curve(connect(server, **options), CORPUS, **OPTIONS).points == expected.points
        asked = len(server.requests) - before - 2 * probes
        assert forgetting_curve(connect(server, **options), CORPUS, **OPTIONS).points == expected.points
        checks = RECHECKS * 2 * len(OPTIONS["lengths"])
        assert len(server.requests) - before - 3 * probes - asked <= checks and known >= 37
        assert asked - checks < len(connect(server, **options).greedy.answers.done) - known + 3
        run = Run(tmp_path / "curve")
        assert forgetting_curve(connect(server, **options), CORPUS, **OPTIONS, run=run).points == expected.points
    with serving(model, "ids") as server, pytest.raises(ValueError, match="another run: endpoint is"):
        connect(server, journal=tmp_path / "responses")


def test_a_failure_stops_the_other_parts(model):
    with serving(model, "ids") as server:
        endpoint = connect(server, concurrency=2, retries=0)
        server.troubles.append(500)
        before = len(server.requests)
        with pytest.raises(RuntimeError, match="answered 500"):
            right(endpoint, np.stack([CORPUS[i : i + 30] for i in range(20)]))
        assert len(server.requests) - before < 10


# -- misleading responses


def test_fewer_tokens_than_asked_for_are_not_errors(model):
    with serving(model, "ids") as server:
        rows = np.append(CORPUS[:5], server.say(CORPUS[:5].tolist(), 25))[None]
        assert predicted(model, rows).all()
        endpoint = connect(server, concurrency=1)

        def cap(choice):
            choice["token_ids"] = choice["token_ids"][:1]
            return choice

        server.spoil = cap
        assert np.array_equal(right(endpoint, rows), predicted(model, rows))
        server.spoil, server.eos = lambda choice: choice, rows[0, 12]  # an end of text that the input contains
        endpoint = connect(server, concurrency=1)
        assert np.array_equal(right(endpoint, rows), predicted(model, rows))


@pytest.mark.parametrize("true_is_end", [False, True])
def test_an_end_that_is_not_named(model, true_is_end):
    """It is an error, unless the true token may be such an end."""
    with serving(model, "ids") as server:
        server.decode = Stripping().decode
        endpoint = connect(server, concurrency=1, tokenizer=Stripping())

        def end(choice):
            return choice | {"token_ids": [], "text": "", "finish_reason": "stop"}

        server.spoil = end
        rows = np.full((1, 30), 2 if true_is_end else 5)
        if true_is_end:
            with pytest.raises(UnsupportedInput, match="the predicted tokens are unknown at 25 of 25 positions"):
                right(endpoint, rows)
        else:
            assert not right(endpoint, rows).any()


def test_an_added_token_is_noticed(model):
    with serving(model, "ids") as server:
        endpoint, complete = connect(server), server.complete

        def with_bos(body):
            return complete(body | {"prompt": [1, *body["prompt"]]})

        server.complete = with_bos
        with pytest.raises(ValueError, match=r"read 30 tokens for a prompt of 29\. Configure the server not to add"):
            right(endpoint, CORPUS[None, :30])


class Stripping:
    """A tokenizer as of SentencePiece: ids 3 to 7 begin a word, and 8 to 12 are the same letters within one."""

    bos_token_id, bos_token, all_special_ids = 1, "<s>", [0, 1, 2]

    def __len__(self):
        return 12

    def decode(self, ids, **options):
        texts = ["", "<s>", "</s>", *(f" {x}" for x in "abcde"), *"abcd"]
        return "".join(texts[i] for i in ids).removeprefix(" ")

    def __call__(self, text, **options):
        return {"input_ids": [8 + "abcd".index(x) for x in text if x in "abcd"]}


def test_text_without_its_space_is_not_taken_for_a_token(model):
    """A server that decodes a token by itself drops the space, so that two tokens look the same."""
    tokenizer = Stripping()
    rows = CORPUS[None, :30]
    with serving(model, "text") as server:
        endpoint = connect(server, tokenizer=tokenizer)
        before = tokenizer.decode([8])
        server.decode = lambda ids: tokenizer.decode([8, *ids]).removeprefix(before)
        assert np.array_equal(right(endpoint, rows), predicted(model, rows))
        server.decode = tokenizer.decode
        endpoint = connect(server, tokenizer=tokenizer)
        with pytest.raises(UnsupportedInput, match="the predicted tokens are unknown"):
            right(endpoint, rows)


def test_a_server_of_text_needs_the_tokenizer(model):
    with serving(model, "text") as server, pytest.raises(ValueError, match=r"pass tokenizer=\.\.\. "):
        connect(server)


def test_text_without_ids_is_not_an_end(model):
    with serving(model, "ids") as server:
        server.spoil = lambda choice: choice | {"token_ids": None, "text": " fox", "finish_reason": "stop"}
        with pytest.raises(ValueError, match="did not return token ids"):
            connect(server)
