"""generate(): each row is generated as if it stood alone and was read again for each token."""

import pytest
import torch
from demo_model import DEMO
from streams import padded
from tiny_hmt import ROUNDING
from transformers import pipeline


KINDS = [
    ({}, 1),
    ({}, 2),
    ({"recall": False}, 1),
    ({"sum_fraction": 0.9}, 1),
    ({"recall_tokens": 4}, 2),
    ({"neural_cache_weight": 0.5}, 1),
    ({"memory_size": None}, 2),
]


@pytest.mark.parametrize("settings, beams", KINDS, ids=str)
def test_unequal_prompts_generate_what_each_generates_without_a_cache(make_wrapper, tokens, settings, beams):
    model, (ids, mask) = make_wrapper(**settings), padded(tokens)
    options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    batch = model.generate(ids, attention_mask=mask, **options)[:, 43:]
    for row, new, real in zip(ids, batch, mask.bool()):
        assert torch.equal(new, model.generate(row[None, real], use_cache=False, **options)[0, int(real.sum()) :])


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("arguments, padding", [({}, 0), ({}, 5), ({"num_beams": 2}, 5)], ids=str)
def test_what_a_cache_has_read_is_cut_from_the_ids(make_wrapper, tokens, arguments, padding, name):
    """As with any cache of transformers, the caller passes the whole conversation, and its beginning is read once."""
    model, mask, read = make_wrapper(), torch.ones_like(tokens), []
    mask[1, :padding] = 0
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "attention_mask": mask, **arguments}
    whole = model.generate(tokens, **options)
    with torch.no_grad():
        start = model(tokens[:, :19], attention_mask=mask[:, :19], use_cache=True)
        assert start.past_key_values is start.cache is start.state
        rest = model(tokens[:, 19:], attention_mask=mask, **{name: start.state})
    torch.testing.assert_close(rest.logits[:, -1], model(tokens, mask).logits[:, -1], atol=ROUNDING, rtol=0)
    hook = model.register_forward_pre_hook(
        lambda _, x, inputs: read.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    out = model.generate(tokens, **{name: start.state}, return_dict_in_generate=True, **options)
    hook.remove()
    assert torch.equal(out.sequences, whole)
    assert read == [24, *[1] * 8]
    assert ("state" in out) == (not arguments)
    if not arguments:  # the state has read all but the last token
        assert out.past_key_values is out.cache is out.state and out.state.lengths == (51, 51 - padding)
        last = model(whole[:, -1:], state=out.state).logits
        mask = torch.cat([mask, mask.new_ones(2, 9)], 1)
        torch.testing.assert_close(last, model(whole, mask).logits[:, -1:], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    "settings, arguments",
    [({}, {}), ({}, {"num_return_sequences": 3, "do_sample": True}), ({"memory_size": None}, {"num_beams": 3})],
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


def test_an_output_without_a_cache_has_no_state(make_wrapper, tokens):
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    cached, uncached = (make_wrapper().generate(tokens, use_cache=x, **options) for x in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences) and "state" in cached and "state" not in uncached


def test_paper_mode_generates_within_its_segment_or_without_recall(make_wrapper, tokens):
    model, options = make_wrapper(recall_mode="paper"), {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    inside, uncached = (model.generate(tokens[:, :29], use_cache=x, **options) for x in (True, False))
    assert torch.equal(inside, uncached)
    assert make_wrapper(recall=False, recall_mode="paper").generate(tokens, max_new_tokens=20).shape[1] > 43
