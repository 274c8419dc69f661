"""Let `evaluate.load` find our metrics by their bare names, as in evaluate.load("forgetting_curve").

Writes one file for each into evaluate's cache of modules. Needed once for each user of a machine.

Examples:
  hf-longctx register-metrics
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> None:
    from ..metrics import register

    for file in register():
        print(f'evaluate.load("{file.stem}"): {file}')
