"""Pretrain a FoX: `hf-longctx train`.

To be launched by python, torchrun, or accelerate launch.
"""

import sys

from hf_longctx.cli import main


if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
