"""Print the folder of the tasks forgetting_curve, position_loss and lines, for lm-eval's --include_path.

    lm_eval run --model hf --model_args pretrained=gpt2 --tasks lines --include_path "$(hf-longctx lm-eval-tasks)"

The tasks run with lm-eval's models hf, vllm and local-completions, lines also with those of chats. --metadata gives
settings: lengths, repeats, seed, text, data_type; context_length, sequences, blocks, text; lines, repeats, seed.

Examples:
  hf-longctx lm-eval-tasks
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    from ..lm_eval import TASKS

    print(TASKS)
