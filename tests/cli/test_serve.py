"""hf-longctx serve, with the `openai` client: what is served is what `generate` gives."""

import json
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

from hf_longctx import FoxForCausalLM, HMTConfig, HMTWrapper, cli


PROMPTS = ["The import statement", "If a class", "An exception", "Coroutines are"]
BATCHING = "--continuous-batching --cb-block-size 32 --cb-num-blocks 64 --cb-max-batch-tokens 128"


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert cli.main(["serve", str(DEMO)]) == 2
    assert "pip install 'hf-longctx[serve]'" in capsys.readouterr().err


def test_a_served_fox_chooses_its_attention(monkeypatch):
    for package in ("openai", "fastapi", "uvicorn"):
        pytest.importorskip(package)
    from transformers.cli.serving import model_manager, server

    monkeypatch.setattr(server, "build_server", server.build_server)  # puts back what the command replaces
    for name in ("FoxForCausalLM", "HMTWrapper"):
        monkeypatch.setattr(model_manager.transformers, name, None, raising=False)
    loaded = []

    def load(app, *args, **options):
        find = model_manager.transformers.FoxForCausalLM.from_pretrained
        loaded.extend(find(DEMO, attn_implementation=name) for name in (None, "eager"))

    monkeypatch.setattr("typer.Typer.__call__", load)
    assert cli.main(["serve", str(DEMO)]) == 0
    assert [model.config._attn_implementation for model in loaded] == ["auto", "eager"]
    assert all(type(model) is FoxForCausalLM for model in loaded)


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
        client.errors = openai
        yield client
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(30) == 130


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


@pytest.mark.parametrize("client", [""], ids=["one at a time"], indirect=True)
@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(max_tokens=-1)], ids=str)
def test_values_that_cannot_be_used_are_the_callers_mistake(client, bad):
    for _ in range(2):  # the connection is kept
        with pytest.raises(client.errors.BadRequestError, match=next(iter(bad)).removeprefix("max_")):
            chat(client, PROMPTS[0], **bad)


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


@pytest.fixture
def in_process(hmt_folder, monkeypatch):
    """Serve the HMT to a test client, without a port."""
    for package in ("fastapi", "openai", "uvicorn"):
        pytest.importorskip(package, reason="serving needs more packages: pip install 'hf-longctx[serve]'")
    from starlette.testclient import TestClient
    from transformers.cli.serving import model_manager, server, utils

    apps = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server: apps.append(server.config.app))
    for module, name in ((server, "build_server"), (utils, "GenerateManager")):
        monkeypatch.setattr(module, name, getattr(module, name))  # what the command puts in its place goes again
    for name in ("FoxForCausalLM", "HMTWrapper"):
        monkeypatch.setattr(model_manager.transformers, name, None, raising=False)

    def serve(*options):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["serve", str(hmt_folder), "--device", "cpu", "--dtype", "float32", *options])
        return TestClient(apps[-1])

    return serve


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_hmt_reads_what_is_new_of_a_conversation(in_process, hmt_folder, tmp_path, monkeypatch, stream):
    client, read, forward = in_process("--conversation-folder", str(tmp_path)), [], HMTWrapper.forward

    def counted(model, input_ids, **rest):
        read.append(input_ids.shape[1])
        return forward(model, input_ids, **rest)

    monkeypatch.setattr(HMTWrapper, "forward", counted)
    tokenizer, prompt = AutoTokenizer.from_pretrained(hmt_folder), " ".join(PROMPTS)
    options = {"model": str(hmt_folder), "max_tokens": 10, "temperature": 0, "stream": stream}

    def complete(**conversation):
        read.clear()
        reply = client.post(
            "/v1/completions", json={"prompt": prompt, **options, **conversation.pop("body", {})}, **conversation
        )
        assert reply.status_code == 200, reply.text
        lines = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line] if stream else [reply.json()]
        return "".join(choice["text"] for line in lines for choice in line["choices"]), sum(read)

    def tokens():
        return len(tokenizer(prompt)["input_ids"])

    for conversation in ({"headers": {"X-Conversation-Id": "one"}}, {"body": {"user": "two"}}):
        text, count = complete(**conversation)
        assert (text, count) == (complete()[0], tokens() + 9)
        begun, prompt = tokens() - 1, f"{prompt}{text} Coroutines are"
        text, count = complete(**conversation)
        plain, of_plain = complete()
        assert text == plain and count <= tokens() - begun + 9 < of_plain == tokens() + 9
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 4
    assert client.post("/v1/completions", content="{").status_code == 422


def test_an_hmt_has_no_continuous_batching(in_process, hmt_folder):
    reply = in_process("--continuous-batching").post("/v1/completions", json={"model": str(hmt_folder), "prompt": "a"})
    assert reply.status_code == 400 and "HMT has no continuous batching" in reply.text


def test_an_hmt_is_served(hmt_folder):
    model, tokenizer = HMTWrapper.from_pretrained(hmt_folder), AutoTokenizer.from_pretrained(hmt_folder)
    prompt = " ".join(PROMPTS)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    options = {"model": str(hmt_folder), "prompt": prompt, "max_tokens": 24, "temperature": 0}
    with served(hmt_folder) as client:
        reply = client.completions.create(**options, extra_headers={"X-Conversation-Id": "one"})
        assert reply.choices[0].text == tokenizer.decode(ids, skip_special_tokens=True)
