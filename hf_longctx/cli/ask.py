"""Ask an HMT about a text: read it into the memory, then answer.

TEXT may be the file that `hf-longctx read` has saved, or such a file on the Hub, NAMESPACE/NAME@REVISION; then nothing
is read. With --chat the question is the user's turn in the model's chat template; without, the model continues it.

Examples:
  hf-longctx ask MODEL novel.txt "Who is Mr Darcy?" --chat
  hf-longctx ask MODEL state.safetensors "The name of the ship is" --temperature 0
"""

import math
from argparse import ArgumentParser, Namespace
from typing import Any

from . import read, shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    read.add_text(parser)
    parser.add_argument("question", metavar="QUESTION", help="question about the text, or its continuation")
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature, 0 for greedy decoding (default: what generation_config.json says)",
    )
    group.add_argument("--chat", action="store_true", help="make QUESTION the user's turn in the chat template")


def run(args: Namespace) -> None:
    from pathlib import Path

    from ..hmt.reading import load_state, read_text

    if not args.question.strip():
        raise ValueError("the question is empty; give it in quotes.")
    if args.temperature is not None and not (args.temperature >= 0 and math.isfinite(args.temperature)):
        raise ValueError(
            f"--temperature is {args.temperature}; it must be 0 (greedy) or a positive number such as 0.8."
        )
    saved = args.text.endswith(".safetensors") or ("@" in args.text and not Path(args.text).exists())
    text, name = ("", "") if saved else read.read_source(args.text)
    model, tokenizer = shared.load_model(args)
    inputs = encode(args, tokenizer)
    state = load_state(args.text, model) if saved else read_text(model, tokenizer, text, name=name, progress=True)
    answer(args, model, tokenizer, inputs, state)


def encode(args: Namespace, tokenizer: Any) -> Any:
    """Return the tokens of the question, without special ones where it continues the text.

    Raises:
        ValueError: there are none, or the chat template is missing.
    """
    if not args.chat:
        inputs = tokenizer(args.question, return_tensors="pt", add_special_tokens=False)
    elif tokenizer.chat_template is None:
        raise ValueError(
            f"--chat: the tokenizer of {args.model} has no chat template. Leave --chat out to continue the text, or save "
            "a tokenizer that has one."
        )
    else:
        turn = [{"role": "user", "content": args.question}]
        inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError(f"the tokenizer of {args.model} makes no token of the question {args.question!r}.")
    return inputs


def answer(args: Namespace, model: Any, tokenizer: Any, inputs: Any, state: Any) -> None:
    """Print how the model continues the question, which follows the text of `state`."""
    import torch
    from transformers import TextStreamer

    config = model.generation_config
    if args.temperature == 0:
        config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
    elif args.temperature is not None:
        config.update(do_sample=True, temperature=args.temperature)
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def refuse_nan(ids, logits):
        if logits.isnan().any():
            raise ValueError(
                f"the logits of {args.model} after {ids.shape[1]} tokens are NaN. Look for damaged weights, or "
                "give --dtype float32."
            )
        return logits

    torch.manual_seed(args.seed)
    model.generate(
        **inputs.to(model.device),
        state=state,
        max_new_tokens=args.max_new_tokens,
        logits_processor=[refuse_nan],
        streamer=TextStreamer(
            tokenizer, skip_prompt=args.chat, clean_up_tokenization_spaces=False, skip_special_tokens=True
        ),
    )
