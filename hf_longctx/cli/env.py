"""Print this environment's versions, GPU and attention implementation, for bug reports.

Examples:
  hf-longctx env
"""

import platform
import sys
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version

import torch

from .. import __version__


PACKAGES = (
    "torch", "triton", "transformers", "huggingface-hub", "safetensors", "accelerate", "peft", "datasets", "evaluate",
    "bitsandbytes", "lm-eval", "vllm", "flash-attn", "flash-linear-attention",
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    pass


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def run(args: Namespace) -> None:
    from ..fox.backend_fox import choose_implementation
    from ..fox.configuration_fox import NEWEST, OLDEST, FoxConfig

    has_gpu, dtype = torch.cuda.is_available(), torch.float32
    rows = {"hf-longctx": f"{__version__} (tested with transformers {OLDEST} to {NEWEST})", "Python": sys.version}
    rows |= {"platform": platform.platform()} | {package: version_of(package) for package in PACKAGES}
    rows["torch"] = torch.__version__  # includes the build; the package's metadata may omit it
    if has_gpu:
        properties, dtype = torch.cuda.get_device_properties(0), torch.bfloat16
        rows["CUDA, cuDNN"] = f"{torch.version.cuda}, {torch.backends.cudnn.version()}"
        rows["GPU"] = (
            f"{torch.cuda.device_count()} x {properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    else:
        rows["GPU"] = "none available to torch"
    for tokens in (1, 2048, 16384):
        x = torch.empty(1, tokens, 1, device="cuda" if has_gpu else "cpu", dtype=dtype)
        rows[f"attention of a FoX ('auto'), {tokens:,} tokens"] = choose_implementation(FoxConfig(), x)
    for name, value in rows.items():
        print(f"{name}: {value}")
