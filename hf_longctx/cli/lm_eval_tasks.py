"""Print the folder of our tasks, such as forgetting_curve and lines, for lm-eval's --include_path.

    lm_eval run --model hf --model_args pretrained=gpt2 --tasks lines --include_path "$(hf-longctx lm-eval-tasks)"

The tasks run with lm-eval's models hf, vllm and local-completions. --metadata gives options, those of the
command of the task, and text, named as by --text.

Examples:
  hf-longctx lm-eval-tasks
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    from ..lm_eval import tasks_folder

    print(tasks_folder())
