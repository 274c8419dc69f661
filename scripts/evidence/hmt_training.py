"""Train an HMT around a pretrained Llama in two stages, which resume after an interruption."""

import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from hf_longctx.hmt import HMTConfig, HMTWrapper
from scripts.bench import common
from scripts.evidence.parts import OutOfTime, settings_of
from scripts.fetch_model import SMOLLM2


BACKBONES = {"smollm2": SMOLLM2, "llama-demo": common.ROOT / "model_cards" / "llama-demo"}
TEXT = common.ROOT / "demo_output" / "corpus"
HMT = {  # arguments of HMTConfig in the second stage
    "HMT, single pass": {"recall_mode": "single_pass"},
    "HMT, paper": {"recall_mode": "paper"},
    "RMT": {"recall": False, "recall_mode": "paper"},
    "HMT, neural cache": {"neural_cache_weight": 0.1},
    "HMT, tokens read again": {"recall_tokens": None},  # as many as a segment has
}
READ_AGAIN = "HMT, tokens read again"
AS_IT_IS = ", as it is"


def load_backbone(args):
    """Return the backbone in float32."""
    return AutoModelForCausalLM.from_pretrained(BACKBONES[args.backbone], dtype=torch.float32).to(args.device).eval()


def config_of(name, args, stage=2):
    """Return the config arguments of an entry of `HMT`; the first stage does not recall."""
    settings = {"segment_length": args.segment_length, "sensory_tokens": args.sensory_tokens, "summary_batch": 64}
    if stage == 1:
        mode = HMT[name].get("recall_mode", "single_pass")
        return HMTConfig(**settings, recall=False, recall_mode=mode)
    tokens = {"recall_tokens": args.segment_length} if "recall_tokens" in HMT[name] else {}
    return HMTConfig(**settings | HMT[name] | tokens)


def wrap(backbone, name, args, stage=2):
    """Return a new memory around the backbone; arguments as for `config_of`."""
    return HMTWrapper.from_backbone(backbone, config_of(name, args, stage))


def autocast(args):
    """Return autocast to bfloat16 on a GPU, and none on a CPU, where bfloat16 can be seven times as slow."""
    return torch.autocast(args.device, torch.bfloat16, enabled=args.device != "cpu")


def recalls(name):
    """Return whether an entry of `HMT` recalls in the second stage."""
    return HMT[name].get("recall", True)


def recalls_embeddings(name):
    """Return whether it recalls memory embeddings and nothing else."""
    return recalls(name) and not HMT[name].keys() & {"neural_cache_weight", "recall_tokens"}


def new_model(method, args):
    """Return a method's untrained model: the backbone or, for an entry of `HMT`, a memory around it.

    A method that is trained starts from the first stage's model, without recall.
    """
    name, model = method.removesuffix(AS_IT_IS), load_backbone(args)
    if name in HMT:
        model = wrap(model, name, args, stage=1 if name == method else 2)
    return model.eval()


def second_stage(model, name, args):
    """Add the second stage's recall parameters to the first stage's model."""
    if name not in HMT or not recalls(name):
        return model
    second = wrap(model.backbone, name, args)
    weights = {n: x for n, x in model.state_dict().items() if not n.endswith("_extra_state")}  # other settings
    missing, _ = second.load_state_dict(weights, strict=False)
    if "memory.summary_token" in missing:  # initialize it by the prompt of a first segment, which is trained
        with torch.no_grad():
            second.memory.summary_token.copy_(second.memory.initial)
    return second


def train(model, losses_of, steps, file, args, generator):
    """Train on losses_of(step), which yields the parts of a step's loss; return the losses of all steps.

    AdamW, warm-up over a tenth of the steps, then linear decay to a tenth; gradients are clipped at 1. A checkpoint is
    saved in `file` every `args.save_steps` steps, and an interrupted run resumes from it.

    Raises:
        OutOfTime: --minutes are over; everything is in `file`.
        ValueError: `file` is from a training with other options.
    """
    settings = settings_of(args)
    parameters, losses = [x for x in model.parameters() if x.requires_grad], []
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, 1 - 0.9 * step / steps)
    )
    if file.exists():
        saved = torch.load(file, map_location=args.device, mmap=True)
        if saved["settings"] != settings:
            other = sorted(name for name, x in settings.items() if saved["settings"].get(name) != x)
            raise ValueError(
                f"{file} is from a training with other options ({', '.join(other)}). Remove it, or give another --work."
            )
        losses = saved["losses"]
        generator.set_state(saved["generator"].cpu())
        for x, part in ((model, "model"), (optimizer, "optimizer"), (schedule, "schedule")):
            x.load_state_dict(saved[part])
    model.train()
    for step in range(len(losses), steps):
        parts = []
        for loss in losses_of(step):
            loss.backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(round(sum(parts), 3))
        is_over = time.monotonic() > args.until
        if (step + 1) % args.save_steps == 0 or step + 1 == steps or is_over:
            saved = {name: x.state_dict() for name, x in (("model", model), ("optimizer", optimizer))}
            saved |= {"schedule": schedule.state_dict(), "losses": losses, "generator": generator.get_state()}
            saved["settings"] = settings
            torch.save(saved, file.with_suffix(".unfinished"))
            file.with_suffix(".unfinished").rename(file)
        if is_over and step + 1 < steps:
            raise OutOfTime
    model.eval()
    return losses


def tenth(losses):
    """Return the mean of the first tenth."""
    return statistics.mean(losses[: max(1, len(losses) // 10)])
