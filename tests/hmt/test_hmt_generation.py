"""generate(): the arg-max of a teacher-forced forward across segment borders, with what GenerationMixin offers."""

import pytest
import torch
from demo_model import DEMO
from tiny_hmt import ROUNDING
from transformers import pipeline


def teacher_forced(model, ids, prompt_length, mask=None):
    with torch.no_grad():
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        return model(ids, attention_mask=mask).logits[:, prompt_length - 1 : -1].argmax(-1)


KINDS = [
    {},
    {"recall": False},
    {"sum_fraction": 0.9},
    {"memory_size": 1},
    {"neural_cache_weight": 0.5},
]


@pytest.mark.parametrize("settings, use_cache", [*((x, True) for x in KINDS), ({}, False)], ids=str)
def test_greedy_is_the_argmax_of_forward(make_wrapper, tokens, settings, use_cache):
    model = make_wrapper(**settings)
    prompt, mask = tokens[:, :13], torch.ones(2, 13, dtype=torch.long)
    mask[1, :9] = 0  # padded over a segment border
    ids = model.generate(
        prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, use_cache=use_cache, eos_token_id=None
    )
    assert ids.shape == (2, 33)
    assert torch.equal(ids[:, 13:], teacher_forced(model, ids, 13, mask))


@pytest.mark.parametrize("settings", [{}, {"recall_tokens": 4}], ids=str)
def test_beam_search_reorders_the_state(make_wrapper, tokens, settings):
    model = make_wrapper(**settings)
    cached, plain = (
        model.generate(tokens[:, :14], max_new_tokens=15, num_beams=3, do_sample=False, use_cache=c, eos_token_id=None)
        for c in (True, False)
    )
    assert torch.equal(cached, plain)


def test_a_conversation_goes_on_from_the_state_of_generate(make_wrapper, tokens):
    """The state has read all but the last token."""
    model = make_wrapper()
    arguments = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    assert "state" not in model.generate(tokens[:, :11], num_beams=2, **arguments)
    out = model.generate(tokens[:, :11], **arguments)
    assert out.state.lengths == (19, 19)
    question = torch.cat([out.sequences[:, -1:], tokens[:, 30:35]], 1)
    whole = torch.cat([out.sequences, tokens[:, 30:35]], 1)
    with torch.no_grad():
        logits = model(question, state=out.state).logits
        torch.testing.assert_close(logits, model(whole).logits[:, 19:], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("arguments, padding", [({}, 0), ({}, 5), ({"num_beams": 2}, 5)], ids=str)
def test_what_a_cache_has_read_is_cut_from_the_ids(make_wrapper, tokens, monkeypatch, arguments, padding):
    """As with any cache of transformers, the whole conversation is given, and its beginning is read once."""
    model, mask, read = make_wrapper(), torch.ones_like(tokens), []
    mask[1, :padding] = 0
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "attention_mask": mask, **arguments}
    whole = model.generate(tokens, **options)
    with torch.no_grad():
        start = model(tokens[:, :19], attention_mask=mask[:, :19], use_cache=True)
        assert start.past_key_values is start.cache is start.state
        rest = model(tokens[:, 19:], attention_mask=mask, cache=start.state)
    torch.testing.assert_close(rest.logits[:, -1], model(tokens, mask).logits[:, -1], atol=ROUNDING, rtol=0)
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda input_ids, **rest: (read.append(input_ids.shape[1]), forward(input_ids, **rest))[1]
    )
    out = model.generate(tokens, cache=start.cache, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, whole)
    assert read == [24, *[1] * 8]
    if not arguments:
        assert out.past_key_values is out.cache is out.state and out.state.lengths == (51, 51 - padding)


def test_the_former_name_of_the_cache(make_wrapper, tokens):
    model, whole = make_wrapper(), make_wrapper()(tokens).logits
    state = model(tokens[:, :19], use_cache=True).state
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    for name in ("cache", "past_key_values"):
        torch.testing.assert_close(model(tokens[:, 19:], **{name: state}).logits, whole[:, 19:])
        assert torch.equal(model.generate(tokens, **{name: state}, **options), model.generate(tokens, **options))
    with pytest.raises(ValueError, match="Pass only one"):
        model(tokens[:, 19:], cache=state, past_key_values=state)


@pytest.mark.parametrize(
    "settings, arguments",
    [
        ({}, {}),
        ({}, {"num_return_sequences": 3, "do_sample": True}),
        ({"memory_size": 1, "page_size": 1, "recalled_pages": 1}, {"num_beams": 3}),
    ],
    ids=str,
)
def test_sequences_continue_a_state(make_wrapper, tokens, settings, arguments):
    model, arguments = make_wrapper(**settings), {"do_sample": False, "max_new_tokens": 9, **arguments}
    with torch.no_grad():
        state = model(tokens[:, :19], use_cache=True).state
    torch.manual_seed(0)
    whole = model.generate(tokens[:, :23], eos_token_id=None, **arguments)
    for _ in range(2):  # the state is not used up
        torch.manual_seed(0)
        rest = model.generate(tokens[:, 19:23], state=state, eos_token_id=None, **arguments)
        assert torch.equal(rest, whole[:, 19:])


def test_pipeline():
    pipe = pipeline("text-generation", str(DEMO.parent / "hmt-demo"))
    options = {"max_new_tokens": 12, "do_sample": False}
    inputs = pipe.tokenizer("remember Ada red the of", return_tensors="pt")
    ids = pipe.model.generate(**inputs, **options)[0]
    assert pipe("remember Ada red the of", return_tensors=True, **options)[0]["generated_token_ids"] == ids.tolist()


def test_the_head_makes_no_logits_that_are_not_returned(make_wrapper, tokens):
    model, rows = make_wrapper(), []
    with torch.no_grad():
        last = model(tokens, logits_to_keep=9).logits  # the first call probes the head
        model.backbone.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[:2].numel()))
        assert model(tokens, logits_to_keep=1).logits.shape[1] == 1
        torch.testing.assert_close(last, model(tokens).logits[:, -9:])
    assert sum(rows) == 2 + tokens.numel()


def test_logits_of_any_positions(make_wrapper, tokens):
    model, positions = make_wrapper(), torch.tensor([40, 11, 12, 20])
    with torch.no_grad():
        whole, state = model(tokens).logits, model(tokens[:, :5], use_cache=True).state
        torch.testing.assert_close(model(tokens, logits_to_keep=positions).logits, whole[:, positions])
        rest = model(tokens[:, 5:], state=state, logits_to_keep=positions - 5).logits
    torch.testing.assert_close(rest, whole[:, positions], atol=ROUNDING, rtol=0)


def test_paper_mode_generates_within_its_segment_or_without_recall(make_wrapper, tokens):
    model = make_wrapper(recall_mode="paper")
    inside = model.generate(tokens[:, :29], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(inside[:, 29:], teacher_forced(model, inside, 29))
    assert make_wrapper(recall=False, recall_mode="paper").generate(tokens, max_new_tokens=20).shape[1] > 43


def test_assisted_generation_is_refused(make_wrapper, tokens):
    with pytest.raises(ValueError, match="stateful"):
        make_wrapper().generate(tokens[:1], max_new_tokens=4, prompt_lookup_num_tokens=2)
