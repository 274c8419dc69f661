"""Compare a FoX served by vLLM with transformers: responses, log-probabilities, forgetting curve.

    scripts/serve_vllm [--model FOLDER] [--dtype float32]

Each row compares the endpoint, queried by the openai client or the forgetting curve, with the local model. Responses
have --tokens tokens.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.metrics import ServedModel, forgetting_curve
from scripts.bench import common


TABLE = """
| request | compared | equal | of | largest difference |
| {name} | {unit} | {equal} | {of} | {largest_difference:.1e} |
"""
CHAT = [{"role": "user", "content": "How do I sort a list?"}]


@contextlib.contextmanager
def served(command):
    """Start a server with a command, whose {port} is replaced by a free port, and yield its address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([str(part).format(port=port) for part in command])
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}/health")
                break
            if server.poll() is not None:
                raise ChildProcessError(f"the server ended with {server.returncode}")
            time.sleep(0.2)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()  # lets it stop its workers
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def read_prompts(tokens, count):
    """Return passages of different lengths from a document."""
    return [tokens[start : start + 20 + 37 * i].tolist() for i, start in enumerate(range(0, 1000 * count, 1000))]


@torch.no_grad()
def continue_greedily(model, ids, tokens):
    """Return the tokens that `generate` appends."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(ids) :]


def compare_responses(client, name, model, tokenizer, prompts, tokens):
    """Compare concurrent greedy responses to all prompts, and the log-probabilities of their tokens."""
    responses = [None] * len(prompts)

    def ask(i):
        options = dict(max_tokens=tokens, temperature=0, logprobs=1, extra_body={"ignore_eos": True})
        responses[i] = client.completions.create(model=name, prompt=prompts[i], **options).choices[0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal, differences = 0, []
    for prompt, response in zip(prompts, responses):
        ids = continue_greedily(model, prompt, tokens)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()
        same = response.text == tokenizer.decode(ids, skip_special_tokens=True)
        equal += same
        if same:
            differences += [abs(a - b) for a, b in zip(response.logprobs.token_logprobs, log_probs)]
    return {"equal": equal, "of": len(prompts), "largest_difference": max(differences, default=None)}


def compare_chat(client, name, model, tokenizer, tokens):
    """Compare a chat response, whole and streamed."""
    options = dict(model=name, messages=CHAT, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True})
    whole = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(**options, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = tokenizer.decode(continue_greedily(model, prompt, tokens), skip_special_tokens=True)
    return {"equal": (whole == expected) + (streamed == expected), "of": 2}


def compare_curve(address, model, tokenizer, args):
    """Yield comparisons of the server's and the local model's forgetting curves."""
    served = ServedModel(f"{address}/v1", tokenizer=tokenizer, vocab_size=len(tokenizer))
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    for data_type, text in (("order", load_tokens(tokenizer, "stdlib").tokens), ("random", None)):
        options = {"lengths": args.lengths, "repeats": args.repeats, "data_type": data_type}
        theirs, ours = (forgetting_curve(x, text, **options, **ids) for x in (served, model))
        yield {
            "name": f"forgetting curve, {'English' if data_type == 'order' else 'random tokens'}",
            "unit": "counts at a length",
            "equal": sum(point in theirs.points for point in ours.points),
            "of": len(ours.points),
            "lengths": args.lengths,
            "copied": [round(point.copy_mean, 4) for point in theirs.points],
        }


def measure(args):
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    tokens = load_tokens(tokenizer, "stdlib").tokens
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default is half of the machine's memory
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # without RoPE, a FoX supports any length
    # the module of `vllm serve`; in vLLM's build for CPUs, that command looks for a package of another name
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--port", "{port}"]
    command += ["--dtype", args.dtype, "--served-model-name", "fox", "--max-model-len", str(args.max_model_len)]
    with served([*command, "--enforce-eager", "--uvicorn-log-level", "error"]) as address:
        import openai

        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        prompts = read_prompts(tokens, args.prompts)
        of_responses = {"name": "concurrent completions", "unit": "responses"}
        yield of_responses | compare_responses(client, "fox", model, tokenizer, prompts, args.tokens)
        if tokenizer.chat_template:
            of_chats = {"name": "chat, whole and streamed", "unit": "responses"}
            yield of_chats | compare_chat(client, "fox", model, tokenizer, args.tokens)
        yield from compare_curve(address, model, tokenizer, args)


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    sizes = dict(tokens=48, lengths=[32, 256, 800], repeats=4, max_model_len=4096, dtype="float32")
    folder = "model_cards/fox-demo"
    parser = common.make_parser("scripts.serve_vllm", __doc__, name="serve_vllm", model=folder, **sizes)
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="number of prompts (default: %(default)s)")
    parser.prog = "scripts/serve_vllm"
    result = common.run(parser, measure, table, arguments)
    sys.exit(not all(row["equal"] == row["of"] for row in result["rows"]))


if __name__ == "__main__":
    main()
