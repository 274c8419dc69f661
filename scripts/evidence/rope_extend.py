"""Fine-tune SmolLM2-135M with RoPE bases around the bound for its context (Men et al. 2024, Figures 3 and 6).

    python -m scripts.fetch_model smollm2-135m && python -m scripts.evidence.corpus collect
    python -m scripts.evidence.rope_extend --minutes 25 --device cuda [--factors 1 0.01 0.1 10 100] [--seeds 0 1 2]

The paper claims that a base below the bound preserves perplexity but hurts retrieval. Each copy of the model gets one
of --factors times the bound for --length tokens as its base. `hf-longctx finetune` trains all parameters on the same
package sources. The copies are evaluated on held-out projects: loss by position, forgetting curve, needle and line
retrieval. Differences from the first base, the bound itself, are tested in pairs.

--tokens defaults to what fits --minutes, and the same command resumes a stopped run, as in
scripts.evidence.pretraining. --model takes the folder of any model with one RoPE base.
"""

from functools import partial
from pathlib import Path

from transformers import AutoConfig

from hf_longctx.metrics import rope_base_bound, rope_context_bound
from scripts.evidence import corpus
from scripts.evidence.parts import require, run
from scripts.evidence.pretraining import affordable, draw, measure_models, options_parser, table
from scripts.fetch_model import SMOLLM2


SPEED = 6e4  # tokens a second on an H200, a guess from models of 36M parameters


def bases(args):
    """Return the RoPE bases by model name: multiples of the smallest base that satisfies the bound."""
    config = AutoConfig.from_pretrained(args.model)
    bound = rope_base_bound(args.length - 1, head_dim(config)).base
    several = [float(f"{factor * bound:.3g}") for factor in args.factors]
    reach = partial(rope_context_bound, head_dim=head_dim(config))
    return {f"base {base:g}, reaches {reach(base=base)}": base for base in several}


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def with_base(base, args):
    """Return a folder with the model's weights and another RoPE base."""
    folder, source = args.work / f"base_{base:g}", Path(args.model)
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.name != "config.json" and not (folder / file.name).exists():
                (folder / file.name).symlink_to(file.resolve())
        config = AutoConfig.from_pretrained(source)
        config.rope_parameters["rope_theta"] = base
        config.max_position_embeddings = max(config.max_position_embeddings, args.length)
        config.save_pretrained(folder)
    return folder


def measure(args):
    require(Path(args.model))
    several = bases(args)
    args.models = args.models or list(several)
    args.tokens = args.tokens or affordable([SPEED] * len(args.models), args)
    args.data = corpus.encoded_by(args.data, args.model)
    args.work = args.work / f"rope_extend_{args.tokens}"

    def command(name, args):
        options = {"recipe": "lora", "use_peft": "false", "dtype": "float32", "gradient_accumulation_steps": 1}
        return ["finetune"], options | {"model": with_base(several[name], args)}

    yield from measure_models(command, args)


def main(arguments=None):
    sizes = {"length": 8192, "times": 1, "rows": 4, "learning_rates": [1e-4], "prompts": [1024, 2048, 4096, 8192]}
    more = {"factors": [1.0, 0.01, 0.1, 10.0, 100.0], "lines": [10, 20, 40, 80, 160]}
    parser = options_parser(__spec__.name, __doc__, "rope_extend", None, **sizes, **more)
    parser.add_argument("--model", default=str(SMOLLM2), metavar="FOLDER", help="model (default: SmolLM2-135M)")
    run(parser, measure, table, draw, arguments)


if __name__ == "__main__":
    main()
