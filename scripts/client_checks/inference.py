"""Clients that generate or score: pipelines, servers, evaluation harnesses."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.client_checks.checks import check, load, load_tokenizer, texts, write_jsonl


@check("pipeline, padded batch", "transformers", "responses that differ from those to single prompts", 0)
def pipeline(folder):
    from transformers import pipeline

    generate = pipeline("text-generation", str(folder), trust_remote_code=True)
    prompts, options = texts(4), dict(max_new_tokens=12, do_sample=False)
    single = [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]
    generate.tokenizer.padding_side = "left"
    batched = [response[0]["generated_text"] for response in generate(prompts, batch_size=4, **options)]
    return float(sum(a != b for a, b in zip(single, batched)))


def lm_eval_samples(folder, batch_size, **task):
    """Return the samples that lm-eval logs of a task over a few prompts."""
    import lm_eval

    questions = [{"text": text, "choices": ["forget", " the key of a layer", " a"]} for text in texts(6)]
    task = {
        "task": "check",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": write_jsonl(folder / "questions.jsonl", questions)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        **task,
    }
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "trust_remote_code": True, "dtype": "float32"},
        tasks=[task],
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    return sorted(result["samples"]["check"], key=lambda sample: sample["doc_id"])


@check("lm-eval, multiple choice", "lm-eval", "difference of log-likelihoods between batches of 1 and 4", 1e-4)
def multiple_choice(folder):
    task = dict(output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target=0)
    single, batched = (lm_eval_samples(folder, size, **task) for size in (1, 4))
    likelihoods = [
        [float(response[0][0]) for sample in run for response in sample["resps"]] for run in (single, batched)
    ]
    return max(abs(a - b) for a, b in zip(*likelihoods))


@check("lm-eval, generate_until", "lm-eval", "responses that differ between batches of 1 and 4", 0)
def generate_until(folder):
    task = dict(
        output_type="generate_until",
        doc_to_target="none",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    single, batched = (lm_eval_samples(folder, size, **task) for size in (1, 4))
    return float(sum(a["resps"] != b["resps"] for a, b in zip(single, batched)))


SERVERS = {
    "transformers serve": "transformers serve --trust-remote-code",
    "hf-longctx serve": "hf-longctx serve",
    "hf-longctx serve, continuous batching": "hf-longctx serve --continuous-batching --cb-block-size 32 "
    "--cb-num-blocks 64 --cb-max-batch-tokens 128",
}


@contextlib.contextmanager
def served(command, health="/health"):
    """Start a server by a command, in which {port} becomes a free port, and yield its address."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([str(part).format(port=port) for part in command])
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://localhost:{port}{health}")
                break
            if server.poll() is not None:
                raise ChildProcessError(f"the server ended with {server.returncode}")
            time.sleep(0.2)
        yield f"http://localhost:{port}"
    finally:
        server.terminate()  # so that it can end its workers
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def program(name):
    """Return the path of a command of this environment."""
    return Path(sys.executable).with_name(name)


def ask(server):
    """Return a check of chat, completions, streams and concurrent requests by the openai client."""

    def measure(folder):
        import openai

        name, subcommand, *options = SERVERS[server].split()
        prompts, tokenizer, model = texts(4), load_tokenizer(folder), load(folder)
        prompts = [prompt[:60] for prompt in prompts]
        expected = []
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt")
            ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            expected.append(tokenizer.decode(ids, skip_special_tokens=True))
        asked = {"model": str(folder), "max_tokens": 12, "temperature": 0}
        command = [program(name), subcommand, folder, "--port", "{port}", "--dtype", "float32", *options]
        with served(command) as address, ThreadPoolExecutor(4) as pool:
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

            def chat(prompt, **options):
                messages = [{"role": "user", "content": prompt}]
                return client.chat.completions.create(messages=messages, **asked, **options)

            def complete(prompt, **options):
                return client.completions.create(prompt=prompt, **asked, **options)

            responses = [chat(prompt).choices[0].message.content for prompt in prompts]
            responses += [complete(prompt).choices[0].text for prompt in prompts]
            stream = chat(prompts[0], stream=True)
            responses.append("".join(part.choices[0].delta.content or "" for part in stream))
            responses.append("".join(part.choices[0].text for part in complete(prompts[0], stream=True)))
            responses += [response.choices[0].text for response in pool.map(complete, prompts)]
        return float(sum(a != b for a, b in zip(responses, [*expected, *expected, *expected[:1] * 2, *expected])))

    return measure


for name in SERVERS:
    check(f"{name}, openai", "openai", "responses, of 14, that differ from `generate`", 0)(ask(name))
