"""Small FoX models in engines of vLLM, and their log-probabilities compared with transformers."""

import gc
import os
from contextlib import contextmanager

import pytest
import torch

from hf_longctx.fox import FoxConfig, FoxForCausalLM


# In the test's own process, all prompts of a call are in the same step, and an engine starts in seconds.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
vllm = pytest.importorskip(
    "vllm", reason="vLLM needs an environment of its own, which scripts/serve_vllm makes", exc_type=ImportError
)

VOCABULARY = 256
SIZES = dict(vocab_size=VOCABULARY, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
             head_dim=32, max_position_embeddings=1024, initializer_range=0.12)  # fmt: skip
TIMES = dict(decay_time_min=2, decay_time_max=200)
GROUPED = dict(num_attention_heads=6, num_key_value_heads=2)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
VARIANTS = {
    "llama": lambda: FoxConfig(**SIZES, **TIMES),
    "grouped heads, rope, biases, shared norm": lambda: FoxConfig(
        **SIZES | GROUPED, **TIMES, rope_parameters=ROPE, qkv_bias=True, qk_norm=True, qk_norm_shared=True
    ),
    "one gate per key head": lambda: FoxConfig(**SIZES | GROUPED, **TIMES, forget_gate_per_kv_head=True),
    "heads of 128": lambda: FoxConfig(**SIZES | dict(num_key_value_heads=2, head_dim=128), **TIMES),
    "bias only": lambda: FoxConfig(**SIZES, **TIMES, forget_gate="bias_only"),
    "fixed, only v shift": lambda: FoxConfig(**SIZES, **TIMES, forget_gate="fixed", v_shift=True),
    "no gate": lambda: FoxConfig(**SIZES | GROUPED, forget_gate="none", rope_parameters=ROPE),
    "window": lambda: FoxConfig(**SIZES, **TIMES, sliding_window=40),
    "pro": lambda: FoxConfig.pro(**SIZES, **TIMES),
    "pro, grouped heads, yarn": lambda: FoxConfig.pro(
        **SIZES | GROUPED, **TIMES, rope_parameters=YARN, output_gate="silu", tie_word_embeddings=True
    ),
    "pro, window": lambda: FoxConfig.pro(**SIZES, **TIMES, sliding_window=40),
}

UNEQUAL = [1, 2, 3, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 100, 127, 128, 129, 200, 257, 300]
# Sums c reach 300, where a float32 resolves 3e-5 of the logits; two layers and their norms enlarge that.
FLOAT32 = 5e-4


def save_fox(variant, folder, **options):
    """Save a FoX whose every parameter is far from its initial value; returns it, in float32."""
    torch.manual_seed(0)
    model = FoxForCausalLM(VARIANTS[variant]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "shift_proj" in name or "f_proj.weight" in name or (name.endswith("bias") and "f_proj" not in name):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder, **options)
    return model


@contextmanager
def engine(folder, **options):
    """Return an offline engine without a tokenizer."""
    import vllm.platforms.cpu
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = dict(dtype="float32", max_model_len=1024, max_num_seqs=24, enforce_eager=True, disable_log_stats=False)
    llm = vllm.LLM(str(folder), skip_tokenizer_init=True, enable_prefix_caching=True, **defaults | options)
    # Done once, and for the next engine vLLM would stumble over numba, which drafts from the prompt have imported.
    vllm.platforms.cpu.CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts(*lengths, seed=1):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=random).tolist() for n in lengths]


def generate(llm, prompts, **options):
    """Greedy, 24 tokens, unless `options` say otherwise."""
    defaults = dict(max_tokens=24, temperature=0, logprobs=5, detokenize=False, ignore_eos=True)
    params = vllm.SamplingParams(**defaults | options)
    return llm.generate([vllm.TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)


def counter(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


@torch.no_grad()
def difference(model, outputs):
    """Compare the log-probabilities of vLLM with those of transformers, which reads the tokens that vLLM generated.

    Returns:
        The largest difference over the five most likely tokens at each position, the mean difference of the generated
        tokens, and the number of generated tokens that are not the most likely ones for transformers.
    """
    worst, reply_differences, not_greedy = [], [], 0
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        for reply in output.outputs:
            ids = prompt + list(reply.token_ids)
            log_probs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            places = [*enumerate(reply.logprobs, start=len(prompt)), *enumerate(output.prompt_logprobs or [])]
            for place, entries in places:
                if entries is None:  # nothing comes before the first token
                    continue
                expected = log_probs[place - 1]
                worst += [abs(entry.logprob - expected[token].item()) for token, entry in entries.items()]
                reply_differences.append(abs(entries[ids[place]].logprob - expected[ids[place]].item()))
                not_greedy += place >= len(prompt) and expected.argmax().item() != ids[place]
    return max(worst), sum(reply_differences) / len(reply_differences), not_greedy


def check(model, outputs, sampled=False):
    """Assert equality in float32."""
    worst, _, not_greedy = difference(model, outputs)
    assert worst < FLOAT32
    assert sampled or not_greedy == 0
