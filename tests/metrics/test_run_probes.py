"""Servers that change responses: the counts equal those of the local model, or an error or a note says why not."""

import gzip
import inspect
import json

import numpy as np
import pytest
import torch
from commands import ROOT
from demo_model import DEMO
from endpoint_server import connect, serving
from tiny_models import Copier
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_longctx.corpus import load_tokens
from hf_longctx.metrics import Run, forgetting_curve
from hf_longctx.metrics.run.cost import IDS, LOG_PROBS, TEXT, request_counts
from hf_longctx.metrics.run.neutral import NEUTRAL
from hf_longctx.metrics.task import Subject
from hf_longctx.metrics.tasks.curve import Curve


FORMS = ["vllm", "ids", "llama.cpp", "text", "text only"]
OPTIONS = {"lengths": [6, 15], "repeats": 2, "seed": 1}

pytestmark = pytest.mark.usefixtures("no_key_or_proxy")


class Talker(Copier):
    """Copies what followed the last two tokens before, and otherwise says what its table has for them."""

    def __init__(self, vocab_size, seed=0, strength=7.0):
        super().__init__(2, vocab_size=vocab_size)
        self.strength, rng = strength, np.random.default_rng(seed)
        self.table = torch.from_numpy(1.5 * rng.standard_normal((61, vocab_size))).float()

    def forward(self, input_ids, logits_to_keep=0):
        (copied,) = super().forward(input_ids, logits_to_keep)
        before = torch.nn.functional.pad(input_ids, (1, 0))[:, :-1]
        table = self.table[(31 * before + input_ids) % 61][:, -logits_to_keep:]
        copied[..., 0] = 0  # no earlier occurrence
        return (torch.where(copied > 0, self.strength, table),)


