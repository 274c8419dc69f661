"""The common parts of the checks: their list, small models, prompts and tokens, and the comparison of logits."""

import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from hf_longctx import FoxConfig, HMTConfig
from scripts.bench.common import ROOT


DEMO = ROOT / "model_cards" / "fox-demo"
VOCABULARY = 4096  # size of the demo's vocabulary
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
MODELS = {
    "fox_llama": lambda: FoxConfig(**SIZES),
    "fox_pro": lambda: FoxConfig.pro(**SIZES, num_key_value_heads=2),
    "llama": lambda: LlamaConfig(**SIZES, num_key_value_heads=2),
    "hmt": lambda: HMTConfig(  # segments are shorter than most prompts here
        backbone_config=LlamaConfig(**SIZES, num_key_value_heads=2),
        segment_length=16,
        sensory_tokens=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
}


@dataclass(frozen=True)
class Check:
    """`measure(folder)` runs a client on the model in a folder. It raises, or returns a figure of at most `limit`."""

    name: str
    package: str
    figure: str
    limit: float
    minutes: float
    measure: Callable[[Path], float]

    def row(self):
        path = [*sys.path, *map(str, ROOT.glob(".venv-*/lib/*/site-packages"))]
        packages = importlib.metadata.distributions(name=self.package, path=path)
        row = asdict(self) | {"version": next((package.version for package in packages), None)}
        del row["measure"]
        return row


CHECKS: dict[str, Check] = {}


def check(name, package, figure, limit, minutes=10.0):
    """Register a function as the row `name` of the table; `figure` says what it returns."""

    def enter(measure):
        CHECKS[name] = Check(name, package, figure, limit, minutes, measure)
        return measure

    return enter


def make_model(name, folder):
    """Save a random model, all of whose parameters are far from their initial values, with the demo's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def load_tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


def texts(count):
    """Return pieces of English of unequal lengths."""
    paragraphs = re.split(r"\n\n+", (ROOT / "CONTRIBUTING.md").read_text())
    return [text[: 60 + 40 * (i % 4)] for i, text in enumerate(p for p in paragraphs if len(p) > 200)][:count]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def token_ids(batch=2, length=40, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, input_ids=None):
    return model(token_ids() if input_ids is None else input_ids).logits


def difference(a, b):
    """Return the largest difference of two tensors."""
    return (a - b).abs().max().item()
