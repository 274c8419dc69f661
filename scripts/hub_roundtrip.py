"""Push to a local Hub, load without hf_longctx, and load again offline.

    python scripts/hub_roundtrip.py

A test Hub (tests/hub/server) runs on 127.0.0.1. The demo FoX, the demo HMT and its memory of a document, an HMT around
the FoX, a LoRA adapter and the metrics are pushed. A second environment, without this package, loads them by HTTP,
generates, compares the logits and scores predictions, and then does the same offline. The exit status is 0 if all
logits are equal, and the server saw no unknown endpoint, no error of its own, and no token at the blob host.
"""

import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
DEMO, HMT_DEMO = ROOT / "model_cards" / "fox-demo", ROOT / "model_cards" / "hmt-demo"
MODELS = ("fox", "hmt", "fox-in-hmt", "adapter")
PROMPT = "The import statement"
FACT = "remember Ada red Ada the of Ada Ada in Ada to Ada Ada was Ada a"
QUESTION = "recall Ada Ada is Ada the Ada of Ada Ada and Ada answer"
METRICS = ("forgetting_curve", "rope_base_check")
SAVE = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from hf_longctx import HMTConfig, HMTWrapper

demo, hmt_demo, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(demo)
ids = tokenizer(prompt * 20, return_tensors="pt").input_ids
fox = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32)  # PEFT and transformers round adapters differently
fox.config.name_or_path = "alice/fox"  # instead of a folder on this machine
hmt = HMTWrapper.from_backbone(fox, HMTConfig(segment_length=32, sensory_tokens=8))
hmt.save_pretrained("fox-in-hmt")
tokenizer.save_pretrained("fox-in-hmt")
with torch.no_grad():
    logits = {"ids": ids, "fox": fox.eval()(ids).logits}
    # products round differently for another layout of the weights, such as that of a file
    for name, folder in (("hmt", hmt_demo), ("fox-in-hmt", "fox-in-hmt")):
        hmt = HMTWrapper.from_pretrained(folder, dtype=torch.float32)
        logits[name] = hmt(ids % hmt.config.vocab_size).logits
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(fox, lora).eval()
    adapted.peft_config["default"].base_model_name_or_path = "alice/fox"
    adapted.save_pretrained("adapter")
    logits["adapter"] = adapted(input_ids=ids).logits
save_file(logits, "logits.safetensors")
"""
LOAD = """
import importlib.util
import sys
import evaluate
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

assert importlib.util.find_spec("hf_longctx") is None
logits, same = load_file("logits.safetensors"), True
ids = logits["ids"]
for name in sys.argv[3].split():
    model = AutoModelForCausalLM.from_pretrained(f"alice/{name}", trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        difference = (model(input_ids=ids % model.config.vocab_size).logits - logits[name]).abs().max().item()
    same &= difference == 0
    repo, prompt = ("alice/hmt", sys.argv[2]) if name == "hmt" else ("alice/fox", sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(repo, trust_remote_code=True)
    prompt = tokenizer(prompt, return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)[0])
    print(f"{name}: logits differ by {difference}; it generates {text!r}")
evaluate.utils.logging.disable_progress_bar()
curve, rope = (evaluate.load(f"alice/{name}") for name in sys.argv[4:])
print(curve.compute(predictions=[[[0, 0, 13, 14], [0, 0, 0, 14]]], references=[[11, 12, 13, 14]])["summary"])
print(rope.compute(predictions=[1e4, 5e5], references=[8192, 8192], head_dim=128)["verdicts"])
sys.exit(not same)
"""


def bare_python(folder):
    """Create an interpreter in `folder` with the libraries of this one but without hf_longctx, and return its path."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    return folder / "bin" / "python"


def main():
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "hub")]
    from server import serve

    with tempfile.TemporaryDirectory() as temporary, serve(Path(temporary)) as hub:
        work = Path(temporary, "work")
        work.mkdir()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON"))}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": f"{temporary}/home", "HF_TOKEN": "hf_of_alice"}
        environment |= {
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "HF_HUB_DISABLE_XET": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "PYTHONSAFEPATH": "1",
        }
        with_package = {"PYTHONPATH": str(ROOT)}

        def step(title, *command, **variables):
            start, requests = time.perf_counter(), len(hub.log)
            print(f"\n== {title}", flush=True)
            subprocess.run(
                list(map(str, command)), env=environment | variables, cwd=work, stdin=subprocess.DEVNULL, check=True
            )
            print(f"   {len(hub.log) - requests} requests, {time.perf_counter() - start:.1f} s", flush=True)

        print(f"A Hub at {hub.url}, its blobs at {hub.blob_url}")
        step(
            "create an HMT around the demo FoX, and an adapter",
            *(sys.executable, "-c", SAVE, DEMO, HMT_DEMO, PROMPT),
            **with_package,
        )
        for name, folder in zip(MODELS, (DEMO, HMT_DEMO, "fox-in-hmt", "adapter")):
            command = ("push", folder, f"alice/{name}", *(["--verify"] * (name == "fox")))
            step(f"hf-longctx push {name}", sys.executable, "-m", "hf_longctx", *command, **with_package)
        for name in METRICS:
            command = ("push", name, f"alice/{name}")
            step(f"hf-longctx push {name}", sys.executable, "-m", "hf_longctx", *command, **with_package)
        (work / "facts.txt").write_text(FACT)
        ours = (sys.executable, "-m", "hf_longctx")
        command = ("read", "alice/hmt", "facts.txt", "--output", "state.safetensors")
        step("hf-longctx read", *ours, *command, **with_package)
        upload = "from huggingface_hub.cli.hf import main; main()"
        step("hf upload", sys.executable, "-c", upload, "upload", "alice/memory", "state.safetensors")
        command = ("read", "alice/hmt", "alice/memory@main", QUESTION, "--max-new-tokens", "1")
        step("hf-longctx read the memory", *ours, *command, **with_package)
        python = bare_python(Path(temporary, "python"))
        arguments = (PROMPT, f"{FACT} {QUESTION}", " ".join(MODELS), *METRICS)
        offline = {"HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
        step("load, generate and score without hf_longctx", python, "-c", LOAD, *arguments)
        step("the same, offline", python, "-c", LOAD, *arguments, **offline)
        print(f"\n{len(hub.log)} requests, {len(hub.problems)} problems", *hub.problems, sep="\n")
        return bool(hub.problems)


if __name__ == "__main__":
    sys.exit(main())
