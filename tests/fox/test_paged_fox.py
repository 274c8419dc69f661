"""Continuous batching gives the tokens and the log-probabilities of `generate`."""

import inspect

import pytest
import torch
from tiny_fox import check_logits, close_gates, logits, make, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache


pytestmark = pytest.mark.skipif(
    "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters,
    reason="continuous batching of FoX needs transformers 5.23",
)
START = tokens(1, 17, seed=4)[0].tolist()
PROMPTS = [[*START, 5, 6], [*START, 7], tokens(1, 4, seed=5)[0].tolist(), tokens(1, 30, seed=6)[0].tolist()]
VARIANTS = ["llama", "pro", "window", "one gate per key head", "only v shift, shared norm, biases", "no gate"]


def generate_batch(model, prompts, new=6, batching=None, persistent_manager=False, **settings):
    settings = dict(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0) | settings
    # Small pages and batches: prompts span several of both, and the common beginning is a page that two requests
    # share.
    options = dict(num_blocks=64, page_size=4, max_batch_tokens=24, return_logprobs=True) | (batching or {})
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(**settings),
        continuous_batching_config=ContinuousBatchingConfig(**options),
        persistent_manager=persistent_manager,
    )
    assert all(result.error is None for result in results.values())
    return [(result.generated_tokens, torch.tensor(result.logprobs)) for result in results.values()]


def generate(model, prompt, new=6):
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).log_softmax(-1).max(-1).values


@pytest.mark.parametrize(
    "variant, backend", [*((name, "sdpa") for name in VARIANTS), ("pro", "eager"), ("llama", "auto")]
)
def test_generate_batch_equals_generate(variant, backend):
    model = make(variant, backend)
    for prompt, (new, logprobs) in zip(PROMPTS, generate_batch(model, PROMPTS)):
        want, want_logprobs = generate(model, prompt)
        assert new == want
        check_logits(logprobs, want_logprobs)


@pytest.mark.parametrize("variant", ["llama", "pro"])
def test_several_answers_to_one_prompt(variant):
    """Requests that part ways copy pages, which must carry the gates and shifts along."""
    model = make(variant)
    answers = generate_batch(model, PROMPTS[:1], do_sample=True, top_k=0, num_return_sequences=3)
    assert len({tuple(new) for new, _ in answers}) > 1
    for new, logprobs in answers:
        scores = logits(model, torch.tensor([PROMPTS[0] + new]))[0, -len(new) - 1 : -1].log_softmax(-1)
        want = scores.gather(1, torch.tensor(new)[:, None])[:, 0]
        check_logits(logprobs, want)


def test_a_manager_starts_again_with_pages_of_the_same_size():
    model = make("pro")
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=64, page_size=4, max_batch_tokens=24)
    manager, answers = model.init_continuous_batching(settings, batching), []
    for _ in range(2):
        manager.start()
        request = manager.add_request(PROMPTS[0])
        answers.append(manager.get_result(request, timeout=60).generated_tokens)
        manager.stop()
    assert answers == [generate(model, PROMPTS[0])[0]] * 2


def test_a_persistent_manager_is_used_again():
    model = make("llama")
    first = generate_batch(model, PROMPTS[:1], persistent_manager=True)
    manager = model.init_continuous_batching()
    assert generate_batch(model, PROMPTS[:1], persistent_manager=True)[0][0] == first[0][0]
    assert model.init_continuous_batching() is manager
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching() is not manager


def test_a_float16_mask_outweighs_any_decay():
    model = close_gates(make("llama").half())
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (3, 250)]
    batched = generate_batch(model, prompts, batching=dict(max_batch_tokens=512, num_blocks=256))
    for prompt, (new, _) in zip(prompts, batched):
        assert new == generate(model, prompt)[0]


@pytest.mark.parametrize(
    "variant, backend, message",
    [
        ("pro with grouped heads and rope", "sdpa", "token shift together with RoPE or a sliding window"),
        ("pro with a window", "sdpa", "token shift together with RoPE or a sliding window"),
        ("llama", "flash_attention_2", r"does not support 'flash_attention_2'.*set_attn_implementation\('sdpa'\)"),
    ],
)
def test_what_cannot_be_exact_is_refused(variant, backend, message):
    model = make(variant)
    model.config._attn_implementation = backend
    with pytest.raises(NotImplementedError, match=message):
        generate_batch(model, PROMPTS)
