"""Peak memory of a training step by model, length and memory-saving options.

    python -m scripts.bench.training_memory [--device cpu|cuda] [--models tiny 125M] [--lengths 1024 4096]

A step is a forward and backward pass over one sequence and an update by AdamW, of a FoX (Pro) or a Llama with float32
weights; on a GPU the passes run in bfloat16, with the Triton kernels for FoX. We measure the second step, with
weights, gradients and optimizer states: allocated memory on a GPU; on a CPU, the resident memory of a fresh process
minus its memory before the model was created. "chunked" is the loss without the logits of the whole sequence. The
shard columns are `--sequence_parallel` with chunked loss and checkpointing, in one of the processes; the others are
simulated, because their data do not affect memory. DDP's buffers, a copy of the gradients, are not included. 0 means
out of memory.
"""

import gc
from itertools import product

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from hf_longctx.training.chunked_loss import chunk_loss
from hf_longctx.training.config import PRESETS
from hf_longctx.training.data import make_sequence, mark_documents
from hf_longctx.training.sequence_parallel import SequenceShard
from scripts.bench import common


TABLE = """
| model | size | parameters | tokens | plain MB | chunked loss | checkpointing | both | 2 shards | 4 shards |
| {architecture} | {model} | {millions:.0f} M | {tokens} | {plain:.0f} | {pieces:.0f} | {checkpointing:.0f} | {both:.0f} | {shards_2:.0f} |\
 {shards_4:.0f} |
"""
VARIANTS = {  # chunked loss, checkpointing, processes that share a sequence
    "plain": (False, False, 1),
    "pieces": (True, False, 1),
    "checkpointing": (False, True, 1),
    "both": (True, True, 1),
    "shards_2": (True, True, 2),
    "shards_4": (True, True, 4),
}
MODELS = ["tiny", "5M", "125M", "360M", "760M"]
DEFAULTS = {
    "cpu": {"models": ["tiny"], "lengths": [1024, 4096], "vocab": 8192},
    "cuda": {"models": MODELS, "lengths": [4096, 16384, 65536], "vocab": 50257},
}


def make_model(architecture, name, length, vocab, device):
    is_fox = architecture == "fox"
    preset = PRESETS[f"{'fox-pro' if is_fox else 'llama'}-{name.lower()}"]
    with torch.device(device):
        config = AutoConfig.from_pretrained(preset, vocab_size=vocab, max_position_embeddings=length)
        model = AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation("forgetting_triton" if device == "cuda" and is_fox else "sdpa")
    return model.train()


def peak_mb(architecture, name, length, vocab, device, pieces, checkpointing, size):
    """Return the peak memory of the second step in MB."""
    before = common.resident_mb("VmRSS")
    model = make_model(architecture, name, length, vocab, device)
    if pieces:
        chunk_loss(model)
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(0)).numpy()
    row = make_sequence(mark_documents(ids, None))
    batch = {name: x[None].to(device) for name, x in row.items()}
    if size > 1:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        shard = SequenceShard(size)
        batch = {name: x if x is shard else x.to(device) for name, x in shard.collate([row]).items()}

    def step():
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**batch, num_items_in_batch=length).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            return torch.cuda.max_memory_allocated() / 2**20
        return common.resident_mb("VmRSS") - before + common.added_mb(step)[0]
    except torch.OutOfMemoryError:
        return 0.0
    finally:
        if size > 1:
            dist.destroy_process_group()


def measure(args):
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for architecture, name in product(("fox", "llama"), args.models):
        model = make_model(architecture, name, args.lengths[0], args.vocab, "meta")
        heads = model.config.num_key_value_heads if architecture == "fox" else 1  # others do not share sequences
        row = {"architecture": architecture, "model": name, "millions": model.num_parameters() / 1e6}
        for length in args.lengths:
            peaks = {}
            for variant, (*options, size) in VARIANTS.items():
                if heads % size == 0:
                    cell = architecture, name, length, args.vocab, args.device, *options, size
                    peaks[variant] = (
                        peak_mb(*cell) if args.device == "cuda" else common.in_fresh_process(peak_mb, *cell)
                    )
                    gc.collect()
                    torch.cuda.empty_cache()
            yield row | {"tokens": length} | peaks


def table(result):
    s = result["settings"]
    how = "bfloat16 over float32 weights" if s["device"] == "cuda" else "float32"
    return f"FoX (Pro) and Llama, vocabulary {s['vocab']}, one sequence, {how}.\n\n{common.markdown(result['rows'], TABLE)}"


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, device="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="model sizes (default: tiny, on a GPU all)")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        metavar="TOKENS",
        help="sequence lengths (default: 1024 4096, on a GPU up to 65536)",
    )
    parser.add_argument("--vocab", type=int, metavar="N", help="vocabulary size (default: 8192, on a GPU 50257)")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