@pytest.fixture(scope="module")
def byte_level():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def sentence_piece():
    """Return a tokenizer whose decoder drops the first space of a text, like the tokenizers of Llama 2 and Gemma."""
    # The tokenizer decides whether a response without token ids determines the predicted tokens. If it does not, the
    # outcome is an error. So its text does not come from the standard library, which depends on Python's version.
    text = gzip.decompress((ROOT / "model_cards" / "held_out.txt.gz").read_bytes()).decode()[:60_000]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = [chr(i) for i in range(32, 127)] + ["\n", "▁"]
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=1000, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module", params=["byte_level", "sentence_piece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def text(tokenizer):
    """Code, because its spaces and line breaks are tokens."""
    return tokenizer(inspect.getsource(json.encoder)[6000:], add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def prose(byte_level):
    return load_tokens(byte_level, "stdlib").tokens[:1500]


@pytest.fixture(scope="module")
def talker(tokenizer):
    return Talker(len(tokenizer))


def speak(server, tokenizer):
    server.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    server.encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    server.detokenize = lambda before, said: server.decode([*before, *said]).removeprefix(server.decode(before))


# -- how servers change what a model says


def penalties(names=(), obeys=True, **defaults):
    """Return a sampler with penalties. It obeys the fields in `names`, or those of OpenAI, vLLM and llama.cpp."""
    names = names or ("repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n")

    def sampler(body, ids, prompt, logits):
        found = {name: body[name] for name in names if name in body} if obeys else {}
        at = lambda *names: next((x[n] for x in (found, defaults) for n in names if n in x), None)  # noqa: E731
        last = at("repeat_last_n")
        seen = ids if last is None else ids[max(0, len(ids) - last) :]
        counts = torch.bincount(torch.tensor(seen).long(), minlength=len(logits))
        scale = at("repetition_penalty", "repeat_penalty", "rep_pen") or 1
        logits = torch.where(counts > 0, torch.where(logits > 0, logits / scale, logits * scale), logits)
        return logits - (at("presence_penalty") or 0) * (counts > 0) - (at("frequency_penalty") or 0) * counts

    return sampler


def of_responses(sampler):
    """Return the penalties of a sampler for generated tokens only."""
    return lambda body, ids, prompt, logits: sampler(body, ids[prompt:], 0, logits)


def no_repeated_ngrams(body, ids, prompt, logits):
    logits = logits.clone()
    for i in range(len(ids) - 2):
        if ids[i : i + 2] == ids[-2:]:
            logits[ids[i + 2]] = -9
    return logits


def random_choices(body, ids, prompt, logits):
    return torch.log_softmax(logits, -1) - torch.empty_like(logits).exponential_().log()


SAMPLERS = {
    "neutral": penalties(),
    **{f"{name} by default": penalties(**{name: 1.3}) for name in ("repetition_penalty", "repeat_penalty")},
    "rep_pen by default": penalties(("rep_pen",), rep_pen=1.5),
    **{f"{name} by default": penalties(**{name: 3}) for name in ("presence_penalty", "frequency_penalty")},
    "a hidden penalty": penalties(obeys=False, rep_pen=1.05),
    "additive fields obeyed, a hidden penalty": penalties(("presence_penalty", "frequency_penalty"), rep_pen=1.4),
    "a penalty of responses": of_responses(penalties(obeys=False, presence_penalty=6)),
    "no repeated n-grams": no_repeated_ngrams,
    "random choices": random_choices,
}


def of_text(change):
    return lambda choice: choice | {"text": change(choice["text"])}


def of_ids(change):
    """Change the ids where a response has them."""

    def spoil(choice):
        if choice.get("token_ids"):
            choice["token_ids"] = change(choice["token_ids"])
        if choice["logprobs"]:
            content = choice["logprobs"]["content"]
            choice["logprobs"] = {"content": [{"id": i, "logprob": -0.1} for i in change([x["id"] for x in content])]}
        return choice

    return spoil


SPOILS = {
    "the first space": of_text(lambda text: text.removeprefix(" ")),
    "spaces at the start": of_text(str.lstrip),
    "spaces at both ends": of_text(str.strip),
    "first line break": of_text(lambda text: text.removeprefix("\n")),
    "spaces at the end": of_text(str.rstrip),
    "spaces as letters": of_text(lambda text: text.replace(" ", "Ġ")),
    "stop strings": lambda choice: choice | ({"text": "", "finish_reason": "stop"} if "the" in choice["text"] else {}),
    "no text": of_text(lambda text: ""),
    "ids as strings": of_ids(lambda ids: [f"token_id:{i}" for i in ids]),
    "ids and an end": of_ids(lambda ids: [*ids, 2]),
    "ids after the prompt": of_ids(lambda ids: [5, 6, 7, *ids]),
    "ids of the prompt": of_ids(lambda ids: [5, 6, 7, *ids][: len(ids)]),
    "ids without the first": of_ids(lambda ids: ids[1:]),
    "ids without the last": of_ids(lambda ids: ids[:-1]),
    "ids plus one": of_ids(lambda ids: [i + 1 for i in ids]),
    "ids in a list": of_ids(lambda ids: [ids]),
    "words as ids": of_ids(lambda ids: ["fox" for _ in ids]),
}


def outcome(server, text, tokenizer, expected):
    """Whether the counts are right, with a note or without; else the error. Wrong counts without a note fail."""
    try:
        curve = forgetting_curve(connect(server, tokenizer=tokenizer, backoff=0), text, **OPTIONS)
    except (ValueError, RuntimeError) as error:
        return str(error)
    right = all(point == expected[point.length] for point in curve.points)
    assert right or curve.doubts, "wrong without a word"
    assert curve.settings.get("notes", []) == [*curve.doubts]
    assert all(doubt in curve.summary() for doubt in curve.doubts)
    return "right" if right and not curve.doubts else " ".join(curve.doubts)


@pytest.fixture(scope="module")
def expected(talker, text):
    points = forgetting_curve(talker, text, **OPTIONS).points
    assert points[-1].copy_mean > 0.8
    return {point.length: point for point in points}


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["byte_level"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_sampler_changes_counts_silently(talker, tokenizer, text, expected, form, name):
    with serving(talker, form) as server:
        speak(server, tokenizer)
        server.sampler = SAMPLERS[name]
        found = outcome(server, text, tokenizer, expected)
    obeys = name == "neutral" or ("by default" in name and "rep_pen" not in name)
    assert (found == "right") == (obeys or form == "vllm")


@pytest.mark.slow
@pytest.mark.parametrize("name", SPOILS)
def test_no_response_changes_counts_silently(talker, tokenizer, text, expected, name):
    """Ids of another response are not used, and a text without its spaces is not mistaken for another text."""
    for form in FORMS[3:] if "ids" not in name else FORMS[1:3]:
        with serving(talker, form) as server:
            speak(server, tokenizer)
            server.sampler, server.spoil = SAMPLERS["neutral"], SPOILS[name]
            found = outcome(server, text, tokenizer, expected)
        if "ids" in name:
            assert found == "right"
        elif "first space" in name or ("spaces at" in name and "the end" not in name):
            assert "with its first space" in found


# -- fields


def test_only_refused_fields_are_omitted():
    refused = {"top_k", "typical", "repeat_penalty", "rep_pen", "mirostat_mode"}
    with serving(Talker(40), "ids") as server:
        server.refusal = lambda body: (422, "unknown fields") if refused & body.keys() else None
        endpoint = connect(server, vocab_size=40)
        assert endpoint.fields == {name: value for name, value in NEUTRAL.items() if name not in refused}
        server.refusal = lambda body: (400, "temperature must be positive") if body.get("temperature") == 0 else None
        assert "temperature" not in connect(server, vocab_size=40).fields
        server.refusal = lambda body: (400, "no")
        with pytest.raises(ValueError, match="answered 400: no"):
            connect(server, vocab_size=40)
        server.refusal = lambda body: None
        server.troubles.append(503)
        with pytest.warns(RuntimeWarning, match="503"):
            assert connect(server, vocab_size=40).fields == NEUTRAL


@pytest.mark.parametrize("form", FORMS)
def test_every_request_asks_for_neutral_sampling(byte_level, prose, form):
    talker = Talker(len(byte_level))
    with serving(talker, form) as server:
        speak(server, byte_level)
        endpoint = connect(server, tokenizer=byte_level)
        forgetting_curve(endpoint, prose, **OPTIONS)
        if form == "vllm":
            endpoint.reply(np.arange(3, 30), 3)
        accepted = [body for body in server.requests if isinstance(body["prompt"], str) == (form == "text only")]
        assert all(body["temperature"] == 0 for body in accepted)
        strong = [body for body in accepted if not NEUTRAL.items() <= body.items()]
        assert all(len({2, 64} & {*map(repr, body.values())}) or 2 in body.values() for body in strong)
        assert len(strong) <= 6 and (form != "vllm" or not strong)


# -- what is read


def test_ids_of_bos_and_eos_come_from_the_tokenizer(byte_level, prose):
    with serving(Talker(len(byte_level)), "ids") as server:
        speak(server, byte_level)
        curve = forgetting_curve(connect(server, tokenizer=byte_level), prose, **OPTIONS)
    assert (curve.settings["bos_token_id"], curve.settings["eos_token_id"]) == (1, 2)


def test_a_server_without_usage(byte_level, prose):
    """Without usage, we do not know whether the server encodes a text as we do. The message said "None tokens"."""
    with serving(Talker(len(byte_level)), "ids") as server:
        speak(server, byte_level)
        server.usage = False
        with pytest.warns(RuntimeWarning, match=r"does not report usage\.prompt_tokens"):
            endpoint = connect(server, tokenizer=byte_level)
        curve = forgetting_curve(endpoint, prose, **OPTIONS)
        assert "does not report usage.prompt_tokens" in curve.summary()
        server.form = "text only"
        with pytest.raises(ValueError, match=r"must report usage.prompt_tokens, .* got no such count"):
            connect(server, tokenizer=byte_level)


def test_another_token_than_the_first_of_the_logprobs_is_an_error():
    def with_top(choice):
        for entry in (choice["logprobs"] or {"content": []})["content"]:
            entry["top_logprobs"] = [{"id": entry["id"] + 1, "logprob": -0.05}]
        return choice

    with serving(Talker(40), "llama.cpp") as server:
        server.spoil = with_top
        with pytest.raises(ValueError, match="must generate the most likely token"):
            connect(server, vocab_size=40)


def test_penalties_of_replies_are_noticed():
    """A needle is measured by responses. Penalties do not change log-probabilities."""
    for sampler, noted in ((penalties(), 0), (penalties(obeys=False, rep_pen=3), 1)):
        with serving(Talker(40), "vllm") as server:
            server.sampler = sampler
            endpoint = connect(server, vocab_size=40)
            endpoint.reply(np.arange(3, 30), 3)
            assert len(endpoint.notes) == noted and ("most likely" in "".join(endpoint.notes)) == noted


# -- journals


@pytest.mark.parametrize("form", FORMS[:4])
@pytest.mark.parametrize("file", ["responses", "trials"])
def test_a_journal_refuses_another_model_at_the_same_address(byte_level, prose, tmp_path, form, file):
    options = {"tokenizer": byte_level}
    if file == "responses":
        options["journal"] = tmp_path / "journal"
    run = Run(tmp_path / "journal" if file == "trials" else None)
    with serving(Talker(len(byte_level)), form) as server:
        speak(server, byte_level)
        first = forgetting_curve(connect(server, **options), prose, **OPTIONS, run=run)
        server.started = 2  # the same model, restarted
        assert forgetting_curve(connect(server, **options), prose, **OPTIONS, run=run).points == first.points
        server.model = Talker(len(byte_level), seed=1)  # another checkpoint copies as well
        if file == "trials" or form != "vllm":  # with log-probabilities, there are no responses to record
            with pytest.raises(ValueError, match=r"has another model, because .*\bcreated.*: 1.*\bcreated.*: 2"):
                forgetting_curve(connect(server, **options), prose, **OPTIONS, run=run)


def test_recorded_responses_are_requested_again(byte_level, prose, tmp_path):
    """The test prompts may have the same responses, although the model forgets sooner."""
    options = {"tokenizer": byte_level, "journal": tmp_path / "journal"}
    with serving(Talker(len(byte_level)), "ids") as server:
        speak(server, byte_level)
        endpoint = connect(server, **options)
        forgetting_curve(endpoint, prose, **OPTIONS)
        endpoint = connect(server, **options)
        server.model = Talker(len(byte_level), strength=-9)
        with pytest.raises(ValueError, match=r"is a journal of another model: 2 of . responses of .* changed"):
            forgetting_curve(endpoint, prose, **OPTIONS)


def test_a_journal_of_an_earlier_version_or_of_another_tokenizer(byte_level, sentence_piece, tmp_path):
    journal = tmp_path / "journal"
    with serving(Talker(len(byte_level)), "ids") as server:
        speak(server, byte_level)
        journal.write_text(json.dumps({"format": 1, "settings": {"endpoint": server.url, "model": "tiny"}}) + "\n")
        with pytest.raises(ValueError, match="an earlier version wrote it, without responses that identify the model"):
            connect(server, tokenizer=byte_level, journal=journal)
        journal.unlink()
        connect(server, tokenizer=byte_level, journal=journal)
        speak(server, sentence_piece)
        server.model = Talker(len(sentence_piece))
        with pytest.raises(ValueError, match="tokenizer_sha256 is"):
            connect(server, tokenizer=sentence_piece, journal=journal)


# -- the number of requests


@pytest.mark.parametrize("form, way", [("vllm", LOG_PROBS), ("ids", IDS), ("text", TEXT)])
def test_a_dry_run_knows_the_number_of_requests(byte_level, prose, form, way):
    """It is exact for log-probabilities and for text, and a bound for ids: a request for each wrong prediction."""
    with serving(Talker(len(byte_level)), form) as server:
        speak(server, byte_level)
        before = len(server.requests)
        endpoint = connect(server, tokenizer=byte_level, concurrency=1)
        probes = len(server.requests) - before
        task = Curve(**OPTIONS)
        counts = request_counts(task.on(Subject(endpoint, byte_level, prose)))
        curve = forgetting_curve(endpoint, prose, **OPTIONS)
        sent = len(server.requests) - before - probes
    wrong = sum(2 * p.repeats * p.scored_tokens - sum(p.copy_correct) - sum(p.lm_correct) for p in curve.points)
    assert probes <= 100 and counts[LOG_PROBS] == 2 * 2 * 2
    assert sent == counts[way] if form != "ids" else wrong <= sent <= wrong + 2 * counts[LOG_PROBS] <= counts[way]
