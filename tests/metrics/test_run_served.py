"""Served models: its log-probabilities against the model itself, refusals, broken connections, unsuited endpoints."""

import numpy as np
import pytest
import torch
from endpoint_server import CORPUS, OPTIONS, connect, serving

from hf_longctx.metrics import ServedModel, forgetting_curve, position_loss


PROMPT = CORPUS[:30].tolist()

pytestmark = pytest.mark.usefixtures("no_key_or_proxy")


# -- how servers fail


def make_nan(choice):
    for value in choice["prompt_logprobs"][-3].values():
        value["logprob"] = float("nan")
    return choice


def hang_up(handler):
    handler.connection.close()


def half_a_reply(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')


# -- the same as the model itself


def test_predictions_at_positions(model):
    rows = np.stack([CORPUS[:30], CORPUS[50:80], CORPUS[:30]])
    with torch.inference_mode():
        likeliest = model(torch.tensor(rows)).logits.argmax(-1).numpy()
    with serving(model) as server:
        endpoint = connect(server)
        asked = len(server.requests)
        predictions = endpoint.predict(rows, 0, range(4, 29))
        assert len(server.requests) - asked == 2  # equal rows are sent once
        scored = endpoint.score(rows[0, :-1], rows[0, 5:], range(4, 29))
        server.spoil = make_nan
        assert np.flatnonzero(endpoint.predict(rows[:1], 0, range(3, 28))[0] == -1).tolist() == [26 - 3]
    assert np.array_equal(scored[1], predictions[0])
    expected, right = likeliest[:, 4:29], rows[:, 5:30]
    assert np.array_equal(predictions == right, expected == right)
    assert (predictions == right).any()


# -- forgetting curves


def test_curve_is_that_of_the_local_model(model):
    options = OPTIONS | {"data_type": "random", "id_range": (3, 11)}
    expected = forgetting_curve(model, CORPUS, **options)
    with serving(model) as server:
        curve = forgetting_curve(connect(server), CORPUS, **options)
    assert curve.points == expected.points
    assert sum(p.copy_mean + p.lm_mean for p in curve.points) > 0
    served = {"model": "tiny", "dtype": None, "attention": None, "served_with": "prompt_logprobs"}
    served |= {"endpoint": server.url, "device": None, "tokens_per_pass": None, "parameters": None, "hardware": None}
    assert {name: curve.settings.get(name) for name in served} == served
    same = expected.settings.keys() - served.keys() - {"weights_sha256"}
    assert {name: curve.settings[name] for name in same} == {name: expected.settings[name] for name in same}


def test_the_vocabulary_can_be_told(model):
    with serving(model) as server:
        endpoint = connect(server, vocab_size=12)
        curve = forgetting_curve(endpoint, None, **OPTIONS | {"eos_token_id": 1}, data_type="random")
        assert curve.settings["id_range"] == [10, 11]
        with pytest.raises(ValueError, match=r"tokens\[3\] is 12, but the model's vocabulary has 12 ids"):
            forgetting_curve(endpoint, [3, 4, 5, 12] * 20, **OPTIONS)


# -- finding the model


def test_the_only_model_is_found(model):
    with serving(model, max_model_len=100) as server:
        endpoint = ServedModel(server.url + "/completions/")
        assert (endpoint.model, endpoint.position_limit) == ("tiny", 99)
        assert repr(endpoint) == f"ServedModel('{server.url}', 'tiny')"
        assert server.requests[-1]["model"] == "tiny"
        with pytest.raises(ValueError, match=r"model must be one of \['tiny'\], got 'c'"):
            connect(server, model="c")
    with serving(model, names=("a", "b")) as server, pytest.raises(ValueError, match=r"\['a', 'b'\]. Name the model"):
        connect(server)


def test_a_key_goes_only_where_it_is_meant_to_go(model, monkeypatch):
    """It is not read from the environment, does not follow a redirection, and is not part of a name."""

    def redirect(handler):
        handler.send_response(302)
        handler.send_header("Location", other.url + "/models")
        handler.end_headers()

    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(model, key="secret") as server, serving(model) as other:
        with pytest.raises(RuntimeError, match=r"401: invalid key. Pass the key with --api-key-env"):
            connect(server)
        assert set(server.keys) == {None}
        with pytest.raises(ValueError, match=r"401: invalid key"):
            connect(server, model="tiny", api_key="wrong")
        endpoint = connect(server, api_key="secret")
        assert "secret" not in repr(endpoint)
        server.troubles.append(redirect)
        endpoint._send("/completions", {})
        assert other.keys == [None] and "Bearer secret" in server.keys


# -- endpoints that cannot do it


@pytest.mark.parametrize(
    "form, options, message",
    [
        ("chat", OPTIONS, "404: .*Not Found.*Chat APIs are not supported"),
        ("vllm", OPTIONS | {"bos_token_id": None, "eos_token_id": None}, "must have a BOS or EOS token"),
        ("vllm", OPTIONS | {"data_type": "random"}, "vocabulary size of .* is unknown. Pass vocab_size"),
        ("llama.cpp", None, "must report log-probabilities of prompt tokens.*does not contain log-prob.*with vLLM"),
    ],
)
def test_what_cannot_be_measured(model, form, options, message):
    with serving(model, form) as server, pytest.raises(ValueError, match=message):
        if options is None:
            position_loss(connect(server), CORPUS, context_length=20, sequences=1, bos_token_id=1)
        forgetting_curve(connect(server), CORPUS, **options)


def drop_entry(choice):
    del choice["prompt_logprobs"][5:7]
    return choice


def shift_entries(choice):
    choice["prompt_logprobs"][1:] = choice["prompt_logprobs"][-1:] + choice["prompt_logprobs"][1:-1]
    return choice


@pytest.mark.parametrize(
    "spoil, message",
    [
        (drop_entry, "returned log-probabilities of 28 tokens for a prompt of 30"),
        (shift_entries, r"at position 1 must include prompt token"),
        (lambda choice: {}, "a prompt of 30 tokens does not contain log-probabilities"),
    ],
)
def test_replies_that_do_not_fit(model, spoil, message):
    with serving(model) as server:
        endpoint = connect(server)
        server.spoil = spoil
        with pytest.raises(ValueError, match=message):
            endpoint.entries(PROMPT)


@pytest.mark.parametrize("reply", [[], {"choices": []}])
def test_a_reply_without_choices_is_named(model, reply, monkeypatch):
    """This was a KeyError with a traceback."""
    with serving(model) as server:
        endpoint = connect(server)
    monkeypatch.setattr(endpoint, "_send", lambda *arguments, **options: reply)
    for request in (lambda: endpoint.entries(PROMPT), lambda: endpoint.reply(CORPUS[:30], 4)):
        with pytest.raises(RuntimeError, match="must return choices"):
            request()


# -- trouble on the way


@pytest.mark.parametrize("trouble", [503, hang_up, half_a_reply], ids=lambda t: getattr(t, "__name__", str(t)))
def test_passing_trouble(model, trouble):
    """Each retry is announced."""
    with serving(model) as server:
        endpoint = connect(server)
        expected = endpoint.entries(PROMPT)
        server.troubles.extend([trouble] * 2)
        asked = len(server.requests)
        with pytest.warns(RuntimeWarning, match=r"/completions .*; retry [12] of 4 in 0.0[12] s") as announced:
            assert endpoint.entries(PROMPT) == expected
        assert len(server.requests) - asked == 3 == len(announced) + 1


@pytest.mark.parametrize("trouble, asked", [(503, 3), (403, 1)])
def test_lasting_trouble(model, trouble, asked):
    with serving(model) as server:
        endpoint = connect(server, retries=2)
        before = len(server.requests)
        server.troubles.extend([trouble] * 9)
        with pytest.raises(RuntimeError, match=f"completions answered {trouble}: in trouble"):
            endpoint.entries(PROMPT)
        assert len(server.requests) - before == asked


def test_lengths_that_only_the_server_knows_to_be_too_long(model):
    """The server's error is the reason why they were not measured. The other lengths are measured."""
    with serving(model, max_model_len=30) as server:
        server.lists_limit = False
        endpoint = connect(server)
        with pytest.raises(RuntimeError, match="400: maximum context length"):
            endpoint.entries(PROMPT)
        curve = forgetting_curve(endpoint, CORPUS, **OPTIONS)
    assert [point.length for point in curve.points] == [4, 9]
    assert curve.missing[20].endswith("answered 400: maximum context length is 30 tokens")
