"""Add a memory to a model and train it in two stages, each with `hf-longctx finetune --recipe hmt`.

    python -m scripts.train_hmt MODEL --data books --output_dir run [--segment_length 512] [--segments 15] [options]

The first stage reads sequences of two segments without recall; the second stage reads sequences of `--segments` with
recall (arXiv 2405.06067, section 4: 200 and 500 steps). Other options apply to both stages. Launch it with python,
torchrun or accelerate launch; after an interruption, the same command resumes.
"""

import argparse
from contextlib import suppress

from transformers import AutoConfig

from hf_longctx.cli import main


def saved_length(model: str) -> int:
    """Return the segment length of an HMT, or 512 for another model."""
    with suppress(OSError, ValueError):  # the command reports them
        return getattr(AutoConfig.from_pretrained(model), "segment_length", 512)
    return 512


def stages():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of the backbone, or of an HMT")
    parser.add_argument("--output_dir", required=True, metavar="FOLDER", help="folder of both runs")
    parser.add_argument(
        "--segment_length", type=int, metavar="TOKENS", help="segment length (default: an HMT's own, else 512)"
    )
    parser.add_argument("--segments", type=int, default=15, help="segments per sequence in stage 2 (default: 15)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="fields of the memory")
    args, others = parser.parse_known_args()
    length = args.segment_length or saved_length(args.model)
    fields = ["--set", f"segment_length={length}", *args.set]
    recipe = ["--recipe", "hmt", *fields, *others]
    model = args.model
    for stage, segments, steps in ((1, 2, 200), (2, args.segments, 500)):
        output = f"{args.output_dir}/stage-{stage}"
        sizes = [
            "--max_length",
            str(segments * length),
            "--max_steps",
            str(steps),
            "--output_dir",
            output,
        ]
        if code := main(["finetune", "--model", model, *sizes, *recipe]):
            return code
        model = f"{output}/model"
    return 0


if __name__ == "__main__":
    raise SystemExit(stages())
