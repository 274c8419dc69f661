"""A training step of a FoX of seven billion parameters beside that of a Llama of its size, on one GPU.

    python -m scripts.bench.gpu.step [--lengths 4096 32768]

A step is a forward and backward pass over one row, with gradient checkpointing and the loss in pieces, and an update
by AdamW. Weights, gradients and moments are bfloat16: 8 bytes a parameter. The Llama runs on SDPA, and FoX on the
attention that "auto" chooses. FLOPs are 6 for each token and parameter and those of causal
attention; what checkpointing computes again does not count. Figures are medians of --rounds after a first step.
`--device cpu` is a dry run with tiny models.
"""

import gc
import statistics
import time
from contextlib import nullcontext

import torch
from transformers import AutoModelForCausalLM

from hf_longctx.training.loss_in_pieces import LossInPieces
from scripts.bench import common
from scripts.bench.generate import make_configs


TABLE = """
| model | parameters | tokens | seconds a step | tokens/s | to Llama | TFLOP/s | peak GB | error |
| {name} | {billions:.2f} B | {tokens} | {seconds:.3g} | {tokens_per_s:.0f} | {to_llama:.2f}x | {tflops:.0f} | {peak_gb:.1f} | {error} |
"""
SIZES = {  # Llama 2 7B
    "cuda": dict(vocab_size=32000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32),
    "cpu": dict(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2),
}
MLP = {"cuda": 11008, "cpu": 172}


def make_model(config, device):
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.set_attn_implementation("sdpa" if config.model_type == "llama" else "auto")
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def time_steps(config, length, device, rounds):
    """Return the figures of one model at one length."""
    model = make_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(3, model.config.vocab_size, (1, length), device=device)
    options, in_pieces = {"skip_logits": True}, nullcontext()
    if config.model_type == "llama":
        options, in_pieces = {}, LossInPieces(model)

    def step():
        with in_pieces:
            loss = model(ids, labels=ids, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    seconds = []
    for _ in range(1 + rounds):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    taken, parameters = statistics.median(seconds[1:]), model.num_parameters()
    work = 6 * length * (parameters + config.num_hidden_layers * config.hidden_size * length)
    memory = {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if device == "cuda" else {}
    speed = {"seconds": taken, "tokens_per_s": length / taken, "tflops": work / taken / 1e12}
    return {"billions": parameters / 1e9, **speed, **memory}


def measure(args):
    lengths = args.lengths if args.device == "cuda" else [64]
    for length in lengths:
        llama = None
        sizes = SIZES[args.device] | {"max_position_embeddings": length}
        for name, config in make_configs(sizes, MLP[args.device], length).items():
            row = {"name": name, "tokens": length}
            if args.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                row |= time_steps(config, length, args.device, args.rounds)
                llama = llama or row["tokens_per_s"]
                row["to_llama"] = row["tokens_per_s"] / llama
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            yield row


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, device="cuda", lengths=[4096, 32768], rounds=3)
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
