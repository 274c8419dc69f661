"""FoX in engines that cut, drop, share and take back tokens."""

import pytest
import torch
from served_fox import UNEQUAL, check, counter, difference, engine, generate, prompts, save_fox

from hf_longctx.fox import FoxForCausalLM
from hf_longctx.vllm import state


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2)
both_blocks = pytest.mark.parametrize("variant", ["llama", "pro, grouped heads, yarn"])


@both_blocks
def test_prompts_in_chunks_of_few_tokens_and_preempted_requests(variant, tmp_path):
    model = save_fox(variant, tmp_path)
    tight = dict(block_size=32, max_num_batched_tokens=40, num_gpu_blocks_override=40)
    with engine(tmp_path, **tight) as llm:
        check(model, generate(llm, prompts(*UNEQUAL)))
        check(model, generate(llm, prompts(*range(60, 280, 11)), max_tokens=100))
        assert counter(llm, "num_preemptions") > 0
        (text,) = prompts(420, seed=5)
        check(model, generate(llm, [text[:n] for n in (100, 170, 260, 330, 420)]))


@pytest.mark.parametrize("variant", ["pro", "pro, window"])
def test_kernels_with_smaller_blocks_than_the_scheduler(variant, tmp_path, monkeypatch):
    model = save_fox(variant, tmp_path)
    monkeypatch.setattr(state.FoxStateBackend, "get_supported_kernel_block_sizes", lambda kv_cache_spec=None: [32])
    with engine(tmp_path, block_size=128) as llm:
        prefix, *rest = prompts(290, 1, 33, 100)
        for _ in range(2):
            check(model, generate(llm, [prefix + text for text in rest]))


def repeats(count):
    """Return prompts that repeat themselves, so that drafts can be looked up."""
    return [text * 4 for text in prompts(*range(10, 10 + count))]


@both_blocks
def test_drafts_from_the_prompt(variant, tmp_path):
    model = save_fox(variant, tmp_path)
    with engine(tmp_path, block_size=32, speculative_config=NGRAM) as llm:
        check(model, generate(llm, repeats(12), max_tokens=60))
        drafts, accepted = (counter(llm, f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
        assert 0 < accepted < drafts


def test_drafts_from_a_fox(tmp_path):
    model = save_fox("pro", tmp_path)
    drafting = dict(model=str(tmp_path), num_speculative_tokens=3)
    with engine(tmp_path, block_size=32, speculative_config=drafting) as llm:
        for _ in range(2):  # the second time from the cache
            check(model, generate(llm, prompts(40, 100)))
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


@both_blocks
def test_compiled(variant, tmp_path):
    model = save_fox(variant, tmp_path)
    with engine(tmp_path, block_size=32, enforce_eager=False) as llm:
        check(model, generate(llm, prompts(1, 17, 64, 200)))


@both_blocks
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(variant, tmp_path):
    model = save_fox(variant, tmp_path)
    with engine(tmp_path, block_size=32, dtype="bfloat16") as llm:
        outputs = generate(llm, prompts(*UNEQUAL), prompt_logprobs=5)
    rounded, differences = FoxForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval(), []
    for output in outputs:
        ids = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        with torch.no_grad():
            a, b = (m(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids.T[1:]) for m in (model, rounded))
        differences.append((a - b).abs())
    assert difference(model, outputs)[1] <= 1.3 * torch.cat(differences).mean()


@pytest.mark.parametrize(
    "variant, options",
    [
        ("grouped heads, rope, biases, shared norm", dict(tensor_parallel_size=2)),
        ("pro, grouped heads, yarn", dict(tensor_parallel_size=2)),
        (
            "pro",
            dict(pipeline_parallel_size=2, enforce_eager=False),
        ),  # vLLM's build for CPUs does not support pipelines in eager mode
    ],
    ids=["heads", "heads of pro", "layers of pro"],
)
def test_two_ranks(variant, options, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = save_fox(variant, tmp_path)
    with engine(tmp_path, block_size=32, **options) as llm:
        check(model, generate(llm, prompts(*UNEQUAL)))
        prefix, *rest = prompts(290, 1, 33, 100)
        check(model, generate(llm, [prefix + text for text in rest]))
