"""Detection of callers that HMT does not support: trainers of TRL and prompt-learning methods of PEFT."""

import inspect
from collections.abc import Iterator
from typing import Any


def callers(package: str) -> Iterator[Any]:
    """Yield each `self` on the call stack whose class or base class is defined in `package`, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(base.__module__.partition(".")[0] == package for base in type(owner).__mro__):
            yield owner
        frame = frame.f_back


INSTEAD = "Train with Trainer of transformers, or with hf-longctx finetune --recipe hmt."


def trl_advice() -> str:
    """Return advice if a TRL trainer makes this call, otherwise ""."""
    names = (
        base.__name__ for owner in callers("trl") for base in type(owner).__mro__ if base.__module__[:4] == "trl."
    )
    trainer = next((name for name in names if name.endswith("Trainer")), None)
    if trainer is None:
        return ""
    return (
        f"{trainer} of TRL cannot train an HMT, which does not read packed rows or return the last hidden state of a "
        f"whole sequence. {INSTEAD} {trainer} can train the backbone before it is wrapped: "
        "HMTWrapper.from_backbone(trainer.model, config)."
    )


def check_prompt_learning() -> None:
    """Raise ValueError if this call comes from a prompt-learning method of PEFT."""
    for owner in callers("peft"):
        for config in getattr(owner, "peft_config", {}).values():
            if getattr(config, "is_prompt_learning", False):
                kind = config.peft_type.value.lower().replace("_", " ")
                raise ValueError(
                    f"HMT does not support {kind} of PEFT ({type(config).__name__}), because it adds positions "
                    "outside the segments. Use LoRA: LoraConfig(target_modules='all-linear', "
                    "modules_to_save=['memory'])."
                )


__all__ = ["INSTEAD", "check_prompt_learning", "trl_advice"]
