"""Prefill and decoding speed of FoX (LLaMA) and FoX (Pro), compared with transformers' Llama of the same size.

    python -m scripts.bench.generate [--layers 8] [--context 2048] [--cache dynamic|static] [--device cpu|cuda]

The models have random weights, the same width and depth, and within 1 % the same number of parameters: FoX (Pro) has a
narrower MLP, which offsets its output gate. A round reads a prompt of --context tokens and decodes --tokens more.
Results are tokens per second, medians over rounds, in which each FoX alternates with the Llama; ratios are medians of
the per-round ratio to the Llama. A model is built and compiled after the previous model's row is written, the Llama
first. With --cache static, `generate` decodes, and transformers compiles its step on a GPU. Cache bytes refer to a
DynamicCache. Operations are ATen operations per decoding step. --attention applies to FoX: auto means our kernels for
long calls on a GPU, SDPA otherwise.
"""

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from hf_longctx.fox import FoxConfig
from hf_longctx.hmt.compat_hmt import cache_name
from scripts.bench import common


TABLE = """
| model | layers | parameters | prefill tokens/s | prefill to Llama | decode tokens/s | decode to Llama |\
 cache bytes a token | operations a step |
| {name} | {layers} | {millions:.1f} M | {prefill_tokens_per_s:.0f} | {prefill_to_llama:.2f}x |\
 {decode_tokens_per_s:.1f} | {decode_to_llama:.2f}x | {cache_bytes_per_token} | {operations_per_step} |
"""
WARM_UP = 4  # tokens of `generate` before the timed ones: each call reads the prompt and records a CUDA graph


def make_configs(sizes, mlp, context):
    """Return {name: config} of a Llama with MLP width `mlp`, and of both FoX variants of its size."""
    pro_mlp = mlp - round(sizes["hidden_size"] / 48) * 16  # three matrices of hidden / 3 columns are an output gate
    decay = dict(decay_time_min=8, decay_time_max=context)
    return {
        "Llama": LlamaConfig(**sizes, intermediate_size=mlp),
        "FoX (LLaMA)": FoxConfig(**sizes, **decay, intermediate_size=mlp),
        "FoX (Pro)": FoxConfig.pro(**sizes, **decay, intermediate_size=pro_mlp),
    }


def make_models(args, layers):
    """Yield each model's name and the model, which is not built earlier."""
    sizes = dict(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=layers,
        num_attention_heads=args.hidden // args.head_dim,
        max_position_embeddings=args.context + args.tokens + WARM_UP,
    )
    configs = make_configs(sizes, args.hidden * 8 // 3 // 64 * 64, args.context)
    torch.manual_seed(0)
    for name, config in configs.items():
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config)
        yield name, model.to(getattr(torch, args.dtype)).eval()


@torch.no_grad()
def operations_of_a_step(model, token):
    """Return the number of ATen operations in a decoding step with a short context, nested ones included."""
    cache = {cache_name(type(model)): DynamicCache(config=model.config)}
    for _ in range(3):  # the first one fills the cache, the second one determines what to keep
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(token, **cache)
    return sum(event.key.startswith("aten::") for event in profiler.events())


@torch.no_grad()
def measure(args):
    models, caches = {}, {}
    ids = torch.randint(0, args.vocab, (1, args.context), generator=torch.Generator().manual_seed(0)).to(args.device)

    def prefill(name):
        """Return the seconds per prompt token."""
        caches[name] = {cache_name(type(models[name])): DynamicCache(config=models[name].config)}
        read = lambda: models[name](ids, **caches[name], logits_to_keep=1).logits.sum().item()  # noqa: E731
        return common.timed(read, device=args.device)[0] / args.context

    def decode(name):
        """Return the seconds per token of greedy decoding after the prompt; the first token is a warm-up."""
        token = torch.zeros(1, 1, dtype=torch.long, device=args.device)

        def step(token):
            token = models[name](token, **caches[name]).logits.argmax(-1)
            token.sum().item()  # waits for the device
            return token

        def steps(token):
            for _ in range(args.tokens):
                token = step(token)

        return common.timed(steps, step(token), device=args.device)[0] / args.tokens

    def decode_static(name):
        """Return seconds per token of `generate` with a static cache, after the first WARM_UP tokens."""
        greedy = dict(do_sample=False, eos_token_id=None, pad_token_id=0, cache_implementation="static")

        def generate(tokens):
            return common.timed(
                lambda: models[name].generate(ids, max_new_tokens=tokens, **greedy), device=args.device
            )

        return (generate(WARM_UP + args.tokens)[0] - generate(WARM_UP)[0]) / args.tokens

    phases = {"prefill": prefill, "decode": decode if args.cache == "dynamic" else decode_static}
    for layers in args.layers:
        torch.compiler.reset()
        models.clear()
        for name, model in make_models(args, layers):
            models[name] = model
            if name != "Llama":
                model.set_attn_implementation(args.attention)
            pair = dict.fromkeys(["Llama", name])
            turns = {(phase, x): lambda phase=phase, x=x: phases[phase](x) for phase in phases for x in pair}
            seconds = common.alternate(turns, args.rounds)
            (cache,) = caches[name].values()
            nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // cache.get_seq_length()
            (row,) = common.rows_relative_to_llama({name: model}, {name: nbytes}, seconds)
            yield row | {"layers": layers, "operations_per_step": operations_of_a_step(model, ids[:, :1])}


def table(result):
    s = result["settings"]
    rows = [{"layers": s["layers"], "millions": row["parameters"] / 1e6, **row} for row in result["rows"]]
    cache = s.get("cache", "dynamic")
    text = f"Width {s['hidden']}, context {s['context']}, {s['dtype']}, {cache} cache."
    return f"{text}\n\n{common.markdown(rows, TABLE)}"


def main(arguments=None):
    sizes = {"context": 2048, "tokens": 32, "hidden": 768, "layers": [8], "head_dim": 64, "vocab": 8192}
    parser = common.make_parser(
        __spec__.name, __doc__, **sizes, rounds=7, device="cpu", dtype="float32", attention="auto"
    )
    parser.add_argument(
        "--cache", choices=("dynamic", "static"), default="dynamic", help="kind of cache (default: dynamic)"
    )
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
