"""Continue a prompt, printing tokens as they come.

Without --temperature, --top-p or --top-k, generation_config.json of the model says whether it samples.

Examples:
  hf-longctx generate model_cards/fox-demo "She looked at him, and" --max-new-tokens 20
  hf-longctx generate MODEL "Which foxes are grey?" --chat --temperature 0 --json
  hf-longctx generate MODEL "Who is Mr Darcy?" --state state.safetensors
  echo "She looked at him, and" | hf-longctx generate model_cards/fox-demo - --top-p 0.9 --stop .
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="of `hf-longctx read`, or NAMESPACE/NAME@REVISION of one on the Hub: PROMPT follows the text that was read",
    )
    add_generation(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: prompt, text, tokens, finish_reason, settings"
    )


def add_generation(parser: ArgumentParser) -> None:
    """Add the options of `respond`."""
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, metavar="T", help="of sampling; 0 = greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="share of probability sampled from")
    group.add_argument("--top-k", type=int, metavar="K", help="number of likeliest tokens sampled from")
    group.add_argument(
        "--stop", action="append", metavar="STRING", help="end with the token that completes STRING; repeatable"
    )
    group.add_argument("--chat", action="store_true", help="PROMPT is the user's turn in the model's chat template")


def read_prompt(args: Namespace) -> str:
    """Return the prompt, from standard input if it is -, or raise ValueError if it is not UTF-8."""
    try:
        prompt = args.prompt
        if prompt == "-":
            prompt = sys.stdin.read().rstrip("\n") if sys.stdin else ""  # None where it is closed
        prompt.encode()
    except UnicodeError as error:
        raise ValueError(f"the prompt is not UTF-8 ({error}). Convert it, as by: iconv -t UTF-8.") from None
    return prompt


def check(args: Namespace, prompt: str) -> None:
    """Raise ValueError for what would be ignored, or fail only after the model has been loaded."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; give the text to continue in quotes.")
    temperature, top_p, top_k = args.temperature, args.top_p, args.top_k
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"--temperature is {temperature}; it must be 0 (greedy) or a positive number such as 0.8.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"--top-p is {top_p}; it must lie above 0 and be at most 1.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k is {top_k}; it must be at least 1.")
    if temperature == 0 and not top_p is top_k is None:
        raise ValueError("--top-p and --top-k need sampling; leave them out, or give a --temperature above 0.")
    if "" in (args.stop or ()):
        raise ValueError("--stop is empty; give the text that ends the generation.")


def configure(config: Any, args: Namespace) -> None:
    """Change the model's own generation config by the options."""
    if args.temperature == 0:
        config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
    else:
        options = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
        options = {name: value for name, value in options.items() if value is not None}
        if options:
            config.update(do_sample=True, **options)
    config.update(max_new_tokens=args.max_new_tokens, max_length=None, stop_strings=args.stop)


def encode(args: Namespace, tokenizer: Any, prompt: str, continues: bool = False) -> Any:
    """Return the tokens of the prompt, without special ones if it continues a text.

    Raises:
        ValueError: there are none, or the chat template is missing.
    """
    if not args.chat:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not continues)
    elif tokenizer.chat_template is None:
        raise ValueError(
            f"--chat: the tokenizer of {args.model} has no chat template. Leave --chat out to continue the text, or save "
            "a tokenizer that has one."
        )
    else:
        turn = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError(f"the tokenizer of {args.model} makes no token of the prompt {prompt!r}.")
    return inputs


def run(args: Namespace) -> None:
    prompt = read_prompt(args)
    check(args, prompt)
    from ..fox import FoxPreTrainedModel
    from ..hmt.reading import load_state

    model, tokenizer = shared.load_model(args)
    if FoxPreTrainedModel in type(model).mro():
        model.set_attn_implementation("auto")
    respond(args, model, tokenizer, prompt, None if args.state is None else load_state(args.state, model))


def respond(args: Namespace, model: Any, tokenizer: Any, prompt: str, state: Any = None) -> None:
    """Print how the model continues the prompt, which follows the text of `state` if there is one."""
    import torch
    from transformers import TextStreamer

    inputs = encode(args, tokenizer, prompt, continues=state is not None).to(model.device)
    config = model.generation_config
    configure(config, args)
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def refuse_nan(ids, logits):
        if logits.isnan().any():
            raise ValueError(
                f"the logits of {args.model} after {ids.shape[1]} tokens are NaN. Look for damaged weights, or "
                "give --dtype float32."
            )
        return logits

    text_options = {"clean_up_tokenization_spaces": False, "skip_special_tokens": True}
    torch.manual_seed(args.seed)
    ids = model.generate(
        **inputs,
        **({} if state is None else {"state": state}),
        logits_processor=[refuse_nan],
        tokenizer=tokenizer if args.stop else None,
        streamer=None if args.json else TextStreamer(tokenizer, skip_prompt=args.chat, **text_options),
    )
    if args.json:
        new = ids[0, inputs["input_ids"].shape[1] :]
        text = tokenizer.decode(new, **text_options)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        ended = int(new[-1]) in ends or any(stop in text for stop in args.stop or ())
        computed = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device), "seed": args.seed}
        document = {
            "prompt": prompt,
            "text": text,
            "tokens": new.tolist(),
            "finish_reason": "stop" if ended else "length",
            "settings": {
                "model": args.model,
                "chat": args.chat,
                "state": args.state,
                **computed,
                **config.to_diff_dict(),
            },
        }
        print(json.dumps(document, ensure_ascii=False))
