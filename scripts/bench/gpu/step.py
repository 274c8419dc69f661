"""Speed and memory of training steps on one GPU: FoX, a Llama of its size, and flash-linear-attention's FoX.

    python -m scripts.bench.gpu.step [--sizes 125M 360M 760M 7B] [--minutes 8]

A step is a forward and backward pass over a full batch and an update by fused AdamW, eager or with compiled decoder
layers, as in `hf-longctx train`. Weights are float32 under bfloat16 autocast, and all logits are materialized. At 7B,
weights, gradients and optimizer states are bfloat16, layers are checkpointed, and the loss is chunked. FLOPs are 6 for
each token and parameter, plus those of causal attention.

"ms" is the median of synchronized steps, "host ms" the part until Python returns, "GPU ms" the work of the GPU in a
profiled step, and tokens/s come from steps without synchronization. "to Llama" compares tokens/s with the Llama of the
same size in the same mode. Rows run in order of importance, and none starts after --minutes. `--device cpu` is a dry
run with tiny models.
"""

import gc
import statistics
import time

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx.training.chunked_loss import chunk_loss
from hf_longctx.training.config import PRESETS
from scripts.bench import common
from scripts.bench.generate import make_configs


TABLE = """
| size | model | mode | parameters | sequences | tokens | seconds a step | ms | host ms | GPU ms | first step, s | tokens/s |\
 to Llama | TFLOP/s | launches | peak GB | error |
| {size} | {name} | {mode} | {billions:.2f} B | {rows} | {tokens} | {seconds:.3g} | {ms:.1f} | {host_ms:.1f} | {gpu_ms:.1f} |\
 {first_s:.1f} | {tokens_per_s:.0f} | {to_llama:.2f}x | {tflops:.0f} | {launches} | {peak_gb:.1f} | {error} |
"""
BATCHES = {"125M": (8, 2048), "360M": (4, 8192), "760M": (1, 16384), "7B": (1, 32768), "tiny": (1, 16)}
LLAMA_2_7B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
MODELS = {  # preset: name
    "llama": "Llama",
    "fox": "FoX (LLaMA)",
    "fox-pro": "FoX (Pro)",
    "fla": "FLA FoX",
    "fla-pro": "FLA FoX, QK-norm, gate",
}


def read_config(kind, size, tokens):
    """Return the configuration of a model; flash-linear-attention's has the sizes of our FoX."""
    sizes = dict(vocab_size=32000, max_position_embeddings=tokens)
    if size == "tiny":
        sizes |= dict(vocab_size=256, num_hidden_layers=1)
    if size == "7B":
        return make_configs(sizes | LLAMA_2_7B, 11008, tokens)[MODELS[kind]]
    config = AutoConfig.from_pretrained(PRESETS[f"{kind.replace('fla', 'fox')}-{size.lower()}"], **sizes)
    if not kind.startswith("fla"):
        return config
    from fla.models import ForgettingTransformerConfig

    names = "hidden_size", "num_hidden_layers", "intermediate_size"
    shared = sizes | {name: getattr(config, name) for name in names} | {"num_heads": config.num_attention_heads}
    is_pro = kind == "fla-pro"
    return ForgettingTransformerConfig(**shared, qk_norm=is_pro, use_output_gate=is_pro)


def make_model(kind, size, tokens, device, attention):
    """Return a model to train, in its weights' dtype."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(read_config(kind, size, tokens))
    if not kind.startswith("fla"):
        model.set_attn_implementation(attention or ("sdpa" if kind == "llama" else "auto"))
    if size == "7B":
        model.to(torch.bfloat16)
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def make_step(model, ids, size, mode):
    """Return a function that runs one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    on_gpu = ids.is_cuda
    if mode == "compiled":
        for layer in model.model.layers:  # they share a graph
            layer.compile(backend="inductor" if on_gpu else "eager")
    if size == "7B":
        chunk_loss(model)

    def compute_loss():
        if size == "7B":
            return model(ids, labels=ids).loss
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=on_gpu):
            logits = model.lm_head(model.model(ids, use_cache=False)[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def step():
        compute_loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wait(device):
    """Wait until a GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_steps(kind, size, mode, rows, tokens, device, rounds, attention=None):
    """Return the results of one model."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = make_model(kind, size, tokens, device, attention)
    ids = torch.randint(3, model.config.vocab_size, (rows, tokens), device=device)
    step = make_step(model, ids, size, mode)

    def timed(count):
        wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            step()
        returned = time.perf_counter() - begin
        wait(device)
        return returned, time.perf_counter() - begin

    first = timed(1)[1]
    timed(min(2, rounds))
    host, waited = zip(*(timed(1) for _ in range(rounds)))
    seconds, config = timed(rounds)[1] / rounds, model.config
    work = 6 * rows * tokens * (model.num_parameters() + config.num_hidden_layers * config.hidden_size * tokens)
    figures = {
        "billions": model.num_parameters() / 1e9,
        "ms": 1e3 * statistics.median(waited),
        "host_ms": 1e3 * statistics.median(host),
        "first_s": first,
        "tokens_per_s": rows * tokens / seconds,
        "tflops": work / seconds / 1e12,
    }
    if device == "cuda":
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            timed(1)
        on_gpu = [x for x in profiler.key_averages() if x.device_type == torch.autograd.DeviceType.CUDA]
        figures["launches"] = sum(x.count for x in on_gpu)
        figures["gpu_ms"] = sum(x.self_device_time_total for x in on_gpu) / 1e3
    return figures


def plan(sizes):
    """Return (size, mode, kind) of every row, the most important rows first."""
    ours, fla = ("llama", "fox-pro", "fox"), ("fla", "fla-pro")
    order = [("125M", "eager", ours), ("125M", "compiled", ours), ("360M", "eager", ours), ("760M", "eager", ours),
             ("125M", "eager", fla), ("360M", "compiled", ours), ("760M", "compiled", ours), ("360M", "eager", fla),
             ("760M", "eager", fla), ("7B", "eager", ours), ("tiny", "eager", ours), ("tiny", "compiled", ours),
             ("tiny", "eager", fla)]  # fmt: skip
    return [(size, mode, kind) for size, mode, kinds in order if size in sizes for kind in kinds]


def measure(args):
    until, llamas, absent = time.monotonic() + 60 * args.minutes, {}, False
    if args.device == "cpu":
        args.sizes = ["tiny"]
    for size, mode, kind in plan(args.sizes):
        rows, tokens = BATCHES[size]
        row = {"size": size, "name": MODELS[kind], "mode": mode, "rows": rows, "tokens": tokens}
        if kind.startswith("fla") and absent:
            continue
        if time.monotonic() > until:
            yield row | {"error": "no time left"}
            continue
        try:
            row |= time_steps(kind, size, mode, rows, tokens, args.device, args.rounds)
            if kind == "llama":
                llamas[size, mode] = row["tokens_per_s"]
            row["to_llama"] = row["tokens_per_s"] / llamas.get((size, mode), float("nan"))
        except ImportError as error:
            absent = True
            row["error"] = f"not installed ({error})"
        except Exception as error:  # out of memory, or an error of a compiler
            row["error"] = common.one_line(error, 200)
        yield row


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    sizes = {"sizes": ["125M", "360M", "760M"], "rounds": 6, "minutes": 8.0}
    parser = common.make_parser(__spec__.name, __doc__, device="cuda", **sizes)
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
