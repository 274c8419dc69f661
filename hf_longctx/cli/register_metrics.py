"""Let `evaluate.load` find our metrics by their bare names, as in evaluate.load("forgetting_curve").

Writes one file for each into evaluate's cache of modules. Needed once for each user of a machine.

Examples:
  hf-longctx register-metrics
"""


def add_arguments(parser):
    pass


def run(args):
    from ..metrics import register

    for file in register():
        print(f'evaluate.load("{file.stem}"): {file}')
