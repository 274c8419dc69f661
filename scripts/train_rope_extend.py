"""Extend the context of a model by its RoPE base: `hf-longctx finetune --recipe rope-extend`.

To be launched by python, torchrun, or accelerate launch.
"""

import sys

from hf_longctx.cli import main


if __name__ == "__main__":
    raise SystemExit(main(["finetune", "--recipe", "rope-extend", *sys.argv[1:]]))
