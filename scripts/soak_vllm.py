"""A FoX behind vLLM's server under load: many clients at once, who share prefixes, hang up, lose patience and sample.

    scripts/serve_vllm --soak [--seconds 40] [--concurrency 32]

One server after another takes --seconds of requests: with few blocks and chunks of 64 tokens, so it preempts; with
drafts by n-grams; and over two processes. The last --checked replies are compared with the model here, token by token:
a greedy token has to be the likeliest one, and log-probabilities have to agree within 2e-4. Afterwards nothing may be
left: no running or waiting request, no block in use. LoRA and beams are not among the requests.
"""

import asyncio
import collections
import os
import random
import re
import sys
import time
import urllib.request

import torch
from transformers import AutoModelForCausalLM

from scripts.bench import common
from scripts.client_checks.inference import served


TABLE = """
| server | requests | hung up | timed out | preemptions | tokens checked | not greedy | largest difference | left behind |
| {name} | {requests} | {hung_up} | {timed_out} | {preemptions} | {tokens} | {wrong} | {largest_difference:.1e} | {left} |
"""
SERVERS = {
    "few blocks, chunks of 64 tokens": ["--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "64"],
    "drafts by n-grams": ["--speculative-config", '{{"method": "ngram", "num_speculative_tokens": 3}}'],
    "two processes": ["--tensor-parallel-size", "2"],
}
LENGTHS = (1, 5, 16, 17, 40, 100, 130, 250, 300, 480)
ALLOWED = 2e-4  # of log-probabilities; chunks of 32 tokens round to 1.2e-4


def make_prompts(vocab):
    """Random prompts of many lengths, and some that begin as the longest one does."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    return prompts + [prompts[-1][:n] + prompts[i] for i, n in enumerate((16, 64, 200, 400))]


async def ask(client, prompts, number, counts, replies, sampling):
    """One client: a quarter hangs up, a tenth has no patience, some may sample three replies, the rest waits."""
    draw = random.Random(number)
    kind, prompt = draw.random(), draw.choice(prompts)
    options = dict(model="fox", prompt=prompt, max_tokens=draw.choice([4, 12, 24, 48]), temperature=0, logprobs=1)
    options["extra_body"] = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    complete = client.completions.create
    if kind < 0.25:
        stream = await complete(stream=True, **options)
        async for _ in stream:
            break
        await stream.close()
        counts["hung_up"] += 1
    elif kind < 0.35:
        try:
            await asyncio.wait_for(complete(**options), 0.5)
        except TimeoutError:
            counts["timed_out"] += 1
    else:
        sampled = dict(n=3, temperature=1.0) if sampling and kind < 0.5 else {}
        for choice in (await complete(**options | sampled)).choices:
            ids = [int(token.split(":")[1]) for token in choice.logprobs.tokens]
            replies.append((prompt, ids, choice.logprobs.token_logprobs, not sampled))


async def load(address, prompts, seconds, concurrency, sampling):
    """Keep `concurrency` clients busy; return the counts of what they did, and the replies."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=600, max_retries=0)
    counts, replies, end = collections.Counter(), [], time.monotonic() + seconds
    numbers = iter(range(10**9))

    async def work():
        while time.monotonic() < end:
            counts["requests"] += 1
            await ask(client, prompts, next(numbers), counts, replies, sampling)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return counts, replies


@torch.no_grad()
def compare(model, replies):
    """The log-probabilities of replies, and whether greedy tokens are the likeliest, beside those of the model."""
    tokens, wrong, largest = 0, 0, 0.0
    for prompt, ids, log_probs, greedy in replies:
        expected = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        got = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
        tokens += len(ids)
        largest = max(largest, (got - torch.tensor(log_probs)).abs().max().item())
        if greedy:  # ties within what is rounded are no mistake
            wrong += int((expected.amax(1) - got > ALLOWED).sum())
    return {"tokens": tokens, "wrong": wrong, "largest_difference": largest}


def read_metrics(address):
    """{name: sum over all labels} of vLLM's metrics."""
    values = collections.Counter()
    with urllib.request.urlopen(f"{address}/metrics") as reply:
        for name, value in re.findall(r"^vllm:(\w+)\S* (\S+)$", reply.read().decode(), re.M):
            values[name] += float(value)
    return values


def what_is_left(address, patience=20):
    """Requests and blocks that are still in use when all clients are gone, after a while if need be."""
    end = time.monotonic() + patience
    while True:
        metrics = read_metrics(address)
        left = sum(metrics[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)


def measure(args):
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    prompts = make_prompts(model.config.vocab_size)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default half of the machine's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or each of two processes wants a NUMA node
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # without RoPE, a FoX reads any length
    common_options = [
        "--dtype",
        "float32",
        "--served-model-name",
        "fox",
        "--max-model-len",
        "1024",
        "--block-size",
        "32",
    ]
    for name, options in list(SERVERS.items())[: args.servers]:
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            args.model,
            "--port",
            "{port}",
        ]
        command += [
            *common_options,
            "--max-num-seqs",
            "32",
            *options,
            "--enforce-eager",
            "--uvicorn-log-level",
            "error",
        ]
        with served(command) as address:
            # With drafts on a CPU, a request that samples spoils the greedy ones of its step, whatever the model: in
            # vLLM 0.32, `_expand_kernel_impl` writes temperatures into a copy.
            sampling = "--speculative-config" not in options
            counts, replies = asyncio.run(load(address, prompts, args.seconds, args.concurrency, sampling))
            row = {"name": name, **{key: counts[key] for key in ("requests", "hung_up", "timed_out")}}
            row["left"] = what_is_left(address)
            row["preemptions"] = int(read_metrics(address)["num_preemptions_total"])
        yield row | compare(model, replies[-args.checked :])


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    options = dict(model="model_cards/fox-demo", seconds=40, concurrency=32, checked=200, servers=len(SERVERS))
    parser = common.make_parser("scripts.soak_vllm", __doc__, name="soak_vllm", **options)
    parser.prog = "scripts/serve_vllm --soak"
    rows = common.run(parser, measure, table, arguments)["rows"]
    sys.exit(
        any(row["wrong"] or row["left"] or row["largest_difference"] > ALLOWED or not row["tokens"] for row in rows)
    )


if __name__ == "__main__":
    main()
