"""Throughput, latency and cache of FoX (LLaMA) and FoX (Pro) in vLLM, compared with a Llama of their size.

    .venv-vllm/bin/python -m scripts.bench.vllm [--device cpu|cuda] [--dtype bfloat16]

The models are the same as in bench.generate, with random weights. Each runs in its own engine process, which compiles
it unless `--compiled 0`. A round reads one prompt of --context tokens, decodes --tokens for one request, and answers
--requests requests of --context / 4 tokens with --tokens each. Times are medians over alternating rounds; ratios are
medians of the per-round ratio to the Llama. Cache bytes are the blocks that vLLM allocates.
"""

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path

import torch

from scripts.bench import common
from scripts.bench.generate import make_models


TABLE = """
| model | parameters | prefill tokens/s | to Llama | ms per decoded token | to Llama | requests, tokens/s | to Llama |\
 cache bytes per token |
| {name} | {millions:.1f} M | {prefill_tokens_per_s:.0f} | {prefill_to_llama:.2f}x | {decode_ms:.1f} |\
 {decode_to_llama:.2f}x | {requests_tokens_per_s:.0f} | {requests_to_llama:.2f}x | {cache_bytes_per_token:.0f} |
"""


def serve(pipe, folder, args):
    """Create an engine, send its cache bytes per token, and answer jobs (prompts, new tokens) with seconds."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # otherwise all engines are bound to the same cores
    from vllm import LLM, SamplingParams

    longest = args.context + args.tokens + 1
    llm = LLM(
        str(folder),
        dtype=args.dtype,
        max_model_len=longest,
        max_num_seqs=args.requests,
        enforce_eager=not args.compiled,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.25,  # three of them
    )
    (specs,) = llm.collective_rpc("get_kv_cache_spec")
    pipe.send(sum(spec.page_size_bytes / spec.block_size for spec in specs.values()))
    for prompts, tokens in iter(pipe.recv, None):
        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        pipe.send(common.timed(lambda prompts=prompts, p=params: llm.generate(prompts, p, use_tqdm=False))[0])


def measure(args):
    models = dict(make_models(argparse.Namespace(**vars(args) | {"device": "cpu"}), args.layers))
    ids = torch.randint(3, args.vocab, (args.requests, args.context), generator=torch.Generator().manual_seed(0))
    long, short = [ids[0].tolist()], ids[:, : args.context // 4].tolist()
    pipes, processes, cache_bytes = {}, [], {}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        for name, model in models.items():
            folder = Path(temporary, name)
            model.save_pretrained(folder)
            pipes[name], end = context.Pipe()
            processes.append(context.Process(target=serve, args=(end, folder, args), daemon=True))
            processes[-1].start()
            cache_bytes[name] = pipes[name].recv()

        def run(name, *job):
            pipes[name].send(job)
            return pipes[name].recv()

        phases = {
            "prefill": lambda name: run(name, long, 1) / args.context,
            "decode": lambda name: (run(name, short[:1], args.tokens + 1) - run(name, short[:1], 1)) / args.tokens,
            "requests": lambda name: run(name, short, args.tokens) / (args.requests * args.tokens),
        }
        turns = {
            (phase, name): lambda phase=phase, name=name: phases[phase](name) for phase in phases for name in models
        }
        seconds = common.alternate(turns, args.rounds)
        for pipe, process in zip(pipes.values(), processes):
            pipe.send(None)
            process.join(60)
    for row in common.rows_relative_to_llama(models, cache_bytes, seconds):
        yield row | {"decode_ms": 1000 / row["decode_tokens_per_s"]}


def table(result):
    s = result["settings"]
    rows = [{"millions": row["parameters"] / 1e6, **row} for row in result["rows"]]
    text = f"{s['layers']} layers of width {s['hidden']}, prompts of {s['context']} tokens, and {s['requests']} of \
{s['context'] // 4} with {s['tokens']} new tokens each, {s['dtype']}, {'compiled' if s['compiled'] else 'eager'}."
    return f"{text}\n\n{common.markdown(rows, TABLE)}"


def main(arguments=None):
    sizes = {"context": 512, "tokens": 32, "requests": 8, "hidden": 512, "layers": 8, "head_dim": 64, "vocab": 8192}
    parser = common.make_parser(__spec__.name, __doc__, **sizes, rounds=5, compiled=1, device="cpu", dtype="bfloat16")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
