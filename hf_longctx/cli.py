"""The command line: hf-longctx curve | rope | generate | train-demo | convert."""

import argparse
import inspect
import sys
from pathlib import Path

from . import __version__


def curve(args):
    """Measure how far a causal language model remembers: its forgetting curve (Liu et al. 2024).

    Writes OUTPUT.json and OUTPUT.png and prints the fine length (copying above 99 %) and the coarse length (copying at
    least 1 % better than guessing from the language). An interrupted run keeps the lengths it has measured.
    """
    from .corpus import load_text
    from .metrics import forgetting_curve, linear_lengths, log_lengths

    model, tokenizer = _load(args)
    tokens = _tokenize(tokenizer, load_text(args.text), args.text)
    longest = _default_max_length(model, len(tokens)) if args.max_length is None else args.max_length
    grid = log_lengths if args.log_lengths else linear_lengths
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    train_length = args.train_length or getattr(model.config, "max_position_embeddings", None)

    def write(result):
        result.save(output.with_name(output.name + ".json"))
        result.plot(output.with_name(output.name + ".png"), train_length=train_length)
        print(result.summary())
        print(f"wrote {output}.png and {output}.json")

    try:
        result = forgetting_curve(
            model,
            tokens,
            lengths=grid(longest, args.points),
            repeats=args.repeats,
            seed=args.seed,
            bos_token_id=args.bos_token_id if args.bos_token_id is not None else tokenizer.bos_token_id,
            eos_token_id=args.eos_token_id if args.eos_token_id is not None else tokenizer.eos_token_id,
            data_type=args.data_type,
            progress=True,
        )
    except BaseException as error:
        if getattr(error, "curve", None) is not None and error.curve.points:
            write(error.curve)
        raise
    write(result)


def rope(args):
    """Does a model's RoPE base support the context that it claims? (arXiv 2405.14591)

    Reads the configuration only. A screening number: many good models violate the bound at their claimed length.
    """
    from transformers import AutoConfig

    from .metrics import rope_report

    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    report = rope_report(config, context_length=args.context_length)
    print(report.to_json(indent=1) if args.json else report)


def generate(args):
    """Continue a prompt, printing tokens as they come."""
    import torch
    from transformers import TextStreamer

    model, tokenizer = _load(args)
    if not args.prompt.strip():
        raise ValueError("the prompt is empty; give the text to continue in quotes.")
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    sampling = dict(do_sample=True, temperature=args.temperature) if args.temperature > 0 else dict(do_sample=False)
    torch.manual_seed(args.seed)
    model.generate(
        **inputs,
        **sampling,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, clean_up_tokenization_spaces=False),
    )


def train_demo(args):
    """Train the small FoX (Pro) of the demo from scratch; run again after an interruption, it goes on."""
    from .corpus import load_text, stdlib_text

    try:
        from .training.copying import train_demo_model
    except ImportError as error:
        raise ImportError(f"training needs more packages ({error}): pip install 'hf-longctx[training]'") from None
    text = stdlib_text("train") if args.text is None else load_text(args.text)
    train_demo_model(text, args.output, steps=args.steps, context=args.context, seed=args.seed)
    print(f"wrote the model and its training log to {args.output}")


def convert(args):
    """Convert a checkpoint folder to FoX, or a FoX folder back.

    official: the authors' implementation. fla: flash-linear-attention. llama: a Llama, Mistral, Qwen2 or Qwen3, which
    gets open forget gates and can then be fine-tuned. Weights pass through memory one tensor at a time. DST appears
    when it is complete.
    """
    from .fox import convert_folder

    convert_folder(args.source, args.destination, args.source_format, args.destination_format, args.decay_time)
    print(f"wrote {args.destination}")


def _load(args):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        args.device = "cpu" if accelerator is None else accelerator.type
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    except ValueError as error:
        raise ValueError(
            f"{args.model} holds a model but no tokenizer that can be loaded ({str(error).splitlines()[0]}). "
            f"Put one there: tokenizer.save_pretrained({args.model!r})."
        ) from error
    return model.to(args.device).eval(), tokenizer


