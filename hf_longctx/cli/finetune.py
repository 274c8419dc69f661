"""Fine-tune a pretrained model, with LoRA or in full; the same command goes on with a run that was stopped.

Recipes:
  lora            continue the training of any causal language model on other text
  fox-from-llama  turn a Llama, Mistral, Qwen2 or Qwen3 into a Forgetting Transformer and train its gates
  rope-extend     a longer context by a larger RoPE base, chosen by the bound of Men et al. 2024
  hmt             put a memory around a model; called again on what the first stage has trained, make it recall

Examples:
  hf-longctx finetune MODEL --data text.jsonl --sequence-length 2048 --output run
  hf-longctx finetune MODEL --recipe rope-extend --sequence-length 32768 --data books --output run
  hf-longctx finetune --config run/config.yaml --output run
"""

from argparse import SUPPRESS, ArgumentParser, Namespace

from ..training.recipes import FinetuneSettings
from . import train


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=SUPPRESS, metavar="MODEL", help="folder or Hub name")
    train.add_run_arguments(parser, FinetuneSettings)


def run(args: Namespace) -> None:
    train.run_training(args, FinetuneSettings)
