"""A document that is read in chunks, after an interruption, or from a file equals a document read in one call."""

import pytest
import torch
from tiny_hmt import ROUNDING, VOCAB, tiny_llama

from hf_longctx.hmt import reading
from hf_longctx.hmt.reading import load_state, read_text


TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


def tokenizer(text, **options):
    return {"input_ids": torch.tensor([[3 + ord(letter) % (VOCAB - 3) for letter in text]], dtype=torch.long)}


class Killed(Exception):
    pass


@pytest.mark.parametrize("mode, seconds", [("single_pass", 0), ("single_pass", 99), ("paper", 99)])
def test_a_reading_that_was_interrupted_goes_on(make_wrapper, monkeypatch, tmp_path, mode, seconds):
    model, file, question = make_wrapper(recall_mode=mode), tmp_path / "state.safetensors", torch.tensor([[5, 6, 7]])
    text = TEXT if mode != "paper" else TEXT[:80]  # whole segments
    monkeypatch.setattr(reading, "SEGMENTS", 2)
    monkeypatch.setattr(reading, "SAVE_EVERY", seconds)
    calls, saves, save = [], [], reading.save
    monkeypatch.setattr(reading, "save", lambda *arguments: saves.append(save(*arguments)))

    def counted(module, arguments, options):
        calls.append(options["input_ids"].shape[1] if "input_ids" in options else arguments[0].shape[1])
        if len(calls) == 3:
            raise Killed

    hook = model.register_forward_pre_hook(counted, with_kwargs=True)
    with pytest.raises(Killed):
        read_text(model, tokenizer, text, file, name="novel")
    assert len(saves) == (1 if seconds else 3)
    state = read_text(model, tokenizer, text, file, name="novel")
    assert calls == [16, 16, *[16] * ((len(text) - 32) // 16 + 1), *[len(text) % 16] * (len(text) % 16 > 0)]
    read_text(model, tokenizer, text, file, name="novel")  # the whole document has been read
    hook.remove()
    assert state.position == len(text)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    with torch.no_grad():
        expected = model(torch.cat([tokenizer(text)["input_ids"], question], 1)).logits[:, -3:]
        for found in (state, load_state(file, model)):
            torch.testing.assert_close(model(question, state=found).logits, expected, atol=ROUNDING, rtol=0)


def test_progress_outside_a_terminal_is_lines(make_wrapper, capsys, monkeypatch):
    """One line a minute and one at the end, so that a log shows that a long document is being read."""
    model = make_wrapper()
    monkeypatch.setattr(reading.time, "monotonic", lambda: 0.0)  # a busy machine would take a second
    for every, count in ((0.0, 2), (60.0, 1)):
        monkeypatch.setattr(reading, "LINE_EVERY", every)
        monkeypatch.setattr(reading, "SEGMENTS", 1)
        read_text(model, tokenizer, TEXT[: 2 * model.config.segment_length], name="novel", progress=True)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == count and lines[-1].startswith("novel: 16 of 16 tokens in 0 s, 0 s left")


def test_a_question_begins_a_segment(make_wrapper):
    with pytest.raises(ValueError, match="must be None for a model that is already an HMT"):
        reading.wrap(make_wrapper())
    with pytest.raises(ValueError, match=r"one of \['recall_tokens', 'neural_cache', 'bank'\], got 'pages'"):
        reading.wrap(tiny_llama(), "pages")
    model, question = reading.wrap(tiny_llama()), torch.tensor([[5, 6, 7]])
    state = read_text(model, tokenizer, TEXT)
    with pytest.raises(ValueError, match="must end with a full segment, got"):
        reading.ask(model, state, question, 3)
    state = read_text(model, tokenizer, TEXT, filler=3)
    assert state.position == -(-len(TEXT) // model.config.segment_length) * model.config.segment_length
    for searched in (1, 3):
        assert reading.ask(model, state, question, searched, max_new_tokens=2, eos_token_id=None).shape == (1, 5)
        assert model.config.summary_length == min(searched, 2)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("searched", [1, 2, 3])
def test_the_first_token_of_an_answer_depends_on_the_recalled_passage(beyond, searched):
    """Also if the whole question is searched, and if the question is longer than a segment."""
    model = reading.wrap(tiny_llama())
    length = model.config.segment_length
    before = beyond * length
    question = torch.arange(before + 3)[None] % 11 + 3
    firsts = []
    for text in ("ab", "cd"):
        state = read_text(model, tokenizer, text * length + "e" * length)
        options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        firsts.append(reading.ask(model, state, question, before + searched, **options).logits[0])
    assert not torch.allclose(*firsts, atol=1e-4)


def test_what_would_be_a_wrong_memory_is_refused(make_wrapper, tmp_path):
    model, file = make_wrapper(), tmp_path / "state.safetensors"
    state = read_text(model, tokenizer, TEXT, file, name="novel")
    state.save(tmp_path / "bare", model)
    for path, found in ((file, "novel"), (tmp_path / "bare", "None")):
        with pytest.raises(ValueError, match=f"contains the memory of a different document, {found}"):
            read_text(model, tokenizer, TEXT + "!", path)
    with pytest.raises(ValueError, match="novel is empty"):
        read_text(model, tokenizer, "", name="novel")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_text(model, tokenizer, TEXT, tmp_path / "no" / "x")
    with pytest.raises(ValueError, match="must be an HMTWrapper, got LlamaForCausalLM"):
        read_text(tiny_llama(), tokenizer, TEXT)
    with pytest.raises(FileNotFoundError, match=r"x\.safetensors does not exist. Write it with `hf-longctx read"):
        load_state(tmp_path / "x.safetensors", model)
    with torch.no_grad():
        model.memory.wq.mul_(2)
    for call in (lambda: load_state(file, model), lambda: read_text(model, tokenizer, TEXT, file)):
        with pytest.raises(ValueError, match="saved by a different model"):
            call()
