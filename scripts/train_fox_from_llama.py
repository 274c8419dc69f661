"""Turn a Llama into a FoX: `hf-longctx finetune --recipe fox-from-llama`.

To be launched by python, torchrun, or accelerate launch.
"""

import sys

from hf_longctx.cli import main


if __name__ == "__main__":
    raise SystemExit(main(["finetune", "--recipe", "fox-from-llama", *sys.argv[1:]]))