def _tokenize(tokenizer, text, source):
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(set(tokens)) < 2:
        raise ValueError(
            f"the tokenizer turns {source or 'the text'} into {len(tokens)} tokens with {len(set(tokens))} distinct ids; "
            "it does not seem to know this language."
        )
    return tokens


def _default_max_length(model, corpus_tokens):
    """Half of the context that the model claims, as far as the corpus reaches."""
    claimed = getattr(model.config, "max_position_embeddings", None)
    longest = corpus_tokens // 3 if claimed is None else min((claimed - 3) // 2, corpus_tokens // 3)
    print(f"measuring up to {longest} tokens (choose another end with --max-length)", file=sys.stderr)
    return longest


def parser():
    """The argument parser; its sub-commands' help texts are the docstrings of the functions above."""
    top = argparse.ArgumentParser(
        prog="hf-longctx", description="Long-context research in the Hugging Face ecosystem."
    )
    top.add_argument("--version", action="version", version=f"hf-longctx {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function, name, **kwargs):
        summary = function.__doc__.splitlines()[0]
        p = commands.add_parser(name, help=summary, description=inspect.cleandoc(function.__doc__), **kwargs)
        p.formatter_class = argparse.RawDescriptionHelpFormatter
        p.set_defaults(run=function)
        return p

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model")
    model.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    model.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: an accelerator if there is one)")
    model.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the weights")
    model.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")

    p = command(curve, "curve", parents=[model])
    p.add_argument(
        "--text", metavar="SOURCE", help="text file, folder of *.txt or dataset name (default: English from CPython)"
    )
    p.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="longest passage (default: half the claimed context)"
    )
    p.add_argument("--points", type=int, default=16, metavar="N", help="lengths to measure (default: %(default)s)")
    p.add_argument("--log-lengths", action="store_true", help="space the lengths logarithmically")
    p.add_argument("--repeats", type=int, default=10, metavar="N", help="passages per length (default: %(default)s)")
    p.add_argument("--data-type", choices=("order", "random"), default="order", help="running text or random tokens")
    p.add_argument("--bos-token-id", type=int, metavar="ID", help="default: the tokenizer's")
    p.add_argument("--eos-token-id", type=int, metavar="ID", help="default: the tokenizer's")
    p.add_argument("--train-length", type=int, metavar="TOKENS", help="context of training, marked in the picture")
    p.add_argument(
        "--output", default="forgetting_curve", metavar="PATH", help="without ending (default: %(default)s)"
    )

    p = command(rope, "rope")
    p.add_argument("model", metavar="MODEL", help="folder or Hub name of a model, or of its config.json")
    p.add_argument("--context-length", type=int, metavar="TOKENS", help="default: the context that the model claims")
    p.add_argument("--json", action="store_true", help="print JSON instead of text")
    p.add_argument("--trust-remote-code", action="store_true", help="run configuration code that comes with the model")

    p = command(generate, "generate", parents=[model])
    p.add_argument("prompt", metavar="PROMPT")
    p.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    p.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")

    p = command(train_demo, "train-demo")
    p.add_argument("output", metavar="FOLDER")
    p.add_argument("--text", metavar="SOURCE", help="as for `curve` (default: English from CPython)")
    p.add_argument("--steps", type=int, default=600, metavar="N", help="default: %(default)s")
    p.add_argument(
        "--context", type=int, default=768, metavar="TOKENS", help="training context (default: %(default)s)"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")

    p = command(convert, "convert")
    p.add_argument("source", metavar="SRC", help="folder with config.json and safetensors files")
    p.add_argument("destination", metavar="DST", help="folder to make")
    direction = p.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from", dest="source_format", default="fox", choices=("official", "fla", "llama"), help="make a FoX of this"
    )
    direction.add_argument(
        "--to", dest="destination_format", default="fox", choices=("official", "fla"), help="make this of a FoX"
    )
    p.add_argument(
        "--decay-time",
        type=float,
        metavar="TOKENS",
        help="llama: how soon the new gates forget by a factor e (default: 1e5 contexts, hardly ever)",
    )
    return top


def main(argv=None) -> int:
    """Run a command; an expected error is one line on stderr and exit status 1."""
    args = parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # the last: no such device, out of memory
        print(f"hf-longctx: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("hf-longctx: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
