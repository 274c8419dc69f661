"""Train a 4-bit model of seven billion parameters for two steps with every recipe, on a machine with 24 GB.

    python -m scripts.evidence.seven_billion

The model has the configuration of Llama 2 7B (arXiv 2307.09288, table 1 of its card) and random weights. `hf-longctx
finetune --load_in_4bit` trains it for two steps of 128 tokens, each recipe in its own process. The first process is
killed after a step, and resumes.

The script measures the peak memory of each process, the time of the whole command, and the time between its two
checkpoints. Cached pages of files do not count, because the system can reclaim them. Freed memory leaves the process
immediately. On a CPU, matrices are multiplied in float32, as some processors are a hundred times slower in
bfloat16. The folder of --work takes 30 GB: 14 for the model, 4 for each changed base.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_longctx.corpus import stdlib_text
from scripts.bench import common


TABLE = """
| recipe | peak GB | libraries alone, GB | total seconds | seconds per step | losses | killed |
| {recipe} | {peak:.1f} | {libraries:.1f} | {seconds:.0f} | {step_seconds:.0f} | {losses[0]:.3f} {losses[1]:.3f} | {killed} |
"""
TOKENIZER = common.ROOT / "model_cards" / "fox-demo"
RECIPES = {
    "lora": {},
    "fox-from-llama": {},
    "hmt": {"set": ["segment_length=64", "sensory_tokens=8"]},
    "rope-extend": {},  # base 10000 is below the bound for the 4096 tokens that the model claims
}
ENVIRONMENT = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # returns freed memory to the system


def write_model(folder, args):
    """Write a Llama with random weights in bfloat16, and the tokenizer, unless the folder has it already."""
    if (folder / "text.txt").exists():
        return
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 43 // 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2GB")
    (folder / "text.txt").write_text(stdlib_text("held_out")[:20000])


def anonymous_gb(status):
    """Return the anonymous memory in GB from the text of /proc/PID/status; 0 for a process that has ended."""
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) * 1024 / 1e9 if found else 0


def libraries_gb():
    """Return the anonymous memory in GB of a process that has imported the training libraries."""
    imports = "import bitsandbytes, hf_longctx.training.run"
    code = f"{imports}; print(open('/proc/self/status').read())"
    return anonymous_gb(subprocess.check_output([sys.executable, "-c", code], env=ENVIRONMENT, text=True))


def finetune(settings, kill_after=None):
    """Run `hf-longctx finetune`, and return its exit code, the peak of its anonymous memory in GB and its seconds.

    The process is killed as soon as the folder `kill_after` exists.
    """
    options = [sys.executable, "-m", "hf_longctx", "finetune"]
    for name, value in settings.items():
        options += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    begin, peak = time.monotonic(), 0
    process = subprocess.Popen(options, cwd=common.ROOT, env=ENVIRONMENT)
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        peak = max(peak, anonymous_gb(status.read_text()))
        if kill_after is not None and kill_after.exists():
            process.send_signal(signal.SIGKILL)
        time.sleep(0.1)
    return process.returncode, peak, time.monotonic() - begin


def measure(args):
    model = args.work / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_model(model, args)
    libraries = libraries_gb()
    for number, recipe in enumerate(args.recipes):
        run = args.work / recipe
        shutil.rmtree(run, ignore_errors=True)
        settings = {
            "model": model,
            "recipe": recipe,
            "load_in_4bit": True,
            "merge": False,
            "data": model / "text.txt",
            "output_dir": run,
            "max_length": 128,
            "gradient_accumulation_steps": 1,
            "max_steps": 2,
            "save_steps": 1,
            **RECIPES[recipe],
        }
        killed, first = number == 0, run / "checkpoint-1" / "complete"
        if killed:
            code = finetune(settings, kill_after=first)[0]
            assert code == -signal.SIGKILL, f"{recipe} ended before it was killed, with {code}"
        code, peak, seconds = finetune(settings)
        assert code == 0, f"{recipe} ended with {code}"
        steps = json.loads((run / "trainer_state.json").read_text())["log_history"]
        saved = [(run / f"checkpoint-{step}" / "complete").stat().st_mtime for step in (1, 2)]
        yield {
            "recipe": recipe,
            "peak": peak,
            "libraries": libraries,
            "seconds": seconds,
            "step_seconds": None if killed else saved[1] - saved[0],
            "losses": [step["loss"] for step in steps if "loss" in step],
            "killed": "after step 1" if killed else "",
            "trained_tokens": 256,
        }


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, "seven_billion", layers=32, hidden=4096, recipes=list(RECIPES))
    work = common.ROOT / "demo_output" / "seven_billion"
    parser.add_argument("--work", type=Path, default=work, metavar="FOLDER", help="folder of the model and the runs")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
