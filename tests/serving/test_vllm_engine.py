"""FoX in vLLM equals FoX in transformers, whatever vLLM's scheduler does with the requests."""

import pytest
import torch
from served_fox import UNEQUAL, VARIANTS, check, engine, generate, prompts, save_fox


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # vLLM reads every name that torch has


@pytest.fixture(scope="module", params=VARIANTS)
def served(request, tmp_path_factory):
    """Return a model of transformers and its engine, with blocks of 32 tokens."""
    folder = tmp_path_factory.mktemp("fox")
    model = save_fox(request.param, folder, max_shard_size="200KB" if request.param == "pro" else "5GB")
    assert len(list(folder.glob("*.safetensors"))) > 1 or request.param != "pro"
    with engine(folder, block_size=32) as llm:
        yield model, llm


def test_a_prompt_has_the_tokens_of_generate(served):
    model, llm = served
    (prompt,) = prompts(57)
    outputs = generate(llm, [prompt])
    check(model, outputs)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(outputs[0].outputs[0].token_ids) == ids[0, 57:].tolist()


def test_prompts_of_unequal_lengths_together(served):
    model, llm = served
    check(model, generate(llm, prompts(*UNEQUAL), prompt_logprobs=5))


def test_prefixes_come_from_the_cache(served):
    model, llm = served
    prefix, *rest = prompts(290, 1, 5, 33, 64, 100, 7, seed=2)
    texts = [prefix + text for text in rest]
    check(model, generate(llm, texts[:1]))
    for _ in range(2):
        outputs = generate(llm, texts)
        assert all(output.num_cached_tokens >= 256 for output in outputs)
        check(model, outputs)


def test_replies_to_one_prompt(served):
    model, llm = served
    check(model, generate(llm, prompts(40, 150, seed=3), n=4, temperature=1.0), sampled=True)


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_prompts_that_begin_with_each_other(served, order):
    model, llm = served
    (text,) = prompts(420, seed=4 + order)
    check(model, generate(llm, [text[:n] for n in [100, 170, 260, 330, 420][::order]]))


def test_hundreds_of_decoded_tokens(served):
    model, llm = served
    check(model, generate(llm, prompts(20, 133, seed=6), max_tokens=300))
