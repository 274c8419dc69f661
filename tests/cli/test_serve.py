"""hf-longctx serve, with the `openai` client: what is served is what `generate` gives."""

import os
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from commands import Command
from demo_model import DEMO
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx import HMTConfig, HMTWrapper, cli
from hf_longctx.corpus import load_tokens
from hf_longctx.metrics import ServedModel, forgetting_curve


PROMPTS = ["The import statement", "If a class", "An exception", "Coroutines are"]
BATCHING = "--continuous-batching --cb-block-size 32 --cb-num-blocks 64 --cb-max-batch-tokens 128"


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert cli.main(["serve", str(DEMO)]) == 2
    assert "pip install 'hf-longctx[serve]'" in capsys.readouterr().err


@contextmanager
def served(model, *options):
    """Serve a model and yield a client."""
    openai = pytest.importorskip("openai", reason="serving needs more packages: pip install 'hf-longctx[serve]'")
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["hf-longctx", "serve", model, "--port", port, "--dtype", "float32", *options]
    with Command(command) as server:
        while True:
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health")
                break
            except OSError:
                assert server.poll() is None, server.stderr
                time.sleep(0.1)
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
        yield client
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(30) == 130


def test_a_forgetting_curve_of_the_server_is_that_of_the_model(monkeypatch):
    """The curve uses greedy completions, because the server accepts and returns text only."""
    monkeypatch.setenv("no_proxy", "localhost")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    options = dict(lengths=[12], repeats=2, bos_token_id=tokenizer.bos_token_id)
    tokens = load_tokens(tokenizer, "stdlib").tokens
    with served(DEMO) as client:
        model = ServedModel(str(client.base_url), tokenizer=tokenizer)
        curve = forgetting_curve(model, tokens, **options)
    local = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").eval()
    assert curve.points == forgetting_curve(local, tokens, **options).points and curve.points[0].copy_mean > 0


@pytest.fixture(scope="module", params=["", BATCHING], ids=["one at a time", "continuous batching"])
def client(request):
    with served(DEMO, *request.param.split()) as client:
        yield client


@pytest.fixture(scope="module")
def expected():
    """Greedy continuations of the prompts."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32"), AutoTokenizer.from_pretrained(DEMO)
    texts = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    return texts


def chat(client, prompt, **options):
    messages = [{"role": "user", "content": prompt}]
    options = {"model": str(DEMO), "max_tokens": 12, "temperature": 0} | options
    return client.chat.completions.create(messages=messages, **options)


def test_the_openai_client_gets_what_generate_gives(client, expected):
    first = chat(client, PROMPTS[0]).choices[0]
    assert (first.message.content, first.finish_reason) == (expected[0], "length")
    assert (
        "".join(part.choices[0].delta.content or "" for part in chat(client, PROMPTS[0], stream=True)) == expected[0]
    )
    options = {"model": str(DEMO), "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    assert client.completions.create(**options).choices[0].text == expected[0]
    parts = client.completions.create(**options, stream=True)
    assert "".join(part.choices[0].text for part in parts) == expected[0]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda prompt: chat(client, prompt), PROMPTS))
    assert [reply.choices[0].message.content for reply in replies] == expected
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    reply = client.chat.completions.create(model=str(DEMO), messages=turns, max_tokens=5, seed=1)
    assert reply.usage.prompt_tokens == 6  # BOS, a, newline, b, newline, c


@pytest.fixture(scope="module")
def hmt_folder(tmp_path_factory):
    folder, llama = tmp_path_factory.mktemp("hmt"), DEMO.parent / "llama-demo"
    backbone = AutoModelForCausalLM.from_pretrained(llama, dtype="float32")
    HMTWrapper.from_backbone(backbone, HMTConfig(segment_length=16, sensory_tokens=4)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    return folder


def test_an_hmt_is_served(hmt_folder):
    model, tokenizer = HMTWrapper.from_pretrained(hmt_folder), AutoTokenizer.from_pretrained(hmt_folder)
    prompt = " ".join(PROMPTS)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    options = {"model": str(hmt_folder), "prompt": prompt, "max_tokens": 24, "temperature": 0}
    with served(hmt_folder) as client:
        reply = client.completions.create(**options)
        assert reply.choices[0].text == tokenizer.decode(ids, skip_special_tokens=True)
